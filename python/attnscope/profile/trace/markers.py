"""Names of the events by which the profiler marks a recording."""

from __future__ import annotations

# A range with a few small kernels at each end of a window. The profiler loses events at the ends of
# a capture first, so the reader removes these kernels and counts them.
SENTINEL = "attnscope::sentinel"
SENTINEL_KERNEL = "spin_kernel"  # of torch.cuda._sleep
WAIT = "attnscope::wait"  # around the profiler's own synchronisation at each end of a region
# Empty ranges: one at the start of each step, with its number and, after STEP_OF, the name of the
# range that begins a step; one at the last step's end.
STEP = "attnscope::step#"
STEP_OF = " of "
STEPS_END = f"{STEP}end"
# PyTorch's range around a step that the program marks; its number is no part of a stage's name.
PROFILER_STEP = "ProfilerStep"
BEGIN_CAPTURE = ("cudaStreamBeginCapture", "cuStreamBeginCapture")
END_CAPTURE = ("cudaStreamEndCapture", "cuStreamEndCapture")
GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
