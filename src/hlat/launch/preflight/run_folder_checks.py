"""Checks of the folder of the run, and of what earlier runs have left in it.

    folder       it can be written, files are renamed and locked as on a local disk, it is large enough, fast and shared
    leftovers    processes with the run's lock file open, a lock that is held, folders of heartbeats
    incidents    events.jsonl --of the last day, that name this host, after its boot--> a host that failed repeatedly

A host that has failed once may have had bad luck. One that was blamed repeatedly, while others took part without
trouble, is to be left out before it costs another attempt; a repaired host has been started again, and begins anew.
"""

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from hlat.launch.preflight.health_check import (
    Evidence,
    Facts,
    HealthCheck,
    Symptom,
    gibibytes,
    judge_each,
    judge_wrong,
    megabytes,
)
from hlat.launch.preflight.request import HostView
from hlat.resilience import heartbeat_root, read_heartbeat, read_heartbeat_run_id
from hlat.runtime.process import is_running
from hlat.runtime.storage.run_folder import LOCK_NAME, read_run_id
from hlat.runtime.terminal import listed, plural
from hlat.tracking import read_events

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_WRITTEN = 16 << 20  # bytes that the rate is measured with
_SPACE = 1 << 30  # Free bytes that a folder needs without a recipe: one checkpoint of a model of 90 million parameters
# Bytes per second below which a disk is slow: a checkpoint of a 7B model (84 GB) would take over two hours. A disk of
# any kind writes ten times as fast; a network file system that is overloaded or mounted over a wrong network does not
_SLOWEST_DISK = 10e6


def _in_folder(try_out: Callable[[HostView, Path], Facts], if_full: Facts) -> Callable[[HostView], Facts]:
    """Measure in a folder of its own in the run's folder; of a full disk, which HD15 reports, facts are ``if_full``."""

    def measure(place: HostView) -> Facts:
        try:
            place.request.run_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(
                prefix=".doctor-", dir=place.request.run_dir, ignore_cleanup_errors=True
            ) as name:
                return try_out(place, Path(name))
        except OSError as error:
            if error.errno in _DISK_FULL:
                return if_full
            raise

    return measure


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        # The disk is examined, not the system's cache in memory.
        os.fsync(file.fileno())


def _try_writing(place: HostView, folder: Path) -> Facts:
    """Write, read back, and rename over an existing file, as every save does."""
    old, new = folder / "file", folder / "file.tmp"
    _write(old, b"old")
    _write(new, b"new")
    new.replace(old)
    return {"renames": old.read_bytes() == b"new" and not new.exists()}


def _measure_writing(place: HostView) -> Facts:
    try:
        return _in_folder(_try_writing, {"renames": True})(place)
    except OSError as error:
        return {"refused": f"{place.request.run_dir} cannot be written: {error.strerror}"}


def _not_written(facts: Facts) -> str:
    failed = "" if facts.get("renames") else "a file that was renamed over another did not replace it"
    return str(facts.get("refused", failed))


def _measure_space(place: HostView) -> Facts:
    def try_out(place: HostView, folder: Path) -> Facts:
        _write(folder / "file", bytes(1 << 20))
        return {"free": shutil.disk_usage(folder).free}

    return _in_folder(try_out, {"free": 0})(place) | {"recipe": place.request.recipe is not None}


def _judge_space(evidence: Evidence) -> Iterator[Symptom]:
    for case in evidence.cases:
        needed = evidence.plan.get("disk_bytes", 1 << 20 if case.facts["recipe"] else _SPACE)
        if case.facts["free"] < needed:
            free = gibibytes(case.facts["free"])
            yield Symptom(case.node, f"{free} are free in the run's folder, and checkpoints need {gibibytes(needed)}")


