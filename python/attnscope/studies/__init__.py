"""Complete reports, built on `attnscope.profile` and `attnscope.bench`."""
