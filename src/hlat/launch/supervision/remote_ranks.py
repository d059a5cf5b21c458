"""The leader's side of the shared folder: it gives orders, and sees the processes of an attempt on several hosts.

    start, end, signals, kills --Bulletin, as long as this host leads--> orders.json --> supervisors of all hosts
    statuses of the hosts --RemoteRanks, the leader's ``RunningRanks``--> exit codes, error reports, heartbeats of all

A host that gives no sign of life is lost, and so are its ranks. If another rank has failed, as ranks do whose peer has
closed its connections, a short silence is enough.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hlat.launch.hosts.network import blame_network
from hlat.launch.hosts.records import (
    ORDERS,
    AttemptOrder,
    HostMember,
    HostStatus,
    HostTable,
    Instruction,
    NotLeaderError,
    Orders,
    RankStatus,
    first_number,
    newest_term,
    read_orders,
    write_record,
)
from hlat.launch.worker_process import ErrorReport
from hlat.resilience import Hang, HeartbeatReading


class Bulletin:
    """Orders of this leader; an attempt in the first ones is one that goes on under it.

    Each method raises NotLeaderError if another host leads now, and OSError if the shared disk refuses a write.
    """

    def __init__(self, folder: Path, orders: Orders) -> None:
        self._folder, self.orders = folder, orders
        self._lock = threading.Lock()
        self._write(orders)

    @property
    def first_number(self) -> int:
        """Number above which those of this leader's attempts begin."""
        return first_number(self.orders.term)

    def check(self) -> None:
        """Check that this host still leads, and that its orders are those that others read."""
        with self._lock:
            written = self._refuse_successor()
            if written is None or written.term < self.orders.term:  # of a leader that was stopped while it wrote
                self._write(self.orders)

    def begin(self, attempt: AttemptOrder, state: Mapping[str, Any]) -> None:
        """Order an attempt; a later leader goes on with this state of the supervision."""
        with self._lock:
            self._write(replace(self.orders, attempt=attempt, instructions=(), state=state))

    def end(self) -> None:
        with self._lock:
            self._write(replace(self.orders, attempt=None, instructions=()))

    def instruct(self, kind: str, ranks: tuple[int, ...] = (), value: float = 0.0) -> int:
        """Give an instruction to the members of the attempt; return its number."""
        with self._lock:
            given = self.orders.instructions
            last = given[-1].number if given else self.first_number
            added = Instruction(last + 1, kind, ranks, value)
            self._write(replace(self.orders, instructions=(*self.orders.instructions, added)))
            return added.number

    def suspect(self, index: int, number: int) -> None:
        """Ask a host that was to blame for the end of an attempt to examine itself before the next one."""
        with self._lock:
            self._write(replace(self.orders, suspects={**self.orders.suspects, str(index): number}))

    def suspects(self, index: int) -> int:
        """Return the number of the attempt after which a host has to be examined; 0 if it has not."""
        return self.orders.suspects.get(str(index), 0)

    def finish(self, code: int) -> None:
        with self._lock:
            self._write(replace(self.orders, attempt=None, instructions=(), final=code))

    def _write(self, orders: Orders) -> None:
        self._refuse_successor()
        write_record(self._folder / ORDERS, orders)
        self.orders = orders

    def _refuse_successor(self) -> Orders | None:
        """Return the orders in the folder; raise NotLeaderError if another host has claimed a later term."""
        written = read_orders(self._folder)
        # File servers show new files late and the content of a known file at once, so both are looked at.
        if max(newest_term(self._folder), 0 if written is None else written.term) > self.orders.term:
            raise NotLeaderError
        return written


_REFRESH = 0.2  # seconds between two looks at the statuses
_PER_HOST = 0.005  # the same for each host, when they are many
_POLL = 0.05  # seconds
_STARTING = 180.0  # seconds for a supervisor to start its processes: it may have to import torch first
_SHORT_SILENCE = 5.0  # seconds of silence after which a host is lost if something else has failed too
_LONGEST_SILENCE = 30.0  # seconds of silence after which a host is lost in any case
_STACKS = 6.0  # seconds for hosts to collect stacks
_LOST_CODE = 1  # exit code of a rank whose host is lost
_CUT_GRACE = 5.0  # seconds for savers to end if a host or its network is lost: they wait for each other in vain


