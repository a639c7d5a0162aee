"""Attention kernels written by hand, and the instruments that prove what they do."""

from attnscope.functional import attention, attention_varlen

__all__ = ["attention", "attention_varlen"]
__version__ = "0.1.0"
