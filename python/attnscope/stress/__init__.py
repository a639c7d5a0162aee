"""Injected delays: the protocols of the Hopper kernels under late copies, releases and tiles."""
