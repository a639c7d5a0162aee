"""`attnscope plot` as a script:

python benchmarks/visualize_results.py --input benchmark_results.json --output-dir plots/
"""

from pathlib import Path
from typing import Annotated

import typer

from attnscope.bench.plots import plot_command


def main(
    input_: Annotated[
        list[Path], typer.Option("--input", help="Result file of benchmark_attention.py.")
    ],
    output_dir: Annotated[Path, typer.Option(help="Where PNG and SVG files go.")] = Path("plots"),
    baseline: Annotated[
        str | None, typer.Option(help="Impl that ratios are taken to; left out, the run's.")
    ] = None,
) -> None:
    """Plot result files: throughput, ratio to a baseline, share of the roof; CPU latency."""
    plot_command(input_, output_dir, baseline)


if __name__ == "__main__":
    typer.run(main)
