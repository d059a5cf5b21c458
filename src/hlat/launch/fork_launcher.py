"""``hlat train`` in one process: it is forked from the supervisor, before that has imported torch.

supervisor, some 40 MB --fork--> session of its own --work--> exit code, report

A restart then costs what starting anew costs and no more, and a supervisor costs next to nothing beside its run.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from hlat.runtime.process import INTERRUPTED_MESSAGE, LAUNCHER_ENV, STOP_SIGNALS, stop_exit_code


class ForkedWorker:
    """One process as the processes of a run.

    Args:
        work: what it does; gives its exit code.
        environment: variables that are set in it.
        folder: where its report goes.
    """

    def __init__(self, work: Callable[[], int], environment: Mapping[str, str], folder: Path) -> None:
        self._error_file = folder / "error-0.json"
        own = {**environment, "TORCHELASTIC_ERROR_FILE": str(self._error_file), LAUNCHER_ENV: str(os.getpid())}
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or both would write what waits there
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_enter, args=(work, own), name="hlat")
        with _held_back():
            self._process.start()

    @property
    def pids(self) -> dict[int, int]:
        """That of rank 0."""
        assert self._process.pid is not None, "it was started"
        return {0: self._process.pid}

    def poll(self, rank: int) -> int | None:
        """How it ended; None while it runs."""
        assert rank == 0
        return self._process.exitcode

    def error_file(self, rank: int) -> Path:
        """Where it leaves its report."""
        assert rank == 0
        return self._error_file

    def end(self) -> None:
        """Kill it, if it still runs."""
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()


@contextmanager
def _held_back() -> Iterator[None]:
    """Deliver signals later: one that came between the fork and the child's own handlers would be lost there."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _enter(work: Callable[[], int], environment: Mapping[str, str]) -> None:
    os.setsid()  # a terminal's Ctrl-C reaches the supervisor only, which passes it on once
    os.environ.update(environment)
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupted_early if number == signal.SIGINT else signal.SIG_DFL)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        code = work()
    except KeyboardInterrupt:
        with suppress(OSError):
            print(INTERRUPTED_MESSAGE, file=sys.stderr, flush=True)  # noqa: T201  (what is ended is a command)
        code = stop_exit_code(signal.SIGINT)
    sys.exit(code)


def _interrupted_early(number: int, frame: FrameType | None) -> None:
    """Ctrl-C before the work listens to it, in the seconds of imports."""
    os.write(2, f"{INTERRUPTED_MESSAGE}\n".encode())
    os._exit(stop_exit_code(number))


@contextmanager
def launch_forked(work: Callable[[], int], environment: Mapping[str, str], folder: Path) -> Iterator[ForkedWorker]:
    """Do some work in a process of its own; one that still runs at the end is ended.

    Args:
        work: gives the exit code.
        environment: variables that are set in it.
        folder: where its report goes.
    """
    process = ForkedWorker(work, environment, folder)
    try:
        yield process
    finally:
        process.end()  # after a bug of ours
