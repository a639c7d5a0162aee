"""Interrupts in tests, independent of the signal handling of the parent process."""

import signal


def interruptible() -> None:
    """For `preexec_fn`: SIGINT ends the process. Otherwise a child of a process that ignores
    SIGINT (`nohup make test &`) ignores it too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def uninterruptible() -> None:
    """For `preexec_fn`: SIGINT is ignored, as after `nohup ... &`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
