"""Show what ncu reports contain: what limits each kernel, roofline, stalls, or what moved.

python profiling/analyze_ncu.py report.ncu-rep
python profiling/analyze_ncu.py before.ncu-rep after.ncu-rep --format markdown

A report is a .ncu-rep, a raw page as .csv, or a folder of `attnscope ncu`. Without NVIDIA's module
ncu_report a .ncu-rep needs ncu on this machine.
"""

import typer

from attnscope.nsight.ncu_command import analyze_command

if __name__ == "__main__":
    typer.run(analyze_command)
