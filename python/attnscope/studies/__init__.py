"""Whole reports, made from the parts of `attnscope.profile` and `attnscope.bench`."""
