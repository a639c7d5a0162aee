"""Workloads, implementations, timing and results: `attnscope bench` and `attnscope check`."""
