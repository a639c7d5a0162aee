"""Injected delays: the Hopper kernel's protocol under late copies, releases and tiles."""
