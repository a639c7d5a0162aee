"""Profile the kernels of attention impls; also a ready target for ncu and nsys:

python profiling/profile_kernels.py --seq-len 512 --impl flash --backward
ncu --set full --nvtx --nvtx-include attnscope@cuda-forward/ -o report \\
    python profiling/profile_kernels.py --impl cuda,flash --iterations 1
nsys profile --trace cuda,nvtx -o report python profiling/profile_kernels.py --impl cuda,flash
nsys stats --report cuda_gpu_kern_sum --filter-nvtx cuda-forward@attnscope report.nsys-rep

Each impl and pass has an NVTX range (cuda-forward, sdpa-flash-backward) inside measure. Under these
tools PyTorch's profiler stays off by itself, and this script writes no files.
"""

import typer

from attnscope.studies.attention import attention_command

if __name__ == "__main__":
    typer.run(attention_command)
