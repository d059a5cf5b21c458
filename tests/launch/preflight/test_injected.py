"""Two hosts as threads of this process, with real rank processes, and one injected fault each.

These are faults that the system cannot make for one of two hosts: a wrong clock, a file system without locks, a device
that computes wrong results. They go in through the functions that checks measure with, or the program of a rank.
"""

import errno
import fcntl
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hlat.config import load_recipe
from hlat.launch.preflight.examination import check_before_restart, run_preflight
from hlat.launch.preflight.judgement import PreflightReport
from hlat.launch.preflight.rank_processes import RANK_WORK
from hlat.launch.preflight.request import HostTools, PreflightOptions, make_request

pytestmark = pytest.mark.slow


def odd_rank(fault: str) -> str:
    """Work of a rank process with a fault."""
    return f"tests.support.launch.odd_rank:{fault}"


def examine(
    run_dir: Path,
    tools: HostTools | None = None,
    work: str = RANK_WORK,
    recipes: tuple[str | None, str | None] = (None, None),
    wait: float = 40,
) -> PreflightReport:
    """Examine hosts a and b; tools, work and the second recipe are those of b."""
    reports: dict[int, PreflightReport] = {}

    def host(node: int) -> None:
        name, options = "ab"[node], PreflightOptions(nodes=2, node=node, name="ab"[node], address="127.0.0.1")
        request = make_request(recipes[node], (), replace(options, patience=wait))
        request = replace(request, run_dir=run_dir, name=name)
        reports[node] = run_preflight(request, tools if node else None, work if node else RANK_WORK)

    threads = [threading.Thread(target=host, args=(node,)) for node in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert reports[0].to_dict() == reports[1].to_dict()
    return reports[0]


def found(report: PreflightReport) -> list[tuple[str, str]]:
    """(Host, name of the check) of everything that was found."""
    return [(finding.host, finding.name) for finding in report.findings]


def no_locks(descriptor: int, operation: int) -> None:
    """Refuse as a file system without locks does."""
    raise OSError(errno.ENOLCK, "No locks available")


def own_locks(descriptor: int, operation: int) -> None:
    """Lock on this host only, as NFS with local_lock does: here, by pretending that the other host's lock is free."""
    name = Path(f"/proc/self/fd/{descriptor}").readlink().name
    if not (name == "lock" and "doctor/" in str(Path(f"/proc/self/fd/{descriptor}").readlink())):
        fcntl.flock(descriptor, operation)


@pytest.mark.parametrize(
    ("tools", "name"),
    [
        (HostTools(flock=no_locks), "run-folder-locks"),
        (HostTools(flock=own_locks), "run-folder-shared"),
        (HostTools(available_memory=lambda: 100 << 20), "host-memory"),
        (HostTools(), None),
    ],
    ids=["no locks", "locks of one host", "memory", "healthy"],
)
def test_a_faulty_system_is_named(tmp_path: Path, tools: HostTools, name: str | None):
    report = examine(tmp_path, tools)
    print(report.seconds, [str(finding) for finding in report.findings], report.measured)
    assert found(report) == ([("b", name)] if name else [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("flip", "matmul-result"),
        ("slow", "matmul-rate"),
        ("die", "rank-processes"),
        ("hang", "collectives-finish"),
        ("ahead", "clock-skew"),
    ],
)
def test_a_faulty_process_is_named(tmp_path: Path, fault: str, name: str):
    report = examine(tmp_path, work=odd_rank(fault), wait=25 if fault == "hang" else 40)
    print(report.seconds, [str(finding) for finding in report.findings])
    assert found(report) == [("b", name)]
    if fault == "ahead":
        assert report.findings[0].message == "its clock is 30.0 s ahead of those of the other hosts"
    else:
        assert "rank 1: " in report.findings[0].message


def test_another_recipe_is_named(tmp_path: Path, recipe_file: Path):
    other = tmp_path / "other.yaml"
    other.write_text(recipe_file.read_text().replace("steps: 40", "steps: 50") + "\n")
    texts = [path.read_text().replace("data:", f"data:\n  path: {tmp_path}") for path in (recipe_file, other)]
    for path, text in zip((recipe_file, other), texts, strict=True):
        path.write_text(text)
    report = examine(tmp_path / "run", recipes=(str(recipe_file), str(other)))
    assert found(report) == [("b", "recipe-equal")]
    assert report.findings[0].message == "training.steps is 50, and 40 on the other hosts"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_a_missing_device_is_named(tmp_path: Path, recipe_file: Path):
    recipe = load_recipe(recipe_file, [f"data.path={tmp_path}", f"run.dir={tmp_path / 'run'}", "run.device=cuda"])
    report = run_preflight(make_request(recipe, (), PreflightOptions(nproc=1)))
    assert [finding.name for finding in report.findings] == ["device-visible"]
    assert "torch finds no such device here" in report.findings[0].message


def test_before_a_restart_a_healthy_host_has_no_findings_and_a_leftover_is_one(tmp_path: Path, recipe_file: Path):
    recipe = load_recipe(recipe_file, [f"data.path={tmp_path}", f"run.dir={tmp_path / 'run'}"])
    began = time.monotonic()
    assert check_before_restart(recipe, 2) == []
    print(f"before a restart: {time.monotonic() - began:.2f} s")
    assert [finding.name for finding in check_before_restart(recipe, 1, work=odd_rank("flip"))] == ["matmul-result"]
    hung = check_before_restart(recipe, 1, 2.0, work=odd_rank("asleep"))
    assert [finding.name for finding in hung] == ["rank-processes"]


def test_the_process_that_examines_a_host_does_not_import_torch(tmp_path: Path):
    """It has to report a host that torch does not fit on."""
    program = f"""
import sys
from pathlib import Path
from hlat.launch import PreflightOptions, make_request, run_preflight
options = PreflightOptions(nproc=2, nodes=1, run_dir=Path({str(tmp_path)!r}))
report = run_preflight(make_request(None, (), options, {{}}))
print(report.ranks, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]
    assert list(tmp_path.iterdir()) == []
