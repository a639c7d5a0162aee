"""`attnscope bench` as a script:

python benchmarks/benchmark_attention.py --seq-lengths 128,256,512 --output benchmark_results.json
"""

import typer

from attnscope.bench.command import bench_command

if __name__ == "__main__":
    typer.run(bench_command)
