"""Time one attention call by CUDA events, a CUDA graph, PyTorch's profiler, nsys and ncu:

python profiling/reconcile_tools.py --impl cuda --workload b4-s4096-h16-d128-causal --backward
"""

import typer

from attnscope.studies.ops.tools import reconcile_command

if __name__ == "__main__":
    typer.run(reconcile_command)
