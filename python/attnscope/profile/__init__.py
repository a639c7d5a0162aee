"""Where GPU time went, with the proof that nothing is missing and nothing is counted twice."""

from attnscope.profile.api import Profile
from attnscope.profile.errors import ProfileError
from attnscope.profile.record.session import annotate, profile

__all__ = ["Profile", "ProfileError", "annotate", "profile"]
