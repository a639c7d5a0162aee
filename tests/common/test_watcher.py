"""The end of a process in the middle of its work is reported, however it ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from attnscope.common import watcher

FOLDER = Path(watcher.__file__).parent
PROGRAM = """
import os, signal, sys
sys.path.insert(0, {folder!r})
from watcher import begin_step, watched
with watched("made", "first", "The rest is kept"):
    begin_step("second\\nstep")
    {end}
print("end")
"""
LINE = "made: the process ended in this step: second step. The rest is kept\n"


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("pass", ""),
        ("sys.exit(3)", ""),
        ("os._exit(0)", LINE),
        ("os.kill(os.getpid(), signal.SIGKILL)", LINE),
        ("os.killpg(0, signal.SIGTERM)", LINE),
        ("os.kill(os.getpid(), signal.SIGSEGV)", LINE),
    ],
)
def test_every_end_but_an_exception_is_reported(end: str, said: str) -> None:
    program = PROGRAM.format(folder=str(FOLDER), end=end)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, start_new_session=True
    )
    crashed = "Fatal Python error: Segmentation fault" in done.stderr
    assert crashed == ("SEGV" in end) and done.stderr.endswith(said)
    assert bool(done.stderr) == bool(said)


def children() -> set[str]:
    files = Path("/proc/self/task").glob("*/children")
    return {number for path in files for number in path.read_text().split()}


def test_the_shell_is_no_child_of_the_process() -> None:
    before = children()  # of other tests in this process
    with watcher.watched("made", "first", "nothing"):
        assert children() <= before
