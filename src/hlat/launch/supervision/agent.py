"""The supervisor of one host: it carries out the orders of the leader, and becomes the leader if there is none.

    every fifth of a second:
        orders of the leader --HostRanks--> start or end processes, signals, kills, stacks
        own processes, signals, network --> status of this host, for all
        no leader alive, and no living host has a lower number --> lead, on a thread

The leader is one of these supervisors: whichever host is lost, the others go on.
"""

import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from hlat.launch.hosts.network import Prober, accept_connections, link_problem, neighbours
from hlat.launch.hosts.records import (
    FOLDER,
    AttemptOrder,
    Follower,
    HostMember,
    HostStatus,
    HostTable,
    Instruction,
    Orders,
    RankStatus,
    claim,
    host_file,
    is_candidate,
    leader_is_alive,
    newest_term,
    read_orders,
    write_record,
)
from hlat.launch.local_processes import ProcessSet, RankPlaces
from hlat.launch.supervision.local_run import LocalRanks
from hlat.launch.supervision.running_ranks import SignalForwarder
from hlat.launch.supervision.supervisor import Supervision
from hlat.resilience import HEARTBEAT_FOLDER
from hlat.runtime import version
from hlat.runtime.distributed.network import RUN_SECRET_ENV
from hlat.runtime.errors import LaunchError
from hlat.runtime.process import DEADLINE_ENV, host_name
from hlat.runtime.progress import machine_clock
from hlat.runtime.storage.run_folder import ATTEMPT_ENV

Launch = Callable[[RankPlaces, Mapping[str, str], Path], AbstractContextManager[ProcessSet]]
"""Launches processes with additional environment variables; their error reports go into the folder."""


class HostRanks:
    """Processes of one attempt on this host; it adds a folder for their heartbeats to ``beats``."""

    def __init__(self, attempt: AttemptOrder, member: HostMember, launch: Launch, beats: Path) -> None:
        self.number = attempt.number
        self._member, self._done = member, 0
        self._ended: dict[int, float] = {}  # times on the monotonic clock
        self._stacks: dict[int, str] = {}
        self._cleaning: threading.Thread | None = None
        self._stack = ExitStack()
        places = RankPlaces(member.first_rank, member.nproc, attempt.world, member.index, attempt.address, attempt.port)
        folder = beats / f"attempt-{attempt.number}"
        folder.mkdir(exist_ok=True)
        environment = {
            **attempt.environment,
            RUN_SECRET_ENV: attempt.secret,
            HEARTBEAT_FOLDER: str(folder),
            ATTEMPT_ENV: f"{attempt.launch}/{attempt.number}",
        }
        if attempt.deadline is not None:
            # Orders have the seconds that are left: clocks of hosts are never compared.
            environment[DEADLINE_ENV] = repr(machine_clock() + attempt.deadline)
        reports = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="hlat-launch-"))
        workers = self._stack.enter_context(launch(places, environment, Path(reports)))
        self._ranks = LocalRanks(workers, folder)

    @property
    def done(self) -> int:
        """Number of the last instruction that was carried out."""
        is_cleaning = self._cleaning is not None and self._cleaning.is_alive()  # the newest instruction still goes on
        return self._done - 1 if is_cleaning else self._done

    def follow(self, instructions: tuple[Instruction, ...]) -> None:
        for instruction in instructions:
            if instruction.number > self._done:
                self._carry_out(instruction)
                self._done = instruction.number

    def statuses(self) -> tuple[RankStatus, ...]:
        now, beats = time.monotonic(), {beat.rank: beat for beat in self._ranks.readings()}
        found = []
        for rank in self._ranks.ranks:
            code = self._ranks.poll(rank)
            if code is not None:
                self._ended.setdefault(rank, now)
            report = None if code is None else self._ranks.report(rank)
            if report is not None:
                report = replace(report, time=report.time - time.time())  # an age, for the same reason
            beat = beats[rank].aged(now) if rank in beats else None
            stopped = code is None and self._ranks.is_stopped(rank)
            found.append(RankStatus(rank, code, report, beat, stopped, self._stacks.get(rank, "")))
        return tuple(found)

    def run_id(self) -> str | None:
        return self._ranks.run_id()

    def close(self) -> None:
        self._ranks.kill([rank for rank in self._ranks.ranks if self._ranks.poll(rank) is None])
        if self._cleaning is None or not self._cleaning.is_alive():
            self._ranks.end_leftovers(0.0, lambda: True)
        self._stack.close()

    def _carry_out(self, instruction: Instruction) -> None:
        running = [rank for rank in self._ranks.ranks if self._ranks.poll(rank) is None]
        addressed = [rank for rank in running if rank in instruction.ranks]
        if instruction.kind == "signal":
            self._ranks.send(addressed, int(instruction.value))
        elif instruction.kind == "kill":
            self._ranks.kill(addressed)
        elif instruction.kind == "stacks":
            self._stacks = self._ranks.stacks()
        elif instruction.kind == "leftovers":
            end = self._ranks.end_leftovers
            # On a thread: it waits for a save, and the host must give signs of life meanwhile.
            self._cleaning = threading.Thread(target=end, args=(instruction.value, lambda: False), daemon=True)
            self._cleaning.start()