def host_limits(hang_seconds: float | None) -> tuple[float, float | None]:
    """Return the limits that detect a loss within ``recovery.hang_seconds``: of a host, of the network between hosts.

    A host is lost after so many seconds without a sign of life. The network has failed if hosts have not reached each
    other, and ranks have not progressed, for so many seconds; None if it is not watched.
    """
    if hang_seconds is None:
        return _LONGEST_SILENCE, None
    # A cut of the network may pass, a host that is silent rarely comes back: it gets less time.
    return max(_SHORT_SILENCE, min(_LONGEST_SILENCE, 0.5 * hang_seconds)), 0.75 * hang_seconds


class RemoteRanks:
    """Processes of an attempt on several hosts; ``look`` is called again and again with this object."""

    def __init__(
        self,
        attempt: AttemptOrder,
        table: HostTable,
        bulletin: Bulletin,
        hang_seconds: float | None,
        look: "Callable[[RemoteRanks], None] | None" = None,
    ) -> None:
        self._look = look
        self._attempt, self._table, self._bulletin = attempt, table, bulletin
        self._silence, self._outage = host_limits(hang_seconds)
        self._places = {rank: member for member in attempt.members for rank in member.ranks}
        self._lost: dict[int, ErrorReport] = {}  # by index of the host
        self._joined: dict[int, HostStatus] = {}  # last status of each host that has started this attempt
        self._seen_at: dict[int, float] = {}
        self._began = self._refreshed = time.monotonic()
        self._progress: dict[int, tuple[int, str, float]] = {}
        self._progressed_at = self._began
        self._failed = False
        self._refresh()

    @property
    def ranks(self) -> Sequence[int]:
        return range(self._attempt.world)

    def poll(self, rank: int) -> int | None:
        """Exit code of a rank; 1 if its host is lost; None while it runs."""
        self._refresh()
        status, member = self._status(rank), self._places[rank]
        if status is not None and status.code is not None:
            self._failed = self._failed or status.code != 0
            return status.code
        return _LOST_CODE if member.index in self._lost else None

    def report(self, rank: int) -> ErrorReport | None:
        """Error report of a rank that has ended; of a lost host, that it is lost."""
        status, member = self._status(rank), self._places[rank]
        if status is not None and status.code is not None:
            report = status.report
            # An age in the file becomes a time of this host, comparable with those of other hosts.
            return None if report is None else replace(report, time=report.time + self._wall_time(member))
        return self._lost.get(member.index)

    def host(self, rank: int) -> str:
        return self._places[rank].name

    def send(self, ranks: Sequence[int], number: int) -> None:
        self._bulletin.instruct("signal", tuple(ranks), number)

    def kill(self, ranks: Sequence[int]) -> None:
        """Kill ranks, and wait until they have ended or their hosts are lost."""
        self._failed = True
        self._bulletin.instruct("kill", tuple(ranks))
        while any(self.poll(rank) is None for rank in ranks):
            time.sleep(_POLL)

    def end_leftovers(self, grace: float, hurries: Callable[[], bool]) -> None:
        is_cut = blame_network(self._attempt.members, self._joined, _SHORT_SILENCE) is not None
        grace = min(grace, _CUT_GRACE) if self._lost or is_cut else grace
        number = self._bulletin.instruct("leftovers", (), grace)
        self._wait(lambda status: status.done >= number, grace + _SHORT_SILENCE, hurries)

    def readings(self) -> list[HeartbeatReading]:
        """Heartbeats of the ranks that have one; of a lost host, the last ones that it wrote."""
        self._refresh()
        found = ((self._status(rank), self._places[rank].index) for rank in self.ranks)
        return [rank.beat.aged(-self._seen_at[index]) for rank, index in found if rank is not None and rank.beat]

    def is_stopped(self, rank: int) -> bool:
        status = self._status(rank)
        return status is not None and status.stopped

    def stacks(self) -> dict[int, str]:
        number = self._bulletin.instruct("stacks")
        self._wait(lambda status: status.done >= number, _STACKS, lambda: False)
        found = {rank: self._status(rank) for rank in self.ranks}
        return {rank: "" if status is None else status.stack for rank, status in found.items()}

    def run_id(self) -> str | None:
        return next((status.run_id for status in self._joined.values() if status.run_id is not None), None)

    def outage(self) -> Hang | None:
        """Return a failure of the network that has lasted too long while no rank made progress."""
        if self._look is not None:
            self._look(self)
        limit, now = self._outage, time.monotonic()
        if limit is None or now - self._progressed_at < limit:
            return None
        found = blame_network(self._attempt.members, self._joined, limit)
        return None if found is None else self._hang(*found, now - self._progressed_at)

    def locate(self, hang: Hang) -> Hang:
        """Blame a host that is silent, or hosts that do not reach each other, instead of ranks that wait for them."""
        self._refresh()
        members = self._attempt.members
        silent = [member for member in members if self._table.silence(member.index) > _SHORT_SILENCE]
        if silent:
            seconds = max(self._table.silence(member.index) for member in silent)
            why = f"no sign of life from {' and '.join(member.describe() for member in silent)} for {seconds:.0f} s"
            return self._hang(silent, why, hang.seconds)
        found = blame_network(members, self._joined, _SHORT_SILENCE)
        if found is not None:
            return self._hang(*found, hang.seconds)
        hosts = list(dict.fromkeys(self.host(rank) for rank in hang.ranks))
        return replace(hang, why=f"{hang.why} (on {', '.join(hosts)})")

    def _hang(self, members: Sequence[HostMember], why: str, seconds: float) -> Hang:
        ranks = [rank for member in members for rank in member.ranks]
        beats = {beat.rank: beat for beat in self.readings()}
        first = beats.get(ranks[0]) or next(iter(beats.values()), None)
        phase, step = ("start", 0) if first is None else (first.phase, first.current_step)
        return Hang(ranks, phase, step, seconds, why)

    def _wait(self, holds: Callable[[HostStatus], bool], seconds: float, hurries: Callable[[], bool]) -> None:
        """Wait until something holds for every host that is not lost."""
        deadline = time.monotonic() + seconds
        while not hurries() and time.monotonic() < deadline:
            self._refresh()
            hosts = [member.index for member in self._attempt.members if member.index not in self._lost]
            if all(index in self._joined and holds(self._joined[index]) for index in hosts):
                return
            time.sleep(_POLL)

    def _status(self, rank: int) -> RankStatus | None:
        host = self._joined.get(self._places[rank].index)
        return None if host is None else next((each for each in host.ranks if each.rank == rank), None)

    def _wall_time(self, member: HostMember) -> float:
        """Time when the status of a host was seen, by the wall clock of this host."""
        return time.time() - (time.monotonic() - self._seen_at[member.index])

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._refreshed < max(_REFRESH, _PER_HOST * len(self._attempt.members)) and self._joined:
            return
        self._refreshed = now
        self._table.refresh()
        self._bulletin.check()
        for member in self._attempt.members:
            if member.index not in self._lost:
                self._look_at(member, now)
        if self._progress_has_changed():
            self._progressed_at = now

    def _look_at(self, member: HostMember, now: float) -> None:
        seen = self._table.seen.get(member.index)
        status = None if seen is None else seen.status
        if seen is not None and status is not None and status.incarnation == member.incarnation:
            if status.attempt == self._attempt.number:
                self._joined[member.index], self._seen_at[member.index] = status, seen.at
            elif member.index in self._joined:
                return self._lose(member, "its supervisor has given up this attempt")
        elif status is not None:
            return self._lose(member, "its supervisor was started again")
        silence = self._table.silence(member.index)
        if silence > (_SHORT_SILENCE if self._failed else self._silence) and now - self._began > _SHORT_SILENCE:
            seconds = min(silence, now - self._began)
            return self._lose(member, f"no sign of life for {seconds:.0f} s")
        if member.index not in self._joined and now - self._began > _STARTING:
            return self._lose(member, f"it has started no process within {_STARTING:.0f} s")
        return None

    def _lose(self, member: HostMember, why: str) -> None:
        message = f"{member.describe()} is lost: {why}"
        self._lost[member.index] = ErrorReport("lost", message, False, _LOST_CODE, time.time(), True, "LaunchError")
        self._failed = True

    def _progress_has_changed(self) -> bool:
        beats = [rank.beat for host in self._joined.values() for rank in host.ranks if rank.beat is not None]
        progress = {beat.rank: (beat.step, beat.phase, sum(beat.seconds.values())) for beat in beats}
        changed = progress != self._progress
        self._progress = progress
        return changed