def _try_locks(place: HostView, folder: Path) -> Facts:
    """Lock a file twice: the second lock must be refused."""
    path = folder / "lock"
    with path.open("w") as first, path.open("r") as second:
        try:
            place.tools.flock(first.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            place.tools.flock(second.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return {"wrong": ""}
        except OSError as error:
            return {"wrong": f"files cannot be locked (flock): {error.strerror}"}
    return {"wrong": "a file that is locked was locked a second time"}


def _try_speed(place: HostView, folder: Path) -> Facts:
    # Random bytes: a file system that compresses would seem faster.
    content, best = os.urandom(_WRITTEN), float("inf")
    for number in range(2):
        begin = time.perf_counter()
        _write(folder / f"file-{number}", content)
        best = min(best, time.perf_counter() - begin)
    return {"rate": _WRITTEN / max(best, 1e-9)}


def _slow_disk(facts: Facts) -> str:
    rate = facts.get("rate", _SLOWEST_DISK)
    return f"the run's folder is written at {megabytes(rate)}" if rate < _SLOWEST_DISK else ""


def _summary_of_speed(evidence: Evidence) -> str:
    rates = [case.facts["rate"] for case in evidence.cases if "rate" in case.facts]
    return f"run folder written at {megabytes(min(rates))}" if rates else ""


def _measure_sharing(place: HostView) -> Facts:
    """Try to lock the file that host 0 has locked."""
    if place.lock_file is None:
        return {"wrong": ""}
    with place.lock_file.open("r+") as file:
        try:
            place.tools.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return {"wrong": ""}
    return {"wrong": "a file that host 0 has locked could be locked here: locks are not shared between hosts"}


_PROC = Path("/proc")
_MAX_RANKS = 64  # heartbeats of a folder that are read


def _measure_processes(place: HostView) -> Facts:
    """Find processes that have the lock file of this run open: its ranks and its savers."""
    path = place.request.run_dir / LOCK_NAME
    try:
        lock = path.stat()
    except OSError:
        return {"found": []}
    own = _ancestors()
    found = []
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if entry.name.isdigit() and int(entry.name) not in own and _same_network(entry) and _has_open(entry, lock):
            found.append([int(entry.name), _command_line(entry)])
    return {"found": found}


def _ancestors() -> set[int]:
    """This process and those that started it: a supervisor, a shell."""
    found, pid = set(), os.getpid()
    while pid > 0:
        found.add(pid)
        try:
            pid = int((_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
    return found


def _same_network(entry: Path) -> bool:
    """Return True if a process sees the network of this host, not that of a container or a simulated host."""
    with suppress(OSError):
        return (entry / "ns/net").readlink() == (_PROC / "self/ns/net").readlink()
    return True


def _has_open(entry: Path, lock: os.stat_result) -> bool:
    with suppress(OSError):
        for descriptor in (entry / "fd").iterdir():
            with suppress(OSError):
                found = descriptor.stat()
                if (found.st_dev, found.st_ino) == (lock.st_dev, lock.st_ino):
                    return True
    return False


def _command_line(entry: Path) -> str:
    with suppress(OSError):
        words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        return " ".join(word for word in words if word)[:120]
    return ""


def _leftover_processes(facts: Facts) -> str:
    found = facts["found"]
    pids = listed((pid for pid, _ in found), 8)
    return found and f"processes of an earlier run in this folder still run: {pids} ({found[0][1]})"


def _measure_run_lock(place: HostView) -> Facts:
    """Try to share the lock of the run: that fails while a run holds it, and two hosts can do it at once."""
    path = place.request.run_dir / LOCK_NAME
    with suppress(FileNotFoundError), path.open("r") as file:
        try:
            place.tools.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return {"holder": file.read(200).strip() or "another process"}
    return {"holder": ""}


def _judge_run_lock(evidence: Evidence) -> Iterator[Symptom]:
    """Name the host of the holder if it takes part, else the first that sees the lock."""
    held = [case for case in evidence.cases if case.facts["holder"]]
    if held:
        holder = held[0].facts["holder"]
        words = holder.replace(",", "").split()
        nodes = [node for node, name in evidence.hosts.items() if name in words]
        yield Symptom((nodes or [held[0].node])[0], f"a run holds the lock of the run's folder: {holder}")


def _measure_heartbeats(place: HostView) -> Facts:
    """Find folders of heartbeats of this run whose processes have all ended."""
    run_id, root = read_run_id(place.request.run_dir), heartbeat_root()
    if run_id is None or root is None:
        return {"found": []}
    stale = []
    for folder in sorted(root.glob("hlat-*")):
        with suppress(OSError):
            if read_heartbeat_run_id(folder) == run_id and not _is_beating(folder):
                stale.append(str(folder))
    return {"found": stale}


def _is_beating(folder: Path) -> bool:
    beats = (read_heartbeat(folder, rank) for rank in range(_MAX_RANKS))
    return any(beat is not None and is_running(beat.pid) for beat in beats)


_BLAMED_KINDS = ("host", "hang", "signal")  # not errors that a process has reported: the program's, or of a peer
_DAY = 86400.0
_OFTEN = 2  # incidents
_BOOT = Path("/proc/stat")


def _measure_incidents(place: HostView) -> Facts:
    """Find the incidents of this host."""
    path = place.request.run_dir / "events.jsonl"
    events = read_events(path) if path.exists() else []
    since = max(place.tools.clock() - _DAY, _boot_time())
    own = [event for event in events if _blames(event, place.request.name) and _event_time(event) > since]
    return {"incidents": [[event["kind"], str(event.get("cause", ""))[:200]] for event in own]}


def _blames(event: dict[str, Any], host: str) -> bool:
    return event.get("event") == "incident" and event.get("host") == host and event.get("kind") in _BLAMED_KINDS


def _event_time(event: dict[str, Any]) -> float:
    """Time of an event, in seconds since 1970; 0 if it has none."""
    with suppress(ValueError):
        return datetime.fromisoformat(str(event.get("time"))).timestamp()
    return 0.0


def _boot_time() -> float:
    """Return the time when this machine was started, in seconds since 1970; 0 if the system does not report it."""
    with suppress(OSError, ValueError, StopIteration):
        line = next(line for line in _BOOT.read_text().splitlines() if line.startswith("btime "))
        return float(line.split()[1])
    return 0.0


def _judge_incidents(evidence: Evidence) -> Iterator[Symptom]:
    """Find hosts that were blamed often, and more often than the median host."""
    counts = sorted(len(case.facts["incidents"]) for case in evidence.cases)
    usual = counts[(len(counts) - 1) // 2] if len(counts) > 1 else 0
    for case in evidence.cases:
        found = case.facts["incidents"]
        if len(found) >= _OFTEN and len(found) > usual:
            last = f"the last: {found[-1][1]}" if found[-1][1] else f"the last: {found[-1][0]}"
            message = f"blamed for {plural(len(found), 'incident')} of this run within a day; {last}"
            yield Symptom(case.node, message, is_warning=len(counts) == 1)


RUN_FOLDER_CHECKS = (
    HealthCheck(
        "HD14",
        "run-folder-writable",
        "host",
        "Mount the file system for writing, give the user permission, or choose another run.dir.",
        measure=_measure_writing,
        judge=judge_each(_not_written),
        is_quick=True,
    ),
    HealthCheck(
        "HD15",
        "run-folder-space",
        "host",
        "Free space, raise the quota, keep fewer checkpoints (checkpoint.keep_last), or choose another run.dir.",
        measure=_measure_space,
        judge=_judge_space,
        after=("run-folder-writable",),
        is_quick=True,
    ),
    HealthCheck(
        "HD16",
        "run-folder-locks",
        "host",
        "Mount the file system with locks (NFS: without nolock; Lustre: with flock), or choose another run.dir.",
        measure=_in_folder(_try_locks, {"wrong": ""}),
        judge=judge_wrong,
        after=("run-folder-writable",),
        is_quick=True,
    ),
    HealthCheck(
        "HD17",
        "run-folder-speed",
        "host",
        "Choose a faster disk for run.dir, or look for the load on this one.",
        measure=_in_folder(_try_speed, {}),
        judge=judge_each(_slow_disk),
        summary=_summary_of_speed,
        after=("run-folder-writable", "run-folder-space"),
    ),
    HealthCheck(
        "HD18",
        "run-folder-shared",
        "peers",
        "Set run.dir to a folder on a file system that all hosts mount under the same path, with locks that work "
        "across hosts (NFS: without local_lock; Lustre: with flock, not localflock).",
        measure=_measure_sharing,
        judge=judge_wrong,
        after=("run-folder-locks",),
    ),
    HealthCheck(
        "HD25",
        "leftover-processes",
        "host",
        "Wait until they have saved, or end them: kill PID, then kill -9 PID.",
        measure=_measure_processes,
        judge=judge_each(_leftover_processes),
        is_quick=True,
    ),
    HealthCheck(
        "HD26",
        "run-lock",
        "host",
        "Wait for that run, end it, or choose another run.name or run.dir.",
        measure=_measure_run_lock,
        judge=_judge_run_lock,
        after=("leftover-processes", "run-folder-locks"),
        is_quick=True,
    ),
    HealthCheck(
        "HD27",
        "stale-heartbeats",
        "host",
        "Remove the folders: nothing reads them any more.",
        measure=_measure_heartbeats,
        judge=judge_each(
            lambda facts: (
                facts["found"] and f"folders of heartbeats were left by an earlier run: {listed(facts['found'])}"
            ),
            is_warning=True,
        ),
        is_quick=True,
    ),
    HealthCheck(
        "HD29",
        "earlier-incidents",
        "host",
        "Replace the host, or repair and restart it: incidents before its last start do not count. The causes are in "
        "events.jsonl of the run (event incident).",
        _measure_incidents,
        judge=_judge_incidents,
    ),
)
