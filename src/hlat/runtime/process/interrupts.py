"""Ctrl-C as KeyboardInterrupt that is never lost, and never leaves Python's import lock taken.

    SIGINT while importlib changes its locks --> the same signal again, a moment later
    KeyboardInterrupt where Python must drop it (a callback of a weak reference, ``__del__``) --> likewise
    SIGINT anywhere else --> KeyboardInterrupt

Python's own handler raises wherever it is. importlib takes its global lock in a callback of a weak reference: an
interrupt there is dropped, and the lock stays taken. The command then goes on, and in a process that it forks the first
thread that imports anything waits for ever.
"""

import _thread
import os
import signal
import sys
import time
from types import FrameType
from typing import Any

_LOCKING = "<frozen importlib._bootstrap>"  # name of the file of the functions that take import locks
_COMMAND = "hlat.command"  # module of the handler that the command begins with
_MOMENT = 0.005  # seconds


def raise_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt in this process; no effect if SIGINT is ignored, as in a background job."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return
    signal.signal(signal.SIGINT, _interrupt)
    if not isinstance(sys.unraisablehook, _Repeat):
        sys.unraisablehook = _Repeat(sys.unraisablehook)


def end_at_sigterm() -> None:
    """Let SIGTERM end this process as it ends any program; no effect if it is ignored.

    The command ``hlat`` says of an earlier one that nothing had been started (``hlat.command``).
    """
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def after_start(handler: Any) -> Any:
    """Return what handles a signal after processes have run: the same handler, or the default for that of ``hlat``.

    The command's own handler (``hlat.command``) says that nothing had been started, which is no longer true.
    """
    return signal.SIG_DFL if getattr(handler, "__module__", None) == _COMMAND else handler


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, now or as soon as no import lock is being changed."""
    if frame is not None and frame.f_code.co_filename == _LOCKING:
        _repeat()
        return
    raise KeyboardInterrupt


class _Repeat:
    """A hook for exceptions that Python drops: sends the signal of a dropped KeyboardInterrupt again."""

    def __init__(self, other: Any) -> None:
        self._other = other

    def __call__(self, dropped: Any) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            _repeat()
        else:
            self._other(dropped)


def _repeat() -> None:
    """Send SIGINT to this process in a moment. A thread of ``threading`` takes locks, which handlers must not."""
    _thread.start_new_thread(_interrupt_later, (os.getpid(),))


def _interrupt_later(process: int) -> None:
    time.sleep(_MOMENT)
    os.kill(process, signal.SIGINT)
