"""Files through which supervisors of several hosts agree: JSON, in a folder that all of them share; and who leads.

    <run.dir>/.hosts/host-00001.json   HostStatus: written twice a second by the supervisor of host 1
                     orders.json       Orders: written by the leader; read by all
                     term-00003        created by the host that became the leader for the third time

    host-00000.json, host-00001.json, ... --read again and again--> HostTable --> silence of a host in seconds
    no leader alive --claim--> term-00002 created by one host only (O_EXCL) --> that host, the living one with the
                               lowest index, leads
    a leader that was stopped and goes on sees a later term --> it leads no longer
    what it still writes --> Follower: no host goes back to the leader of an earlier term

Times in files are ages, in seconds before the file was written: clocks of hosts are never compared. Files are replaced
as a whole, and read again each time: no host needs to see when another one writes.

A file that only one host can create decides who leads, not a vote: the shared folder is there, and hosts that do not
see it cannot take part in the run. A leader may be stopped between its look at the terms and its write, so its orders
can still replace those of its successor, once. Nobody follows them, and the successor writes its own again.
"""

import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from hlat.launch.worker_process import ErrorReport
from hlat.resilience import HeartbeatReading

T = TypeVar("T")

FOLDER = ".hosts"
"""Folder of these files in the folder of the run."""

ORDERS = "orders.json"


@dataclass(frozen=True)
class RankStatus:
    """State of a rank, as the supervisor of its host reports it."""

    rank: int
    code: int | None = None  # exit code, or minus the signal that ended it; None while it runs
    report: ErrorReport | None = None  # its error report; time is seconds before this status was written, negative
    beat: HeartbeatReading | None = None  # its heartbeat; times are seconds before this status was written, negative
    stopped: bool = False  # True if its process is stopped by a signal
    stack: str = ""  # stacks of its threads, if they were asked for


@dataclass(frozen=True)
class HostStatus:
    """State of a host, as its supervisor writes it."""

    index: int  # number of the host, which says in which order hosts get their ranks
    incarnation: str  # random name of this start of the supervisor
    count: int  # number of statuses written; while it grows, the supervisor is alive
    name: str
    address: str  # address of the host for the others
    port: int  # port on which it accepts connections, as a proof that it can be reached
    nproc: int  # processes that it can run
    version: str
    launch: str | None = None  # random name of the launch whose leader it has followed; None before that
    attempt: int | None = None  # number of the attempt whose processes it has; None if it is ready for one
    ranks: tuple[RankStatus, ...] = ()
    run_id: str | None = None  # id of the run in its folder, once a rank has reported it
    signals: tuple[int, ...] = ()  # signals that asked the run to stop, received by this supervisor
    done: int = 0  # number of the last instruction that was carried out
    # hosts that no longer answer, by index as text, with the seconds since they last did
    unreachable: Mapping[str, float] = field(default_factory=dict)
    link: str = ""  # why the network interface does not work; empty if it does
    findings: tuple[str, ...] = ()  # problems that an examination of the host has found; empty if it is good
    examined: int = 0  # number of the attempt after which it was examined last, and found good


@dataclass(frozen=True)
class HostMember:
    """A host that takes part in an attempt."""

    index: int
    incarnation: str  # the start of its supervisor
    name: str
    address: str
    port: int  # port on which it accepts connections
    first_rank: int
    nproc: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.nproc)

    def describe(self) -> str:
        ranks = f"rank {self.first_rank}" if self.nproc == 1 else f"ranks {self.first_rank} to {self.ranks[-1]}"
        return f"host {self.name} ({ranks})"


@dataclass(frozen=True)
class AttemptOrder:
    """An attempt that the leader tells hosts to start, or to go on with."""

    number: int
    launch: str  # random name of the launch, the same for all of its attempts
    members: tuple[HostMember, ...]
    address: str  # of the store, with port
    port: int
    secret: str
    environment: Mapping[str, str]
    # seconds until the run has to save and stop, counted from the writing; None if there is no deadline
    deadline: float | None

    @property
    def world(self) -> int:
        return sum(member.nproc for member in self.members)

    def member(self, index: int, incarnation: str) -> HostMember | None:
        """Return a host's place in the attempt; None if it has none."""
        found = (each for each in self.members if (each.index, each.incarnation) == (index, incarnation))
        return next(found, None)


@dataclass(frozen=True)
class Instruction:
    """Something that each member of an attempt is to do once."""

    number: int  # instructions of an attempt are carried out in this order
    kind: str  # "signal" (send value), "kill", "stacks" (collect them), or "leftovers" (end them after value s)
    ranks: tuple[int, ...] = ()
    value: float = 0.0  # see kind


