"""The leader's side of the shared folder: it gives orders, as long as no other host has taken over."""

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hlat.launch.hosts.leadership import NotLeaderError, first_number, newest_term
from hlat.launch.hosts.records import ORDERS, AttemptOrder, Instruction, Orders, read_orders, write_record


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

    @property
    def first_number(self) -> int:
        """Number above which those of this leader's attempts begin."""
        return first_number(self._orders.term)

    def check(self) -> None:
        """Check that this host still leads, and that its orders are those that others read."""
        with self._lock:
            written = self._refuse_successor()
            if written is None or written.term < self._orders.term:  # of a leader that was stopped while it wrote
                self._write(self._orders)

    def begin(self, attempt: AttemptOrder, state: Mapping[str, Any]) -> None:
        """Order an attempt; a later leader goes on with this state of the supervision."""
        with self._lock:
            self._write(replace(self._orders, attempt=attempt, instructions=(), state=state))

    def end(self) -> None:
        """Order the end of the present attempt."""
        with self._lock:
            self._write(replace(self._orders, attempt=None, instructions=()))

    def instruct(self, kind: str, ranks: tuple[int, ...] = (), value: float = 0.0) -> int:
        """Give an instruction to the members of the attempt; return its number."""
        with self._lock:
            given = self._orders.instructions
            last = given[-1].number if given else self.first_number
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
        self._refuse_successor()
        write_record(self._folder / ORDERS, orders)
        self._orders = orders

    def _refuse_successor(self) -> Orders | None:
        """Return the orders in the folder; raise NotLeaderError if another host has claimed a later term.

        File servers show new files late and the content of a known file at once, so both are looked at.
        """
        written = read_orders(self._folder)
        if max(newest_term(self._folder), 0 if written is None else written.term) > self._orders.term:
            raise NotLeaderError
        return written
