"""Shared helpers of all other packages; imports none of them."""
