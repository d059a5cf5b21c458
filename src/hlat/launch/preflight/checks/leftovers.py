"""Leftovers of earlier runs: processes with the run's lock file open, a lock that is held, folders of heartbeats."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hlat.launch.preflight.checks.base import Evidence, Facts, HealthCheck, Symptom
from hlat.launch.preflight.place import HostView
from hlat.resilience import heartbeat_root, read_heartbeat, read_heartbeat_run_id
from hlat.runtime.process.process_status import is_running
from hlat.runtime.storage.run_folder import LOCK_NAME, read_run_id

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
            found.append([int(entry.name), _command(entry)])
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
    try:
        return (entry / "ns/net").readlink() == (_PROC / "self/ns/net").readlink()
    except OSError:
        return True


def _has_open(entry: Path, lock: os.stat_result) -> bool:
    with suppress(OSError):
        for descriptor in (entry / "fd").iterdir():
            with suppress(OSError):
                found = descriptor.stat()
                if (found.st_dev, found.st_ino) == (lock.st_dev, lock.st_ino):
                    return True
    return False


def _command(entry: Path) -> str:
    with suppress(OSError):
        words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        return " ".join(word for word in words if word)[:120]
    return ""


def _judge_processes(evidence: Evidence) -> Iterator[Symptom]:
    for case in evidence.cases:
        if found := case.facts["found"]:
            pids = ", ".join(str(pid) for pid, _ in found[:8]) + (", ..." if len(found) > 8 else "")
            yield Symptom(case.node, f"processes of an earlier run in this folder still run: {pids} ({found[0][1]})")


def _measure_lock(place: HostView) -> Facts:
    """Try to share the lock of the run: that fails while a run holds it, and two hosts can do it at once."""
    path = place.request.run_dir / LOCK_NAME
    try:
        with path.open("r") as file:
            try:
                place.tools.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return {"holder": file.read(200).strip() or "another process"}
    except FileNotFoundError:
        return {"holder": ""}
    return {"holder": ""}


def _judge_lock(evidence: Evidence) -> Iterator[Symptom]:
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


def _judge_heartbeats(evidence: Evidence) -> Iterator[Symptom]:
    for case in evidence.cases:
        if found := case.facts["found"]:
            text = f"folders of heartbeats were left by an earlier run: {', '.join(found[:3])}"
            yield Symptom(case.node, text, is_warning=True)


CHECKS = (
    HealthCheck(
        "HD25",
        "leftover-processes",
        "host",
        "Wait until they have saved, or end them: kill PID, then kill -9 PID.",
        measure=_measure_processes,
        judge=_judge_processes,
        is_quick=True,
    ),
    HealthCheck(
        "HD26",
        "run-lock",
        "host",
        "Wait for that run, end it, or choose another run.name or run.dir.",
        measure=_measure_lock,
        judge=_judge_lock,
        after=("leftover-processes", "run-folder-locks"),
        is_quick=True,
    ),
    HealthCheck(
        "HD27",
        "stale-heartbeats",
        "host",
        "Remove the folders: nothing reads them any more.",
        measure=_measure_heartbeats,
        judge=_judge_heartbeats,
        is_quick=True,
    ),
)
