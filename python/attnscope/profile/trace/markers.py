"""Names of the events by which the profiler marks a recording."""

from __future__ import annotations

# A range with a few small kernels, at each end of a window. Work lost at an end of a capture is
# lost here first, so the reader takes the kernels out and counts them.
SENTINEL = "attnscope::sentinel"
SENTINEL_KERNEL = "spin_kernel"  # of torch.cuda._sleep
WAIT = "attnscope::wait"  # around the profiler's own synchronisation at each end of a region
# An empty range where a step of a training loop begins, and its number; and where the last ended.
STEP = "attnscope::step#"
STEPS_END = f"{STEP}end"
BEGIN_CAPTURE = ("cudaStreamBeginCapture", "cuStreamBeginCapture")
END_CAPTURE = ("cudaStreamEndCapture", "cuStreamEndCapture")
