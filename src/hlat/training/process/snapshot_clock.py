"""When it is time for a snapshot, and what is said of snapshots and of copies in an object store.

before a step   rank 0's clock, busy savers --vote, in the background--> after it, on all ranks: now, or not yet
TierEvent        --tell_notes--> events, and lines for the user
"""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from hlat.checkpoint.tiers import TierEvent
from hlat.runtime import StorageError
from hlat.runtime.distributed import AsyncMax, HostGroup
from hlat.tracking import OtherRank, Tracker

_DUE, _BUSY = 1, 2  # the larger one wins the vote


class SnapshotClock:
    """Says on all ranks at once when it is time for a snapshot.

    Args:
        every: seconds between two; None for none.
        ranks: the processes of the run; the clock of rank 0 counts.
        clock: seconds that only grow.
    """

    def __init__(self, every: float | None, ranks: HostGroup, clock: Callable[[], float] = time.monotonic) -> None:
        self._every, self._first, self._clock = every, ranks.is_first, clock
        self._vote, self._asked = AsyncMax(ranks), False
        self._last = clock()

    def ask(self, busy: bool) -> None:
        """Before a step: have all ranks told whether it is time, and whether this one is busy. Waits for nobody."""
        if self._every is None:
            return
        self.is_time()  # of a step that was undone
        due = self._first and self._clock() - self._last >= self._every
        self._vote.start(_BUSY if busy else _DUE if due else 0)
        self._asked = True

    def is_time(self) -> bool:
        """After the step: whether it is time, and no rank was busy. The same on every rank."""
        asked, self._asked = self._asked, False
        return asked and self._vote.result() == _DUE

    def restart(self) -> None:
        """The state has been saved now."""
        self._last = self._clock()


def tell_notes(notes: Iterable[TierEvent], tracker: Tracker | OtherRank) -> None:
    """Record what happened to a state elsewhere than in the run's folder."""
    for note in notes:
        with suppress(StorageError):  # a full disk must not end what an object store does not
            tracker.event(note.kind, step=note.step, message=note.message, seconds=note.seconds)
        if note.kind == "remote_failed":
            of = "" if note.step is None else f" of step {note.step}"
            tracker.message(f"no copy of the checkpoint{of} in the object store: {note.message}")
        elif note.kind != "remote":
            tracker.message(note.message)
