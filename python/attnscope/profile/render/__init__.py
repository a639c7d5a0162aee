"""A profile on the terminal, as a page, as files."""
