"""Time of ``hlat doctor`` on healthy hosts and with each fault, and of the check before a restart.

    python benchmarks/doctor.py [ROUNDS]

Two hosts as network namespaces of this machine, which needs root and iproute2. Healthy: two processes each, tensor
parallelism in a host and data parallelism across. The faults are those of tests/launch/preflight/test_hosts.py, with
one process each; each has to be named on its host, and nothing else.
"""

import resource
import sys
import tempfile
import time
from pathlib import Path

from hlat.config import load_recipe
from hlat.launch.preflight.examination import check_before_restart
from results import Recorder

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.conftest import TINY_RECIPE
from tests.launch.preflight.test_hosts import FAULTS, doctor, found
from tests.support.launch.net_hosts import missing, net_hosts

_WITHOUT_MEETING = {"run-folder-writable", "run-folder-shared", "sign-of-life"}  # they take as long as --wait


def healthy(folder: Path, recipe: Path) -> float:
    """Seconds of an examination of two healthy hosts."""
    with net_hosts(folder / "hosts", 2) as hosts:
        words = (recipe, f"data.path={folder}", f"run.dir={folder / 'run'}", "batch.micro_batch=1")
        began = time.perf_counter()
        report = doctor(hosts, *words, "parallel.tensor=2", "--nproc", "2", wait=120, ok=True)
        seconds = time.perf_counter() - began
    assert not found(report), found(report)
    return seconds


def with_fault(folder: Path, fault: object, name: str) -> float:
    """Seconds of an examination with one fault, which has to be the only finding."""
    run_dir = folder / "run"
    run_dir.mkdir()
    assert callable(fault)
    with net_hosts(folder / "hosts", 2) as hosts, fault(hosts, folder, run_dir):
        began = time.perf_counter()
        report = doctor(hosts, "--run-dir", run_dir, wait=12 if name in _WITHOUT_MEETING else 40)
        seconds = time.perf_counter() - began
    assert found(report) == [("h1", name)], found(report)
    return seconds


def before_restart(folder: Path, recipe: Path) -> float:
    """Seconds of the check before a restart, with two processes."""
    loaded = load_recipe(recipe, [f"data.path={folder}", f"run.dir={folder / 'run'}"])
    began = time.perf_counter()
    findings = check_before_restart(loaded, 2)
    assert not findings, findings
    return time.perf_counter() - began


def processor_time() -> float:
    """Seconds of processors that all processes that were started here, and have ended, have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Print and record the table."""
    if reason := missing():
        sys.exit(reason)
    record, rounds = Recorder(__file__, "doctor.md"), int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with tempfile.TemporaryDirectory() as name:
        recipe = Path(name) / "recipe.yaml"
        recipe.write_text(TINY_RECIPE)
        for claim, measure in (
            ("hlat doctor, 2 healthy hosts with 2 processes each", healthy),
            ("check of a host before a restart, 2 processes", before_restart),
        ):
            began = processor_time()
            seconds = [measure(Path(tempfile.mkdtemp(dir=name)), recipe) for _ in range(rounds)]
            used = (processor_time() - began) / rounds
            print(f"{claim}: {', '.join(f'{each:.1f}' for each in seconds)} s; {used:.1f} s of processors")
            record.add(claim, "s", seconds, note=f"nothing found; {used:.1f} s of processors, on a busy machine")
        for fault, check in FAULTS:
            seconds = with_fault(Path(tempfile.mkdtemp(dir=name)), fault, check)
            print(f"{fault.__name__.replace('_', ' ')}: {seconds:.1f} s, {check}")
            record.add(
                f"hlat doctor, fault: {fault.__name__.replace('_', ' ')}", "s", seconds, note=f"only {check} named"
            )
    record.write()


if __name__ == "__main__":
    main()
