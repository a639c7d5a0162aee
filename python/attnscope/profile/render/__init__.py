"""A profile in the terminal, as an HTML page, and as files."""
