"""Interrupts in tests, whatever those who started the tests do with them."""

import signal


def interruptible() -> None:
    """For `preexec_fn`: SIGINT ends the process. Without it a process that was started where
    SIGINT is ignored (`nohup make test &`) ignores it too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def uninterruptible() -> None:
    """For `preexec_fn`: SIGINT is ignored, as after `nohup ... &`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
