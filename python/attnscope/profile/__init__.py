"""Where GPU time went, with checks that no kernel is missing and none is counted twice."""

from attnscope.profile.api import Profile
from attnscope.profile.errors import ProfileError
from attnscope.profile.record.session import annotate, profile

__all__ = ["Profile", "ProfileError", "annotate", "profile"]
