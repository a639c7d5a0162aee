"""Errors for profiles whose numbers cannot be trusted."""

from __future__ import annotations


class ProfileError(RuntimeError):
    """A profile that is incomplete or contradicts itself; no number of it can be trusted."""


class LostEvents(ProfileError):
    """Launches without a kernel: some events were not recorded."""
