"""Snapshot timing, agreed on by all ranks, and the log entries of snapshots and object-store uploads.

before a step   rank 0's clock, busy savers --asynchronous vote--> after the step, on all ranks: due or not
TierNote        --report_tier_notes--> events, and messages for the user
"""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from hlat.checkpoint import TierEvent
from hlat.runtime.distributed.async_max import AsyncMax
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.errors import StorageError
from hlat.tracking import OtherRankTracker, Tracker

_DUE, _BUSY = 1, 2  # the vote is a maximum: a busy rank overrules


class SnapshotClock:
    """Timer of snapshots, with the same answer on all ranks.

    Args:
        every: seconds between two snapshots; None takes none.
        ranks: the processes of the run; rank 0's clock decides.
        clock: seconds, monotonic.
    """

    def __init__(self, every: float | None, ranks: HostGroup, clock: Callable[[], float] = time.monotonic) -> None:
        self._every, self._first, self._clock = every, ranks.is_first, clock
        self._vote, self._vote_open = AsyncMax(ranks), False
        self._last = clock()

    def start_vote(self, busy: bool) -> None:
        """Start the vote on a snapshot, before a step; ``busy`` is True if this rank's saver is. Does not wait."""
        if self._every is None:
            return
        self.is_due()  # completes the vote of a step that was rolled back
        due = self._first and self._clock() - self._last >= self._every
        self._vote.start(_BUSY if busy else _DUE if due else 0)
        self._vote_open = True

    def is_due(self) -> bool:
        """Return True, after the step, if a snapshot is due and no rank was busy. The same on every rank."""
        is_open, self._vote_open = self._vote_open, False
        return is_open and self._vote.result() == _DUE

    def restart(self) -> None:
        """Count the seconds from now: the state has just been saved."""
        self._last = self._clock()


def report_tier_notes(notes: Iterable[TierEvent], tracker: Tracker | OtherRankTracker) -> None:
    """Record snapshots and object-store uploads, and what went wrong with them."""
    for note in notes:
        with suppress(StorageError):  # a full disk must not end a run whose object store works
            tracker.event(note.kind, step=note.step, message=note.message, seconds=note.seconds)
        if note.kind == "remote_failed":
            which = "" if note.step is None else f" of step {note.step}"
            tracker.warn(f"no copy of the checkpoint{which} in the object store: {note.message}")
        elif note.kind != "remote":
            tracker.message(note.message)
