"""The program that nsys records for a configuration of a language model.

`python -m attnscope.studies.lm.nsys_step RUN RECORD`: RUN is a `Run` as JSON. It warms up, times
steps, and runs one more between cudaProfilerStart and Stop. The record goes to the file RECORD, one
of a failure too. Every op of the recorded step is an NVTX range with its autograd number.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from attnscope.studies.lm.model import ModelConfig
from attnscope.studies.lm.run import Run, time_steps


def run_as_json(run: Run) -> str:
    return json.dumps(asdict(run))


def main(text: str, path: Path) -> int:
    """Run one configuration; returns the exit code."""
    import torch

    from attnscope.bench.impls import Unsupported
    from attnscope.common.console import explain

    values = json.loads(text)
    run = Run(**values | {"config": ModelConfig(**values["config"])})
    status, reason = "ok", None
    record = run.key
    try:
        training, record = time_steps(run)
        torch.cuda.profiler.start()
        with torch.autograd.profiler.emit_nvtx():
            training.step()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    except Unsupported as refusal:
        status, reason = "skipped", str(refusal)
    except Exception as error:
        status, reason = "failed", explain(error)
    path.write_text(json.dumps(record | {"status": status, "reason": reason}, allow_nan=False))
    return int(status == "failed")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
