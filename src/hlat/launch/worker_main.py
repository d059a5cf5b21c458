"""Set up a process of a run for its launcher: stop signals, parent death, error reports, heartbeats.

launcher dies --> stop    exception --> error report    stop signal before there is anything to save --> exit code
phases, steps --> heartbeat
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from hlat.launch.error_report import report_errors
from hlat.launch.parent_death import stop_with_launcher
from hlat.resilience import running_heartbeat
from hlat.runtime.bottom_line import erase_line
from hlat.runtime.process.exit_codes import STOP_SIGNALS, stop_exit_code
from hlat.runtime.process.lossy_output import let_output_be_lost
from hlat.runtime.process.process_status import LAUNCHER_ENV
from hlat.runtime.rank_env import rank_info


@contextmanager
def worker_context() -> Iterator[None]:
    """Run the block as a process of a run; without a launcher, only signals are set up.

    Raises:
        SystemExit: an exception left the block, and was reported.
        LaunchError: the environment variables of the rank are invalid.
    """
    let_output_be_lost()
    _stop_early()
    stop_with_launcher()
    with report_errors(), running_heartbeat(rank_info().rank):
        yield


def _stop_early() -> None:
    """Exit at once on a stop signal, until training handles these signals: there is nothing to save yet."""
    for number in STOP_SIGNALS:
        # Ctrl-C raises KeyboardInterrupt. Ignored signals (nohup, a shell's background job) stay ignored.
        if number != signal.SIGINT and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _exit_before_training)


def _exit_before_training(number: int, frame: FrameType | None) -> None:
    # With a launcher, the launcher prints the message: it may have sent the signal after another rank failed.
    erase_line()
    if os.environ.get("RANK", "0") == "0" and not {LAUNCHER_ENV, "TORCHELASTIC_RUN_ID"} & os.environ.keys():
        name = signal.Signals(number).name
        with suppress(OSError):
            os.write(2, f"{name}: ended before the first step; run the same command again\n".encode())
    os._exit(stop_exit_code(number))
