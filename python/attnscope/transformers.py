"""The old name of `attnscope.integrations.transformers`."""

import warnings

from attnscope.integrations.transformers import NAME, forward, mask, register, require

__all__ = ["NAME", "forward", "mask", "register", "require"]

warnings.warn(
    "attnscope.transformers is the old name; import attnscope.integrations.transformers",
    DeprecationWarning,
    stacklevel=2,
)
