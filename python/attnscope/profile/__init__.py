"""Where GPU time went, with the proof that nothing is missing and nothing is counted twice."""

from attnscope.profile.checks import ProfileError
from attnscope.profile.result import Profile
from attnscope.profile.session import annotate, profile

__all__ = ["Profile", "ProfileError", "annotate", "profile"]
