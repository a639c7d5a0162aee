"""One configuration in a process of its own."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from attnscope.studies.records import Row

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

ENDING_S = 30.0  # time limit for a process to exit after its record
PRELOADED = ["torch", "attnscope.profile"]  # of the server; neither touches the GPU


class Keyed(Protocol):
    """A run whose `key` distinguishes its record from the records of other runs."""

    @property
    def key(self) -> Row: ...


R = TypeVar("R", bound=Keyed)


def run_apart(run: R, timeout_s: float, measure: Callable[[R], Row]) -> Row:
    """Run `measure` in a process of its own; returns a record even if that process dies.

    Processes are forked from a server that has PyTorch loaded and has not touched the GPU.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(measure, run, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if receiver.poll(timeout_s):
            record = receiver.recv()
            process.join(ENDING_S)  # the next one needs the memory
            return record
        reason = f"took longer than {timeout_s:g} s"
    except EOFError:
        process.join()
        reason = _ending(process.exitcode or 0)
    finally:
        process.kill()
        process.join()
    return run.key | {"status": "failed", "reason": reason}


def _child(measure: Callable[[R], Row], run: R, sender: Connection) -> None:
    from attnscope.bench.impls import Unsupported
    from attnscope.common.console import explain

    # Ctrl-C reaches every process of a terminal; the one that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        record = measure(run)
    except Unsupported as refusal:
        record = run.key | {"status": "skipped", "reason": str(refusal)}
    except Exception as error:
        record = run.key | {"status": "failed", "reason": explain(error)}
    sender.send(record)


def _ending(code: int) -> str:
    if code >= 0:
        return f"its process ended with code {code} and no result"
    name = signal.Signals(-code).name
    memory = ": perhaps by the kernel, for want of memory" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{memory}"