@dataclass(frozen=True)
class Orders:
    """All that the leader publishes for the other hosts, at one time."""

    term: int  # number of its leadership; orders of earlier ones are void
    leader: int  # index of its host
    incarnation: str  # the start of its supervisor
    launch: str  # random name of the launch
    attempt: AttemptOrder | None = None  # attempt to start, or that goes on; None to end the present one
    instructions: tuple[Instruction, ...] = ()
    # hosts that were to blame, by index as text, with the number of the attempt: they examine themselves
    suspects: Mapping[str, int] = field(default_factory=dict)
    # state of the supervision when the newest attempt began, for the next leader; empty before the first
    state: Mapping[str, Any] = field(default_factory=dict)
    final: int | None = None  # exit code of the run when it has ended; else None


def host_file(folder: Path, index: int) -> Path:
    """Path of the file in which a host, by its number, writes its status."""
    return folder / f"host-{index:05d}.json"


def write_record(path: Path, record: HostStatus | Orders) -> None:
    """Replace a file atomically; OSError if the shared disk refuses it."""
    partial = path.with_name(f"{path.name}.partial")
    # Only this user may read it: orders have the secret of the rendezvous.
    descriptor = os.open(partial, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(to_json(record))
    partial.replace(path)  # no fsync: after a crash of this host, nobody needs it


# Made when they are needed: that takes as long as an import.
_reader: Callable[[type], TypeAdapter[Any]] = cache(TypeAdapter)


def parse_record(kind: type[T], text: bytes) -> T | None:
    """Parse a record; None if it is none, or one of a version of hlat with other fields."""
    with suppress(ValidationError):
        found: T = _reader(kind).validate_json(text)
        return found
    return None


def read_orders(folder: Path) -> Orders | None:
    """Read the orders of the leader; None if there are none, or those of another version of hlat."""
    with suppress(OSError):
        return parse_record(Orders, (folder / ORDERS).read_bytes())
    return None


@dataclass(frozen=True)
class SeenStatus:
    """A status, and when it was seen."""

    status: HostStatus
    at: float  # time when it was seen first, on the clock of the table
    # True if the supervisor of this start of the host has written one before: files of earlier launches lie in the same
    # folder
    alive: bool


class HostTable:
    """Statuses of all hosts, as seen on a monotonic clock in seconds."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self.seen: dict[int, SeenStatus] = {}  # by number of the host
        self._texts: dict[Path, bytes] = {}

    def refresh(self, indices: Collection[int] | None = None) -> None:
        """Read the statuses of some hosts again; None for all of them."""
        now = self._clock()
        # Each host that looked at all others all the time would be too much for many of them.
        files = self._folder.glob("host-*.json") if indices is None else [host_file(self._folder, i) for i in indices]
        for path in sorted(files):
            status = self._read_if_changed(path)
            if status is None:
                continue
            before = self.seen.get(status.index)
            if before is None or before.status.incarnation != status.incarnation:
                # The first status of a start of the host may have been left behind by an earlier launch. It counts as
                # alive only if another incarnation was there before, which it has replaced.
                self.seen[status.index] = SeenStatus(status, now, alive=before is not None)
            elif before.status.count != status.count:
                self.seen[status.index] = SeenStatus(status, now, alive=True)

    def _read_if_changed(self, path: Path) -> HostStatus | None:
        try:
            # Read, not only looked at: file servers let clients see a change when they open a file, and its time of
            # change much later.
            text = path.read_bytes()
        except OSError:
            return None
        if text == self._texts.get(path):
            return None
        self._texts[path] = text
        return parse_record(HostStatus, text)

    def silence(self, index: int) -> float:
        """Seconds since a host has written a new status; infinite if it never has, as far as is known here."""
        found = self.seen.get(index)
        return self._clock() - found.at if found is not None and found.alive else float("inf")

    def living(self, seconds: float) -> dict[int, HostStatus]:
        """Return the hosts that were silent for at most ``seconds``, by index."""
        # A host that was never alive is not living, however long silence may last.
        return {
            index: found.status
            for index, found in sorted(self.seen.items())
            if found.alive and self.silence(index) <= seconds
        }


class NotLeaderError(Exception):
    """This host leads no longer: another one has taken over."""


def newest_term(folder: Path) -> int:
    """Return the number of the newest leadership; 0 if there was none."""
    return max(_terms(folder), default=0)


def _terms(folder: Path) -> dict[int, Path]:
    named = ((path.name.removeprefix("term-"), path) for path in folder.glob("term-*"))
    return {int(number): path for number, path in named if number.isdecimal()}


def claim(folder: Path, term: int) -> bool:
    """Become the leader of a term; False if another host has. OSError if the shared disk refuses it."""
    with suppress(FileExistsError):  # O_EXCL: only one host creates the file
        os.close(os.open(folder / f"term-{term:05d}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        for number, path in _terms(folder).items():  # of earlier launches and leaders; the newest one must remain
            if number < term - 1:
                path.unlink(missing_ok=True)
        return True
    return False


def first_number(term: int) -> int:
    """Return a number above those of all attempts and instructions of earlier leaders."""
    # What an earlier leader has begun and not yet written down cannot be known: its numbers must not be used again.
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
        """Return the orders to carry out, if any, given those read (None: unreadable) and if their writer lives."""
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
