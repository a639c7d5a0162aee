"""Records a region with PyTorch's profiler."""
