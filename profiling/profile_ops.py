"""Compare the operator table with the raw trace and CUDA events, for our ops and their peers:

python profiling/profile_ops.py --output docs/reports/h200
"""

import typer

from attnscope.studies.ops.command import ops_command

if __name__ == "__main__":
    typer.run(ops_command)
