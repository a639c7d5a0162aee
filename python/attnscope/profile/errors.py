"""What is raised where no number of a profile can be trusted."""

from __future__ import annotations


class ProfileError(RuntimeError):
    """A profile that is incomplete or contradicts itself; no number of it can be trusted."""


class LostEvents(ProfileError):
    """Launches without a kernel: what was recorded is less than what ran."""
