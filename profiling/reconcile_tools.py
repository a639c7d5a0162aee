"""Time one attention call by CUDA events, a CUDA graph, PyTorch's profiler and nsys, in one table:

python profiling/reconcile_tools.py --impl cuda --seq-len 4096 --backward
"""

import typer

from attnscope.studies.ops.tools import reconcile_command

if __name__ == "__main__":
    typer.run(reconcile_command)
