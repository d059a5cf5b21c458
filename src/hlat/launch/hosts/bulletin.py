"""The leader's side of the shared folder: it gives orders, as long as no other host has taken over."""

import threading
from dataclasses import replace
from pathlib import Path

from hlat.launch.hosts.leadership import NotLeaderError, newest_term
from hlat.launch.hosts.records import ORDERS, AttemptOrder, Instruction, Orders, write_record


class Bulletin:
    """Orders of this leader.

    Args:
        folder: folder of the files.
        orders: first orders; an attempt in them is one that goes on under the new leader.

    Raises:
        NotLeaderError: (each method) another host leads now.
        OSError: (each method) the shared disk refuses a write.
    """

    def __init__(self, folder: Path, orders: Orders) -> None:
        self._folder, self._orders = folder, orders
        self._lock = threading.Lock()
        self._write(orders)

    @property
    def attempt(self) -> AttemptOrder | None:
        """The present attempt."""
        return self._orders.attempt

    def check(self) -> None:
        """Check that this host still leads."""
        if newest_term(self._folder) != self._orders.term:
            raise NotLeaderError

    def begin(self, attempt: AttemptOrder | None) -> None:
        """Order an attempt, or with None the end of the present one."""
        with self._lock:
            self._write(replace(self._orders, attempt=attempt, instructions=()))

    def instruct(self, kind: str, ranks: tuple[int, ...] = (), value: float = 0.0) -> int:
        """Give an instruction to the members of the attempt; return its number."""
        with self._lock:
            last = self._orders.instructions[-1].number if self._orders.instructions else 0
            added = Instruction(last + 1, kind, ranks, value)
            self._write(replace(self._orders, instructions=(*self._orders.instructions, added)))
            return added.number

    def suspect(self, index: int, number: int) -> None:
        """Ask a host that was to blame for the end of an attempt to examine itself before the next one."""
        with self._lock:
            self._write(replace(self._orders, suspects={**self._orders.suspects, str(index): number}))

    def suspects(self, index: int) -> int:
        """Return the number of the attempt after which a host has to be examined; 0 if it has not."""
        return self._orders.suspects.get(str(index), 0)

    def finish(self, code: int) -> None:
        """Publish the exit code of the run."""
        with self._lock:
            self._write(replace(self._orders, attempt=None, instructions=(), final=code))

    def _write(self, orders: Orders) -> None:
        self.check()
        write_record(self._folder / ORDERS, orders)
        self._orders = orders
