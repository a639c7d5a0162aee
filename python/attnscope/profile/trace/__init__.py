"""Reads a chrome trace of PyTorch's profiler."""
