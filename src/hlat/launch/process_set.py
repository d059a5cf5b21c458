"""The processes of one attempt of a run, however they were started, and what may be left of them at the end.

``ProcessSet`` is what watching needs to know. A rank leads a session of its own, so that what it starts (the process that
writes its checkpoints, those that tokenize) can be found when it has gone, and ended.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from hlat.runtime.process import session_is_alive

_POLL = 0.05


class ProcessSet(Protocol):
    """Processes that together are one run, by rank."""

    @property
    def pids(self) -> dict[int, int]:
        """The process id of each rank."""

    def poll(self, rank: int) -> int | None:
        """How a rank ended: its exit code, or minus the signal that ended it; None while it runs."""

    def error_file(self, rank: int) -> Path:
        """Where a rank leaves its report."""


def send_signal(workers: ProcessSet, ranks: Sequence[int], number: int) -> None:
    """Send a signal to ranks that have not been polled as ended, not to what they started: that is theirs to end."""
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.kill(workers.pids[rank], number)


def kill_ranks(workers: ProcessSet, ranks: Sequence[int]) -> None:
    """End ranks at once, stopped ones too, and wait until they have gone."""
    send_signal(workers, ranks, signal.SIGKILL)
    for rank in ranks:
        while workers.poll(rank) is None:
            time.sleep(_POLL)


def end_leftovers(workers: ProcessSet, savers: set[int], grace: float, hurries: Callable[[], bool]) -> None:
    """End what the ranks, which have ended, have left behind.

    Args:
        workers: all of them polled as ended.
        savers: processes beside them that write checkpoints, which lead sessions of their own.
        grace: seconds in which a save that is under way may still become whole.
        hurries: asked again and again; once it says so, nothing is waited for.
    """
    leaders = {*workers.pids.values(), *savers}
    for leader in leaders:  # a process that was stopped with its rank could not finish
        _signal_group(leader, signal.SIGCONT)
    deadline = time.monotonic() + grace
    while not hurries() and time.monotonic() < deadline and session_is_alive(leaders):
        time.sleep(_POLL)
    for leader in leaders:
        _signal_group(leader, signal.SIGKILL)


def _signal_group(leader: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)
