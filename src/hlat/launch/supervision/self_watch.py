"""A rank that watches itself: it ends when the run hangs, so that torchrun or Slurm can start it again.

    heartbeat of this rank --Watchdog, on a thread--> late --raise_alarm--> logs/hang/alarm
        every rank: alarmed --write--> logs/hang/rank-00003.json --read--> reports of all ranks
        reports --judge--> Hang: ranks without a report; else as the watchdog of a supervisor does; else the network
        --> message, stacks in <run.dir>/logs, events `hang` and `incident`, error report for torchrun --> exit code 1

hlat's supervisor does this for the ranks that it started on its machine. Under torchrun or srun there is none, and a
rank that waits for a peer whose host is gone would wait until a time limit of its collectives, hours later. Time limits
of phases are the supervisor's (``recovery.hang_seconds``), learned from this rank alone.

A rank without a report gives no sign of life. Times in reports are ages, so that clocks of hosts do not matter. No
report is left from an earlier attempt: each rank removes its own before it joins the others, and a run can hang only
after all have joined. Those of an earlier alarm, after which the run went on, are told by their time.
"""

import faulthandler
import math
import os
import platform
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic_core import to_json

from hlat.config import Recipe
from hlat.launch.hosts.records import parse_record
from hlat.launch.metrics_process import metrics_server
from hlat.launch.supervision.incidents import ObservedHang, RunEvents
from hlat.launch.worker_process import ErrorReport, write_report
from hlat.resilience import (
    HEARTBEAT_FOLDER,
    Hang,
    HeartbeatReading,
    Watchdog,
    find_hanging_ranks,
    heartbeat_root,
    read_heartbeat,
    running_heartbeat,
)
from hlat.runtime.logs import log_path
from hlat.runtime.process import rank_info
from hlat.runtime.storage.local_files import write_atomic
from hlat.runtime.terminal import listed

_ALARM = "alarm"


@dataclass(frozen=True)
class HangReport:
    """Activity of a rank when a run hung."""

    beat: HeartbeatReading  # its heartbeat; times are in seconds before the report, negative
    host: str
    late: bool  # True if its own phase had lasted too long


