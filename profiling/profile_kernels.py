"""Profile the kernels of one attention impl; works as it is as the target of ncu and nsys:

python profiling/profile_kernels.py --seq-len 512 --impl flash
ncu --set full python profiling/profile_kernels.py --impl flash
nsys profile python profiling/profile_kernels.py --impl flash
"""

import typer

from attnscope.profile.attention_command import attention_command

if __name__ == "__main__":
    typer.run(attention_command)
