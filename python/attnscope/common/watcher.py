"""Reports the end of this process in the middle of its work, however it ends.

Python reports exceptions. A crash in native code is reported by faulthandler. SIGKILL (as sent when
memory runs out), SIGTERM and os._exit run no code of this process: a shell beside it reports them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

# Reads steps until "done" or the end of the pipe. It runs in the background of a shell that has
# ended, so it is no child of this process; in a session of its own, so that no signal to this
# process's group ends it.
_SHELL = """
exec 3<&0
(at=$1
while read -r line <&3; do
  [ "$line" = done ] && exit
  at=$line
done
echo "$0: the process ended in this step: $at. $2" >&2) &
"""
_open: list[IO[str]] = []  # a pipe to the shell while a block is watched


@contextmanager
def watched(command: str, step: str, remedy: str) -> Iterator[None]:
    """If the process ends in this block, a line on stderr says so, with its last step.

    Args:
        command: name of the command; begins the line.
        step: the first step; `begin_step` names the next one.
        remedy: a sentence that ends the line.
    """
    with contextlib.suppress(ValueError, OSError):  # a stderr without a file, such as a test's
        if not faulthandler.is_enabled():
            faulthandler.enable()
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _SHELL, command, step, remedy],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
    except OSError:  # no shell, or no process left: the work goes on without it
        yield
        return
    assert process.stdin is not None
    _open.append(process.stdin)
    process.wait()  # the part that reads goes on in the background
    try:
        yield
    finally:
        _open.remove(process.stdin)
        _write(process.stdin, "done")
        with contextlib.suppress(OSError):
            process.stdin.close()


def begin_step(step: str) -> None:
    """Name the step that begins, for the line of `watched`."""
    for pipe in _open:
        _write(pipe, step)


def _write(pipe: IO[str], line: str) -> None:
    with contextlib.suppress(OSError):
        pipe.write(line.replace("\n", " ") + "\n")
        pipe.flush()