class HangReports:
    """Files of the reports of a run, as ``rank`` writes and reads them.

    Errors of the disk are ignored: a rank that cannot report ends without a verdict about the others.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._folder, self._rank = run_dir / "logs" / "hang", rank
        with suppress(OSError):
            # of an earlier attempt: a rank is here before it joins the others, and only then can the run hang
            self._file(rank).unlink(missing_ok=True)
        self._known_alarm = self._alarm()  # one that is there already is of an earlier attempt

    def raise_alarm(self) -> None:
        """Ask every rank for its report."""
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self._folder / _ALARM, str(self._rank).encode())

    def alarmed(self) -> bool:
        """Return True if a rank has raised an alarm since this was called last."""
        before, self._known_alarm = self._known_alarm, self._alarm()
        return self._known_alarm != before and self._known_alarm is not None

    def write(self, report: HangReport) -> None:
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self._file(self._rank), to_json(report))

    def read(self, world: int, margin: float = 0.0) -> list[HangReport]:
        """Return the reports since the last alarm, or ``margin`` seconds before it, of the ranks that have one."""
        alarm = -math.inf
        with suppress(OSError):
            alarm = (self._folder / _ALARM).stat().st_mtime
        found = (self._read(rank, alarm - margin) for rank in range(world))
        return [report for report in found if report is not None]

    def _read(self, rank: int, oldest: float) -> HangReport | None:
        with suppress(OSError):
            if self._file(rank).stat().st_mtime < oldest:  # by the clock of the shared folder, as the alarm
                return None
            return parse_record(HangReport, self._file(rank).read_bytes())
        return None

    def _file(self, rank: int) -> Path:
        return self._folder / f"rank-{rank:05d}.json"

    def _alarm(self) -> tuple[int, int] | None:
        with suppress(OSError):
            found = (self._folder / _ALARM).stat()
            return found.st_ino, found.st_mtime_ns  # each alarm is a new file
        return None


_LISTED = 8  # ranks or hosts in a message, at most


def judge(reports: Sequence[HangReport], own: HangReport, world: int, local_world: int | None) -> Hang:
    """Return the hang and the ranks that cause it; ``own`` is of a late rank, ``local_world`` None if unknown."""
    seconds = -own.beat.since
    silent = sorted(set(range(world)) - {report.beat.rank for report in reports})
    if silent:
        why = f"no sign of life from {_describe_places(silent, reports, world, local_world)}"
        return Hang(silent, own.beat.phase, own.beat.current_step, seconds, why)
    ranks, why = find_hanging_ranks([report.beat for report in reports], 0.0, lambda rank: False)
    hosts = list(dict.fromkeys(report.host for report in reports))
    if len(ranks) == world and len(hosts) > 1:
        why = f"all ranks wait for one another, on {listed(hosts, _LISTED)}: look for a broken network between them"
    first = next(report.beat for report in reports if report.beat.rank == ranks[0])
    return Hang(ranks, first.phase, first.current_step, -first.since, why)


def _describe_places(silent: Sequence[int], reports: Sequence[HangReport], world: int, local_world: int | None) -> str:
    """Describe where silent ranks run: complete hosts, or processes of hosts that have others."""
    if local_world is None:
        return listed((f"rank {rank}" for rank in silent), _LISTED)
    known = {report.beat.rank // local_world: report.host for report in reports}
    by_node: dict[int, list[int]] = defaultdict(list)
    for rank in silent:
        by_node[rank // local_world].append(rank)
    hosts, processes = [], []
    for node, ranks in by_node.items():
        if node in known:
            processes += [f"rank {rank} on {known[node]}" for rank in ranks]
        else:
            first, last = node * local_world, min(world, (node + 1) * local_world) - 1
            hosts.append(f"host {node} (rank {first})" if first == last else f"host {node} (ranks {first} to {last})")
    return " and ".join(listed(each, _LISTED) for each in (hosts, processes) if each)


_EXIT_CODE = 1  # as a supervisor's, whose restarts are used up
_POLL = 1.0  # seconds between two checks of the heartbeat and of the alarm; the latter is a call to a shared disk
_GATHERING = 5.0  # seconds for the other ranks to see the alarm and to report
_ENDING = _GATHERING + 2 * _POLL  # seconds from a late rank's report to its end: it answers no alarm after that
_EXCUSED = 60.0  # seconds, at least, between two alarms of a rank: each costs all ranks a call to the disk


@contextmanager
def watching_itself(recipe: Recipe, say: Callable[[str], None]) -> Iterator[None]:
    """Inside the block, end this process if its run hangs; on the first rank of a machine, serve metrics.

    No effect under a supervisor, which does both. A single process is not ended, nor one without
    ``recovery.hang_seconds``. Outside the main thread, whose activity is what a heartbeat has, only metrics are served.
    LaunchError: they cannot be served at the recipe's address.
    """
    here = rank_info()
    is_observed = here.local_rank == 0 and recipe.tracking.prometheus is not None
    is_main = threading.current_thread() is threading.main_thread()
    is_watched = here.world > 1 and recipe.recovery.hang_seconds is not None and is_main
    if HEARTBEAT_FOLDER in os.environ or not (is_observed or is_watched):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="hlat-", dir=heartbeat_root()) as name, ExitStack() as stack:
        folder = Path(name)
        if is_observed:
            observe = stack.enter_context(metrics_server(recipe, say))
            stack.enter_context(observe(folder))
        if is_main:
            stack.enter_context(running_heartbeat(here.rank, folder))
        if is_watched:
            watchdog = Watchdog(recipe.recovery.hang_seconds)
            stack.enter_context(_SelfWatch(recipe, folder, here.rank, here.world, watchdog).running())
        yield


class _SelfWatch:
    def __init__(self, recipe: Recipe, folder: Path, rank: int, world: int, watchdog: Watchdog) -> None:
        self._run_dir, self._folder, self._rank, self._world = recipe.run_dir, folder, rank, world
        self._watchdog = watchdog
        self._reports = HangReports(recipe.run_dir, rank)
        self._excused_until = 0.0  # monotonic time until which no alarm is raised: another rank does slow work
        self._stop = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(_POLL):
            beat, now = read_heartbeat(self._folder, self._rank), time.monotonic()
            if beat is None:
                continue
            report = HangReport(beat.aged(now), platform.node(), late=False)
            if self._reports.alarmed():
                self._reports.write(report)
            is_late = self._watchdog.check([beat], now, lambda rank: False) is not None
            if is_late and now >= self._excused_until:
                self._end(replace(report, late=True))

    def _end(self, own: HangReport) -> None:
        """Find out who is to blame, record it, and end this process, unless another rank does what it waits for."""
        self._reports.write(own)
        self._reports.raise_alarm()
        reports = self._gather(own)
        if self._stop.is_set():  # the block has ended meanwhile
            return
        limit = self._watchdog.seconds
        assert limit is not None, "without a limit no rank is late"
        if own.beat.waits_for_others and any(report.beat.is_advancing(0.0, limit) for report in reports):
            self._excused_until = time.monotonic() + max(limit, _EXCUSED)
            return
        hang = judge(reports or [own], own, self._world, _local_world())
        observed = ObservedHang(hang, "", self._write_stacks(hang))
        first_late = min((report.beat.rank for report in reports if report.late), default=self._rank)
        if first_late == self._rank:  # one rank records the hang, for all
            self._record(observed)
        with suppress(OSError, ValueError):
            os.write(2, f"rank {self._rank}: {observed}\n".encode("utf-8", "backslashreplace"))
        self._leave_report(observed)
        shutil.rmtree(self._folder, ignore_errors=True)  # os._exit does not leave the block that would remove it
        os._exit(_EXIT_CODE)  # the main thread waits in a library, and would never handle an exception

    def _gather(self, own: HangReport) -> list[HangReport]:
        """Wait for the reports of the other ranks, and return all; other late ranks, which alarm too, get ours."""
        deadline = time.monotonic() + _GATHERING
        while True:
            if self._reports.alarmed():
                self._reports.write(own)
            found = self._reports.read(self._world)
            if len(found) == self._world:
                return found
            if time.monotonic() > deadline or self._stop.wait(_POLL / 4):
                return self._reports.read(self._world, _ENDING)  # a late rank may have ended before our alarm

    def _write_stacks(self, hang: Hang) -> Path | None:
        path = log_path(self._run_dir, self._rank).with_name(f"hang-step-{hang.step:08d}.txt")
        with suppress(OSError), path.open("a", encoding="utf-8") as file:
            file.write(f"==== rank {self._rank}, pid {os.getpid()}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.write("\n")
            return path
        return None

    def _record(self, observed: ObservedHang) -> None:
        events = RunEvents(self._run_dir / "events.jsonl", lambda: True, lambda kind, fields: None)
        hang = observed.event_fields()
        events.event("hang", **hang)
        decision = "no supervisor: the launcher decides about a restart"
        about = {"kind": "hang", "cause": hang["why"], "detail": str(observed), "decision": decision}
        common = {name: hang[name] for name in ("rank", "step", "phase")}
        events.event("incident", **common, **about, restart=False, seconds=0.0)

    def _leave_report(self, observed: ObservedHang) -> None:
        """Write the error report that torchrun shows."""
        file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if not file:
            return
        is_cause = self._rank in observed.hang.ranks
        report = ErrorReport(
            "own" if is_cause else "connection", str(observed), False, _EXIT_CODE, time.time(), True, "LaunchError"
        )
        with suppress(OSError):
            write_report(Path(file), report, "LaunchError")


def _local_world() -> int | None:
    """Number of ranks of each host, if the launcher says so."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) else None
