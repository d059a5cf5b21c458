"""Launch ``hlat train`` in one process, forked from the supervisor before the supervisor has imported torch.

supervisor, about 40 MB --fork--> worker in its own session --work--> exit code, error report

A restart costs no more than a new start, and the supervisor uses little memory during the run.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from hlat.runtime.bottom_line import erase_line
from hlat.runtime.process.exit_codes import INTERRUPTED_MESSAGE, STOP_SIGNALS, stop_exit_code
from hlat.runtime.process.process_status import LAUNCHER_ENV


class ForkedWorker:
    """A forked worker process as a set of one process.

    Args:
        work: function that the worker runs; it returns the exit code.
        environment: variables to set in the worker.
        folder: folder of its error report.
    """

    def __init__(self, work: Callable[[], int], environment: Mapping[str, str], folder: Path) -> None:
        self._error_file = folder / "error-0.json"
        own = {**environment, "TORCHELASTIC_ERROR_FILE": str(self._error_file), LAUNCHER_ENV: str(os.getpid())}
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or both processes would write the buffered text
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_run_worker, args=(work, own), name="hlat")
        with _signals_blocked():
            self._process.start()

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank; this launcher has rank 0 only."""
        assert self._process.pid is not None, "it was started"
        return {0: self._process.pid}

    def poll(self, rank: int) -> int | None:
        """Exit code of the worker; None while it runs."""
        assert rank == 0
        return self._process.exitcode

    def error_file(self, rank: int) -> Path:
        """Path of the worker's error report."""
        assert rank == 0
        return self._error_file

    def end(self) -> None:
        """Kill the worker if it is still running."""
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block signals within the block: one between the fork and the child's own handlers would be lost in the child."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_worker(work: Callable[[], int], environment: Mapping[str, str]) -> None:
    os.setsid()  # a terminal's Ctrl-C reaches the supervisor only, which forwards it once
    os.environ.update(environment)
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupted_early if number == signal.SIGINT else signal.SIG_DFL)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        code = work()
    except KeyboardInterrupt:
        print(INTERRUPTED_MESSAGE, file=sys.stderr, flush=True)  # noqa: T201  (output of the command)
        code = stop_exit_code(signal.SIGINT)
    sys.exit(code)


def _interrupted_early(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C during imports, before the work handles it itself."""
    erase_line()
    with suppress(OSError):
        os.write(2, f"{INTERRUPTED_MESSAGE}\n".encode())
    os._exit(stop_exit_code(number))


@contextmanager
def launch_forked(work: Callable[[], int], environment: Mapping[str, str], folder: Path) -> Iterator[ForkedWorker]:
    """Run ``work`` in a forked process; kill the process at the end of the block if it is still running.

    Args:
        work: function that the worker runs; it returns the exit code.
        environment: variables to set in the worker.
        folder: folder of its error report.

    Yields:
        The worker.
    """
    process = ForkedWorker(work, environment, folder)
    try:
        yield process
    finally:
        process.end()  # needed after a bug in hlat
