"""What a process of a run does for whoever started it, from its first moment on.

launcher gone --> stop      an exception --> report      a stopping signal before there is anything to save --> its code
phases, steps --> heartbeat
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from hlat.launch.error_report import report_errors
from hlat.launch.parent_death import stop_with_launcher
from hlat.resilience import beating
from hlat.runtime import rank_info
from hlat.runtime.process import LAUNCHER_ENV, STOP_SIGNALS, stop_exit_code


@contextmanager
def worker_context() -> Iterator[None]:
    """Work for a launcher, if there is one.

    Raises:
        SystemExit: an exception has passed, and was reported.
        LaunchError: the environment does not describe a place among the processes.
    """
    _stop_early()
    stop_with_launcher()
    with report_errors(), beating(rank_info().rank):
        yield


def _stop_early() -> None:
    """Until training listens to these signals there is nothing to be saved: end, and be queued again."""
    for number in STOP_SIGNALS:
        # Ctrl-C interrupts, with a line; what is ignored (nohup, a shell's background job) stays so.
        if number != signal.SIGINT and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    # Where a launcher started this process it is for that to speak: it may have signalled after another one's failure.
    if os.environ.get("RANK", "0") == "0" and not {LAUNCHER_ENV, "TORCHELASTIC_RUN_ID"} & os.environ.keys():
        name = signal.Signals(number).name
        with suppress(OSError):
            os.write(2, f"{name}: ended before the first step; the same command begins again\n".encode())
    os._exit(stop_exit_code(number))
