"""Attempts on several hosts: wait for the hosts, choose those that take part, order them to start.

    hosts that are ready and reached by the leader --prepare--> members, in the order of their numbers
    members --start--> a store on the leader, an order with everybody's ranks --> RemoteRanks

With a fixed number of hosts, all of them are waited for. With a range, a host that stays away is waited for a short
time, and when it comes back, the attempt that goes on without it saves and stops to begin again with it.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

from hlat.launch.hosts.network import connect_all
from hlat.launch.hosts.records import AttemptOrder, HostMember, HostStatus, HostTable
from hlat.launch.local_processes import open_store
from hlat.launch.supervision.agent import HostRun
from hlat.launch.supervision.incidents import RunEvents
from hlat.launch.supervision.remote_ranks import Bulletin, RemoteRanks
from hlat.launch.supervision.running_ranks import RunningRanks
from hlat.resilience import Failure
from hlat.runtime.errors import MissingHostsError
from hlat.runtime.process import DEADLINE_ENV
from hlat.runtime.progress import machine_clock
from hlat.runtime.terminal import listed, plural

_POLL = 0.2  # seconds
_ALIVE = 5.0  # seconds of silence up to which a host can take part in a new attempt
_CONNECT = 2.0  # seconds to connect to a host before it takes part
_REMINDER = 15.0  # seconds between two messages about hosts that are waited for
_RETURNED = 10.0  # seconds between two looks at hosts that may have come back
_SAVE_SIGNAL = 10  # SIGUSR1


_FIRST_PATIENCE = 120.0  # seconds to wait for hosts above the smallest number, at the first attempt
_PATIENCE = 20.0  # the same after a failure
_LONGEST_PATIENCE = 1800.0  # seconds to wait for the smallest number of hosts


class ClusterAttempts:
    """Attempts on several hosts, ordered by their leader; it goes on where the bulletin's first orders are."""

    def __init__(self, run: HostRun, table: HostTable, bulletin: Bulletin) -> None:
        self._run, self._table, self._bulletin = run, table, bulletin
        voice = run.supervision.voice
        self._complain = voice.complain
        self.events = RunEvents(run.supervision.run_dir / "events.jsonl", lambda: True, voice.show_event)
        orders = bulletin.orders
        inherited = orders.state.get("attempts") or {"blamed": None, "excluded": []}
        self._blamed: int | None = inherited["blamed"]
        self._excluded: set[int] = set(inherited["excluded"])
        self._launch, self._adopted = orders.launch, orders.attempt
        self._is_first, self._number = "attempts" not in orders.state, bulletin.first_number
        self._state: Mapping[str, Any] = {}
        self._members: tuple[HostMember, ...] = () if self._adopted is None else self._adopted.members
        self._regroups = False
        self._next_look = 0.0

    @property
    def world(self) -> int:
        return sum(member.nproc for member in self._members)

    def prepare(self, is_stopped: Callable[[], bool]) -> None:
        """Wait for the hosts of the next attempt; MissingHostsError if too few have come."""
        if self._adopted is not None:  # the attempt of an earlier leader goes on: its hosts are there
            return
        begin = reminded = time.monotonic()
        while not is_stopped():
            self._table.refresh()
            self._bulletin.check()
            waited = time.monotonic() - begin
            short = waited < (_FIRST_PATIENCE if self._is_first else _PATIENCE)
            ready = self._ready()
            if len(ready) >= self._run.most - len(self._excluded) or not short:
                members = self._fitting([_as_member(status) for status in ready.values()])
                if members:
                    self._settle(members)
                    return
            if waited > _LONGEST_PATIENCE:
                raise MissingHostsError(f"{self._missing(ready)} within {_LONGEST_PATIENCE / 60:g} minutes.")
            if time.monotonic() - reminded > _REMINDER:
                reminded = time.monotonic()
                self._complain(f"waiting for hosts: {self._missing(ready)}")
            time.sleep(_POLL)

    @contextmanager
    def start(self, environment: Mapping[str, str]) -> Iterator[RunningRanks]:
        """Order the members to start their processes; at the end of the block, order them to end those left."""
        if self._adopted is not None:
            attempt, self._adopted = self._adopted, None
            yield self._watch(attempt)
            self._bulletin.end()
            return
        own = next(status for index, status in self._living().items() if index == self._run.place.index)
        # The deadline is on the clock of this host: others get the seconds that are left.
        variables = {name: text for name, text in environment.items() if name != DEADLINE_ENV}
        deadline = float(environment[DEADLINE_ENV]) - machine_clock() if DEADLINE_ENV in environment else None
        with open_store(own.address) as port:
            self._number, self._is_first = self._number + 1, False
            secret = secrets.token_hex(32)
            attempt = AttemptOrder(
                self._number, self._launch, self._members, own.address, port, secret, variables, deadline
            )
            self._bulletin.begin(attempt, self._state)
            yield self._watch(attempt)
            self._bulletin.end()

    def adapt(self, failure: Failure) -> str | None:
        """Go on without a host that was to blame twice in a row, if enough others are left."""
        member = next(each for each in self._members if failure.rank in each.ranks)
        # An exception that a process has reported is the program's, or of a peer: no host is to blame.
        lost = failure.kind in ("signal", "hang", "host")
        if lost:
            self._bulletin.suspect(member.index, self._number)
        again = lost and not failure.saved and member.index == self._blamed
        self._blamed = member.index if lost else None
        others = [each for each in self._members if each.index != member.index]
        if not again or not self._fitting(others):
            return None
        self._excluded.add(member.index)
        self._members, self._blamed = self._place(self._fitting(others)), None
        processes = plural(self.world, "process")
        return f"host {member.name} was to blame twice in a row: continuing without it, with {processes}"

    def goes_on(self) -> bool:
        """Return True if the last attempt was asked to save and stop because hosts have come back."""
        regroups, self._regroups = self._regroups, False
        return regroups

    def keep(self, state: Mapping[str, Any]) -> None:
        """Keep the state of the supervision for the next leader; it is written with the order of an attempt."""
        own = {"blamed": self._blamed, "excluded": sorted(self._excluded)}
        self._state = {"attempts": own, "supervision": dict(state)}

    def _watch(self, attempt: AttemptOrder) -> RunningRanks:
        self._next_look = time.monotonic() + _RETURNED
        look = None if len(attempt.members) >= self._run.most else self._look_for_returned
        hang_seconds = self._run.supervision.recovery.hang_seconds
        return RemoteRanks(attempt, self._table, self._bulletin, hang_seconds, look)

    def _look_for_returned(self, ranks: RemoteRanks) -> None:
        """Ask an attempt to save and stop once hosts are back with which the run could go on."""
        if self._regroups or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _RETURNED
        if not any(beat.start_step is not None and beat.step > beat.start_step for beat in ranks.readings()):
            return  # it has nothing to save yet
        present = {member.index for member in self._members}
        back = [status for index, status in self._ready().items() if index not in present]
        larger = self._fitting([*self._members, *map(_as_member, back)])
        if not back or sum(member.nproc for member in larger) <= self.world:
            return
        self._regroups = True
        names = listed(status.name for status in back)
        self._complain(f"host {names} is back: saving, to go on with it")
        self.events.event("hosts_returned", hosts=[status.name for status in back])
        ranks.send(list(ranks.ranks), _SAVE_SIGNAL)

    def _living(self) -> dict[int, HostStatus]:
        return self._table.living(_ALIVE)

    def _ready(self) -> dict[int, HostStatus]:
        idle = {
            index: status
            for index, status in self._living().items()
            if status.attempt is None
            and not status.findings
            and not status.link
            and status.examined >= self._bulletin.suspects(index)
            and index not in self._excluded
        }
        # A host may write statuses on the shared disk and yet be cut off from the network.
        problems = connect_all({(status.address, status.port) for status in idle.values()}, _CONNECT)
        return {index: status for index, status in idle.items() if not problems[status.address, status.port]}

    def _fitting(self, members: Sequence[HostMember]) -> list[HostMember]:
        """Return as many of the hosts as the recipe has a layout for; none if these are too few."""
        for count in range(min(len(members), self._run.most), self._run.least - 1, -1):
            chosen = sorted(members, key=lambda member: member.index)[:count]
            if self._run.fits(sum(member.nproc for member in chosen)):
                return chosen
        return []

    def _place(self, members: Sequence[HostMember]) -> tuple[HostMember, ...]:
        firsts = accumulate((member.nproc for member in members), initial=0)
        return tuple(replace(member, first_rank=first) for member, first in zip(members, firsts, strict=False))

    def _settle(self, members: Sequence[HostMember]) -> None:
        before = [member.name for member in self._members]
        self._members = self._place(members)
        now = [member.name for member in self._members]
        if now != before:
            processes, hosts = plural(self.world, "process"), plural(len(now), "host")
            self._complain(f"the run has {processes} on {hosts}: {', '.join(now)}")
            self.events.event("hosts", hosts=now, world=self.world)

    def _missing(self, ready: Mapping[int, HostStatus]) -> str:
        reasons = []
        for index, status in self._living().items():
            if index not in ready and index not in self._excluded:
                busy = "it still ends processes of the last attempt" if status.attempt is not None else ""
                if not busy and status.examined < self._bulletin.suspects(index):
                    busy = "it is being examined"
                silent = f"it does not answer at {status.address} port {status.port}"
                reason = "; ".join(status.findings) or status.link or busy or silent
                reasons.append(f"{status.name}: {reason}")
        range_start = "" if self._run.least == self._run.most else f"{self._run.least} to "
        text = f"{len(ready)} of {range_start}{self._run.most} hosts are ready"
        return text if not reasons else f"{text} ({'; '.join(reasons)})"


def _as_member(status: HostStatus) -> HostMember:
    return HostMember(
        status.index, status.incarnation, status.name, status.address, status.port, first_rank=0, nproc=status.nproc
    )
