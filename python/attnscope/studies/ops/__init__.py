"""The operator table beside the raw trace and CUDA events."""
