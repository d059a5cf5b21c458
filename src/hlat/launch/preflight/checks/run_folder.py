"""The folder of the run: it can be written, files are renamed and locked as on a local disk, and it is large enough."""

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hlat.launch.preflight.checks.base import Evidence, Facts, HealthCheck, Symptom, gibibytes, megabytes
from hlat.launch.preflight.place import HostView

_FULL = (errno.ENOSPC, errno.EDQUOT)
_WRITTEN = 16 << 20  # bytes that the rate is measured with
_SPACE = 1 << 30
"""Free bytes that a folder needs without a recipe: one checkpoint of a model of 90 million parameters."""
_SLOWEST = 10e6
"""Bytes per second below which a disk is slow: a checkpoint of a 7B model (84 GB) would take over two hours. A disk of
any kind writes ten times as fast; a network file system that is overloaded or mounted over a wrong network does not."""


@contextmanager
def _scratch(run_dir: Path) -> Iterator[Path]:
    """Make a folder for trials in the run's folder, and remove it afterwards."""
    run_dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".doctor-", dir=run_dir))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _measure_writing(place: HostView) -> Facts:
    """Write, read back, and rename over an existing file, as every save does."""
    try:
        with _scratch(place.request.run_dir) as folder:
            old, new = folder / "file", folder / "file.tmp"
            _write(old, b"old")
            _write(new, b"new")
            new.replace(old)
            return {"renames": old.read_bytes() == b"new" and not new.exists()}
    except OSError as error:
        if error.errno in _FULL:  # HD15 reports that
            return {"renames": True}
        return {"refused": f"{place.request.run_dir} cannot be written: {error.strerror}"}


def _judge_writing(evidence: Evidence) -> Iterator[Symptom]:
    for case in evidence.cases:
        if "refused" in case.facts:
            yield Symptom(case.node, case.facts["refused"])
        elif not case.facts["renames"]:
            yield Symptom(case.node, "a file that was renamed over another did not replace it")


def _measure_space(place: HostView) -> Facts:
    try:
        with _scratch(place.request.run_dir) as folder:
            _write(folder / "file", bytes(1 << 20))
            return {"free": shutil.disk_usage(folder).free, "recipe": place.request.recipe is not None}
    except OSError as error:
        if error.errno in _FULL:
            return {"free": 0, "recipe": place.request.recipe is not None}
        raise


def _judge_space(evidence: Evidence) -> Iterator[Symptom]:
    for case in evidence.cases:
        needed = evidence.plan.get("disk_bytes", 1 << 20 if case.facts["recipe"] else _SPACE)
        if case.facts["free"] < needed:
            free = gibibytes(case.facts["free"])
            yield Symptom(case.node, f"{free} are free in the run's folder, and checkpoints need {gibibytes(needed)}")


def _measure_locks(place: HostView) -> Facts:
    """Lock a file twice: the second lock must be refused."""
    try:
        with _scratch(place.request.run_dir) as folder:
            path = folder / "lock"
            with path.open("w") as first, path.open("r") as second:
                place.tools.flock(first.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                try:
                    place.tools.flock(second.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return {"wrong": ""}
                return {"wrong": "a file that is locked was locked a second time"}
    except OSError as error:
        if error.errno in _FULL:
            return {"wrong": ""}
        return {"wrong": f"files cannot be locked (flock): {error.strerror}"}


def _judge_locks(evidence: Evidence) -> Iterator[Symptom]:
    yield from (Symptom(case.node, case.facts["wrong"]) for case in evidence.cases if case.facts["wrong"])


def _measure_speed(place: HostView) -> Facts:
    try:
        with _scratch(place.request.run_dir) as folder:
            content, best = os.urandom(_WRITTEN), float("inf")
            for number in range(2):
                begin = time.perf_counter()
                _write(folder / f"file-{number}", content)
                best = min(best, time.perf_counter() - begin)
            return {"rate": _WRITTEN / max(best, 1e-9)}
    except OSError as error:
        if error.errno in _FULL:
            return {}
        raise


def _judge_speed(evidence: Evidence) -> Iterator[Symptom]:
    for case in evidence.cases:
        if case.facts.get("rate", _SLOWEST) < _SLOWEST:
            yield Symptom(case.node, f"the run's folder is written at {megabytes(case.facts['rate'])}")


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


CHECKS = (
    HealthCheck(
        "HD14",
        "run-folder-writable",
        "host",
        "Mount the file system for writing, give the user permission, or choose another run.dir.",
        measure=_measure_writing,
        judge=_judge_writing,
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
        measure=_measure_locks,
        judge=_judge_locks,
        after=("run-folder-writable",),
        is_quick=True,
    ),
    HealthCheck(
        "HD17",
        "run-folder-speed",
        "host",
        "Choose a faster disk for run.dir, or look for the load on this one.",
        measure=_measure_speed,
        judge=_judge_speed,
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
        judge=_judge_locks,
        after=("run-folder-locks",),
    ),
)
