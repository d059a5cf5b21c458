"""Election of the leader: the living host with the lowest index, once no leader is alive.

    no leader alive --claim--> term-00002 created by one host only (O_EXCL) --> that host leads
    a leader that was stopped and goes on sees a later term --> it leads no longer
    what it still writes --> Follower: no host goes back to the leader of an earlier term

A file that only one host can create decides, not a vote: the shared folder is there, and hosts that do not see it
cannot take part in the run. A leader may be stopped between its look at the terms and its write, so its orders can
still replace those of its successor, once. Nobody follows them, and the successor writes its own again.
"""

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from hlat.launch.hosts.host_table import HostTable
from hlat.launch.hosts.records import Orders


class NotLeaderError(Exception):
    """This host leads no longer: another one has taken over."""


def newest_term(folder: Path) -> int:
    """Return the number of the newest leadership; 0 if there was none."""
    terms = [path.name.removeprefix("term-") for path in folder.glob("term-*")]
    return max((int(term) for term in terms if term.isdecimal()), default=0)


def claim(folder: Path, term: int) -> bool:
    """Become the leader of a term; return False if another host has.

    Raises:
        OSError: the shared disk refuses it.
    """
    with suppress(FileExistsError):
        os.close(os.open(folder / f"term-{term:05d}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        for path in folder.glob("term-*"):  # of earlier launches and leaders; the newest one must remain
            number = path.name.removeprefix("term-")
            if number.isdecimal() and int(number) < term - 1:
                path.unlink(missing_ok=True)
        return True
    return False


def first_number(term: int) -> int:
    """Return a number above those of all attempts and instructions of earlier leaders.

    What an earlier leader has begun and not yet written down cannot be known: its numbers must not be used again.
    """
    return term << 20


def is_candidate(index: int, living: Collection[int]) -> bool:
    """Return True if a host is the one to lead when no leader is alive; it must see itself alive."""
    return index in living and index == min(living)


class Follower:
    """Orders that a host carries out: those of the newest leader that it has seen alive."""

    def __init__(self) -> None:
        self.term = 0  # of the leader that is followed, or was claimed by this host
        self.orders: Orders | None = None

    def accept(self, orders: Orders | None, alive: bool) -> Orders | None:
        """Return the orders to carry out, having read some; None if there are none.

        Args:
            orders: orders as read from the shared folder; None if they could not be read.
            alive: True if the leader who wrote them is alive.
        """
        if orders is None or orders.term < self.term:
            return self.orders
        if alive or (self.orders is not None and orders.term == self.orders.term):
            self.term, self.orders = orders.term, orders
        return self.orders

    def lead(self, term: int) -> None:
        """Follow no earlier leader any more: this host has claimed a term, and gives its first orders soon."""
        self.term, self.orders = term, None


def leader_is_alive(orders: Orders | None, table: HostTable, patience: float) -> bool:
    """Return True if the host whose orders these are has shown a sign of life within ``patience`` seconds."""
    if orders is None:
        return False
    status = table.living(patience).get(orders.leader)
    return status is not None and status.incarnation == orders.incarnation