_POLL = 0.2  # seconds
_PUBLISH = 0.5  # seconds between two statuses if nothing has changed
_LOOKING = 3.0  # seconds of looking whether another process has this host's number, or leads
_LEADER_SILENCE = 10.0  # seconds without a sign of life after which another host leads
_FIRST_LEADER = 15.0  # the same before there was a leader: the host with the lowest number may come later
_EXAMINE_AGAIN = 30.0  # seconds between two examinations of a host that is bad
_DISK = 60.0  # seconds for which the shared disk may refuse writes
_GIVEN_UP = 3  # signals after which this host ends without waiting for a leader


@dataclass(frozen=True)
class HostPlace:
    """This host in its cluster."""

    index: int
    address: str  # address for the other hosts
    nproc: int  # processes that it runs


@dataclass(frozen=True)
class HostRun:
    """A run on several hosts, as one of them supervises it."""

    place: HostPlace
    least: int  # smallest number of hosts
    most: int  # number of hosts of the complete cluster
    launch: Launch  # launches the processes of this host
    fits: Callable[[int], bool]  # returns True if the recipe has a layout for this number of processes
    # examines this host after a failure that it was to blame for, and returns what is wrong with it
    examine: Callable[[], list[str]]
    supervision: Supervision

    @property
    def folder(self) -> Path:
        return self.supervision.run_dir / FOLDER


@dataclass(frozen=True)
class NewLeader:
    """Knowledge of a supervisor that becomes the leader."""

    term: int  # number of its leadership
    incarnation: str  # this start of the supervisor
    table: HostTable
    launch: str | None  # the launch whose leader it has followed; None if there was none
    attempt_age: float  # seconds since it has seen the present attempt for the first time


Lead = Callable[[NewLeader], None]
"""Leads; returns when the run has ended or another host leads."""


