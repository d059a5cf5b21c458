"""The processes of one attempt of a run, and cleanup of processes that they leave behind.

The protocol ``ProcessSet`` is the same for every launcher. A rank leads its own session, so that processes which it
started (the saver of checkpoints, tokenizer workers) can be found and ended after the rank has exited.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hlat.runtime.process.process_status import session_is_alive

_POLL = 0.05


@dataclass(frozen=True)
class RankPlaces:
    """Ranks of one machine in a run, and where they meet.

    Attributes:
        first: its first rank.
        nproc: number of its ranks.
        world: number of all ranks.
        node: number of the machine.
        address: address of the store.
        port: port of the store.
    """

    first: int
    nproc: int
    world: int
    node: int
    address: str
    port: int


class ProcessSet(Protocol):
    """The processes of one run, by rank."""

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""

    def poll(self, rank: int) -> int | None:
        """Exit code of a rank, or minus the signal that ended it; None while it runs."""

    def error_file(self, rank: int) -> Path:
        """Path of a rank's error report."""


def send_signal(
    workers: ProcessSet, ranks: Sequence[int], number: int, send: Callable[[int, int], None] = os.kill
) -> None:
    """Send a signal to ranks that are not known to have ended; their child processes do not get it.

    Args:
        workers: the processes.
        ranks: those that get the signal.
        number: the signal.
        send: sends a signal to a process id: to the process, or ``signal_main_thread`` to its main thread.
    """
    for rank in ranks:
        with suppress(ProcessLookupError):
            send(workers.pids[rank], number)


def kill_ranks(workers: ProcessSet, ranks: Sequence[int]) -> None:
    """Kill ranks, including stopped ones, and wait until they have ended."""
    send_signal(workers, ranks, signal.SIGKILL)
    for rank in ranks:
        while workers.poll(rank) is None:
            time.sleep(_POLL)


def end_leftovers(
    workers: ProcessSet, savers: set[int], silence: Callable[[], float], grace: float, hurries: Callable[[], bool]
) -> None:
    """End processes that ranks left behind after they ended.

    Args:
        workers: the ranks, all of them polled as ended.
        savers: process ids of checkpoint savers, which lead their own sessions.
        silence: returns the seconds since the last sign of life of a saver.
        grace: seconds that a running save may be without progress.
        hurries: polled meanwhile; once it returns True, nothing is waited for.
    """
    leaders = {*workers.pids.values(), *savers}
    for leader in leaders:  # a process that was stopped with its rank must continue to finish
        _signal_group(leader, signal.SIGCONT)
    begin = time.monotonic()
    while not hurries() and min(silence(), time.monotonic() - begin) < grace and session_is_alive(leaders):
        time.sleep(_POLL)
    for leader in leaders:
        _signal_group(leader, signal.SIGKILL)


def _signal_group(leader: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)