class HostAgent:
    """Supervisor of this host; it calls ``lead`` on a thread if this host becomes the leader."""

    def __init__(self, run: HostRun, beats: Path, stops: SignalForwarder, lead: Lead) -> None:
        self._run, self._folder, self._place = run, run.folder, run.place
        self._beats, self._stops, self._lead = beats, stops, lead
        self._incarnation = secrets.token_hex(8)
        self._table = HostTable(run.folder)
        self._ranks: HostRanks | None = None
        self._known: object = None  # what the status of this host said last, as far as a change is urgent
        self._count = 0
        self._published = self._written = -1.0
        self._findings: tuple[str, ...] = ()
        self._suspected = self._examined = 0  # numbers of attempts after which it has to be, and was, examined
        self._leading: threading.Thread | None = None
        self._follower = Follower()
        self._newest_term, self._terms_read_at = 0, -_LOOKING
        self._leaderless_since = time.monotonic()
        self._launch_name: str | None = None
        self._attempt_seen: tuple[int, float] = (0, 0.0)  # number, and monotonic time
        self._started: set[int] = set()  # attempts, each of which is started once
        self._leader_error: list[BaseException] = []

    def run(self) -> int:
        """Carry out orders until the run has ended; return its exit code.

        Raises:
            LaunchError: another process runs as this host; or the shared disk, or this host's address, is unusable.
        """
        self._refuse_twins()
        prober = Prober()
        try:
            with accept_connections(self._place.address) as port, prober.running():
                return self._loop(port, prober)
        except OSError as error:
            raise LaunchError(f"host {self._place.index} at {self._place.address}: {error}") from error
        finally:
            if self._ranks is not None:
                self._ranks.close()

    def _loop(self, port: int, prober: Prober) -> int:
        while True:
            self._look_around()
            if self._leader_error:
                raise self._leader_error[0]
            orders = self._valid_orders()
            if orders is not None and orders.final is not None:
                self._end_ranks()
                if self._leading is not None:
                    self._leading.join(_LOOKING)
                return orders.final
            self._follow(orders, prober)
            self._publish(port, prober)
            self._elect(orders)
            if len(self._stops.received) >= _GIVEN_UP and orders is None:
                return 128 + self._stops.received[0]
            time.sleep(_POLL)

    def _look_around(self) -> None:
        """Read the status of the leader and of this host, and of all hosts if the leader is silent."""
        orders = read_orders(self._folder)
        is_led = orders is not None and self._table.silence(orders.leader) < _LOOKING
        # All hosts that read all files all the time would be too much for a shared disk.
        self._table.refresh({self._place.index, orders.leader} if orders is not None and is_led else None)

    def _refuse_twins(self) -> None:
        deadline = time.monotonic() + _LOOKING
        while time.monotonic() < deadline and not self._stops.received:
            self._table.refresh()
            time.sleep(_POLL)
        # A file that is left of an earlier launch does not change; that of a living twin does.
        twin = self._table.living(_LOOKING).get(self._place.index)
        if twin is not None:
            raise LaunchError(
                f"host {self._place.index} of this run is {twin.name} already, and it is alive. Give each host a "
                "number of its own (--node), and each run a folder of its own (run.name or run.dir)."
            )

    # --- orders -------------------------------------------------------------------------------------------------------

    def _valid_orders(self) -> Orders | None:
        """Return the orders of a leader that is alive, or was when it was followed; else None."""
        read = read_orders(self._folder)
        orders = self._follower.accept(read, self._is_led(read))
        if orders is not None:
            self._launch_name = orders.launch
            if orders.attempt is not None and orders.attempt.number != self._attempt_seen[0]:
                self._attempt_seen = (orders.attempt.number, time.monotonic())
        return orders

    def _is_led(self, orders: Orders | None) -> bool:
        """Return True if the leader who gave these orders is alive and has no successor."""
        if time.monotonic() - self._terms_read_at > _LOOKING:
            self._newest_term, self._terms_read_at = newest_term(self._folder), time.monotonic()
        is_alive = leader_is_alive(orders, self._table, _LEADER_SILENCE)
        # A successor may be lost before its first orders: these then lead nobody, though their leader lives on.
        return orders is not None and orders.term >= self._newest_term and is_alive

    def _follow(self, orders: Orders | None, prober: Prober) -> None:
        if orders is None:
            return
        attempt = orders.attempt
        if self._ranks is not None and (attempt is None or attempt.number != self._ranks.number):
            self._end_ranks()
        self._examine_if_suspect(orders)
        member = None if attempt is None else attempt.member(self._place.index, self._incarnation)
        if attempt is None or member is None:
            return
        places = {each.index: (each.address, each.port) for each in attempt.members}
        prober.targets = {other: places[other] for other in neighbours(member.index, sorted(places))}
        if self._ranks is None and attempt.number not in self._started:
            self._started.add(attempt.number)
            self._ranks = HostRanks(attempt, member, self._run.launch, self._beats)
        if self._ranks is not None:
            self._ranks.follow(orders.instructions)

    def _end_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def _examine_if_suspect(self, orders: Orders) -> None:
        """Examine this host on a thread if it was to blame for the end of an attempt, until nothing is found."""
        number = orders.suspects.get(str(self._place.index), 0)
        if number <= self._suspected or self._ranks is not None:
            return
        self._suspected = number

        def examine() -> None:
            while self._suspected == number:
                self._findings = tuple(self._run.examine())
                if not self._findings:
                    self._examined = number
                    return
                time.sleep(_EXAMINE_AGAIN)

        threading.Thread(target=examine, name="examine", daemon=True).start()

    # --- status -------------------------------------------------------------------------------------------------------

    def _publish(self, port: int, prober: Prober) -> None:
        """Write the status of this host if it has changed, and twice a second."""
        now, ranks = time.monotonic(), self._ranks
        states = () if ranks is None else ranks.statuses()
        known = (
            tuple(self._stops.received),
            tuple((state.code, state.stopped) for state in states),
            None if ranks is None else (ranks.number, ranks.done),
        )
        if known == self._known and now - self._published < _PUBLISH:
            return
        self._count += 1
        status = HostStatus(
            index=self._place.index,
            incarnation=self._incarnation,
            count=self._count,
            name=host_name(),
            address=self._place.address,
            port=port,
            nproc=self._place.nproc,
            version=version.VERSION,
            launch=self._launch_name,
            attempt=None if ranks is None else ranks.number,
            ranks=states,
            run_id=None if ranks is None else ranks.run_id(),
            signals=known[0],
            done=0 if ranks is None else ranks.done,
            unreachable=prober.unreachable(),
            link=link_problem(self._place.address),
            findings=self._findings,
            examined=self._examined,
        )
        try:
            write_record(host_file(self._folder, self._place.index), status)
        except OSError as error:
            if 0 <= self._written < now - _DISK:
                raise LaunchError(f"{self._folder}: no status of this host could be written: {error}") from error
        else:
            self._written = now
        self._known, self._published = known, now

    # --- leadership ---------------------------------------------------------------------------------------------------

    def _elect(self, orders: Orders | None) -> None:
        """Become the leader if none is alive and no living host has a lower number."""
        if self._leading is not None and self._leading.is_alive():
            return
        if self._is_led(orders):
            self._leaderless_since = time.monotonic()
            return
        is_first = self._follower.term == 0 and self._place.index != 0
        patience = _FIRST_LEADER if is_first else 0.0
        if not is_candidate(self._place.index, self._table.living(_LEADER_SILENCE)):
            return
        if time.monotonic() - self._leaderless_since < patience:
            return
        term = newest_term(self._folder) + 1
        if claim(self._folder, term):
            self._follower.lead(term)
            age = time.monotonic() - self._attempt_seen[1]
            candidate = NewLeader(term, self._incarnation, self._table, self._launch_name, age)
            self._leading = threading.Thread(target=self._run_leader, args=(candidate,), name="leader", daemon=True)
            self._leading.start()

    def _run_leader(self, candidate: NewLeader) -> None:
        try:
            self._lead(candidate)
        except BaseException as error:  # the main thread raises it
            self._leader_error.append(error)
