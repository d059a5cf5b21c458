"""Checks: what each measures here, and how it judges facts of several hosts."""

import errno
import fcntl
import os
import re
import subprocess
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from types import SimpleNamespace

import pytest
import torch

from hlat.launch.preflight import run_folder_checks as incidents
from hlat.launch.preflight.health_check import Case, Evidence, culprits
from hlat.launch.preflight.judgement import CHECKS, Gathered, judge
from hlat.launch.preflight.rank_checks import axis_groups
from hlat.launch.preflight.rank_measurements import MEASUREMENTS, RankPlace
from hlat.launch.preflight.request import HostTools, HostView, PreflightOptions, make_request
from hlat.resilience import heartbeat_root
from hlat.tracking import EventLog

ROOT = Path(__file__).resolve().parents[3]
BY_NAME = {check.name: check for check in CHECKS}


def symptoms(name: str, facts: list[dict], nproc: int = 1, **more) -> list[tuple[int, str]]:
    """(Host, message) of what a check finds in facts of one place per host, or of nproc ranks per host."""
    cases = tuple(Case(rank // nproc, rank, found) for rank, found in enumerate(facts))
    hosts = {node: f"h{node}" for node in range(len(facts) // nproc)}
    return [(found.node, found.message) for found in BY_NAME[name].judge(Evidence(cases, hosts, nproc, **more))]


def place(run_dir: Path, tools: HostTools | None = None) -> HostView:
    request = make_request(None, (), PreflightOptions(nodes=1, run_dir=run_dir), {})
    return HostView(request, tools or HostTools())


def test_numbers_and_names_are_unique_and_documented():
    numbers, names = [check.id for check in CHECKS], [check.name for check in CHECKS]
    assert len(set(numbers)) == len(numbers) and len(set(names)) == len(names)
    assert sorted(numbers) == [f"HD{number:02d}" for number in range(1, len(CHECKS) + 1)]
    page = (ROOT / "docs/doctor.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (HD\d\d) \| `([a-z-]+)` \|", page, re.MULTILINE))
    assert rows == {check.id: check.name for check in CHECKS}


def test_every_check_of_a_process_has_a_module_that_measures():
    for check in CHECKS:
        assert bool(check.module) == (check.stage in ("rank", "together")), check.name
        if check.module:
            assert check.module in MEASUREMENTS


# --- products


def product(bits: str = "aa", wrong: dict | None = None, kind: str = "chip") -> dict:
    return {"wrong": wrong, "hashes": [bits] * 3, "kind": kind}


def test_products_with_other_bits_are_found_among_equal_devices_only():
    facts = [product("aa"), product("aa"), product("bb"), product("cc", kind="other chip")]
    assert symptoms("matmul-result", facts) == [(2, "a product has other bits than on 2 of 3 equal devices")]


def test_a_wrong_integer_is_one_finding_and_does_not_make_others_unusual():
    wrong = {"row": 1, "column": 2, "value": 7.0, "expected": 8}
    found = symptoms("matmul-result", [product("bb", wrong), product("aa")])
    assert found == [(0, "element 1, 2 of a product of integers is 7.0, not 8")]


def test_a_product_that_varies_is_found():
    varying = {"wrong": None, "hashes": ["aa", "ab", "aa"], "kind": "chip"}
    assert [node for node, _ in symptoms("matmul-result", [product("aa"), varying])] == [1]


@pytest.mark.parametrize(
    ("rates", "peak", "shared", "slow"),
    [
        ([100, 95, 98, 41], None, False, []),
        ([100, 95, 98, 39], None, False, [3]),
        ([100, 38], None, False, [1]),
        ([100, 38], None, True, []),
        ([100, 19], None, True, [1]),
        ([100, 95], 201, False, [0, 1]),
        ([100, 95], 190, False, []),
    ],
)
def test_slow_products(rates: list[float], peak: float | None, shared: bool, slow: list[int]):
    facts = [{"flops": rate, "peak": peak, "kind": "chip", "dtype": "bfloat16", "shared": shared} for rate in rates]
    assert [node for node, _ in symptoms("matmul-rate", facts)] == slow


# --- collectives


def reduced(*groups: tuple[str, list[int], float]) -> dict:
    return {"groups": [{"axis": axis, "ranks": ranks, "wrong": [], "rate": rate} for axis, ranks, rate in groups]}


def test_a_slow_group_blames_the_host_that_is_in_no_good_group():
    """Four hosts in pairs: the link of host 3 is slow, on which both pairs with it depend."""
    first, second = [("dp", [0, 1], 10e9), ("pp", [0, 2], 10e9)], [("dp", [0, 1], 10e9), ("pp", [1, 3], 1e9)]
    third, fourth = [("dp", [2, 3], 1e9), ("pp", [0, 2], 10e9)], [("dp", [2, 3], 1e9), ("pp", [1, 3], 1e9)]
    facts = [reduced(*groups) for groups in (first, second, third, fourth)]
    assert {node for node, _ in symptoms("collective-rate", facts)} == {3}
    facts = [reduced(("tp", [rank // 2 * 2, rank // 2 * 2 + 1], 1e9 if rank > 5 else 10e9)) for rank in range(8)]
    assert {node for node, _ in symptoms("collective-rate", facts, nproc=2)} == {3}


def test_the_catalog_says_what_is_slow_where_there_is_nothing_to_compare_with():
    facts = [reduced(("all ranks", [0, 1], 10e9))] * 2
    assert symptoms("collective-rate", facts) == []
    assert symptoms("collective-rate", facts, links={"host": 30e9}) == []
    assert {node for node, _ in symptoms("collective-rate", facts, links={"host": 50e9})} == {0, 1}


def test_without_a_layout_that_fits_all_ranks_are_one_group():
    plan = {"groups": {"tp": [[0, 1], [2, 3]]}}
    assert axis_groups(plan, 4) == plan["groups"]
    assert axis_groups(plan, 2) == {"all ranks": [[0, 1]]}
    assert axis_groups({}, 2) == {"all ranks": [[0, 1]]}


# --- network


def test_the_fewest_hosts_that_explain_failures_are_blamed():
    everyone = [(a, b) for a in range(4) for b in range(4) if a != b]
    assert culprits([pair for pair in everyone if 2 in pair]) == [2]
    assert culprits([(0, 1)]) == [1]
    assert culprits([(0, 1), (1, 0)]) == [1]
    assert culprits([]) == []


def test_a_name_that_cannot_be_resolved_is_a_warning_only():
    cases = (Case(0, None, {"wrong": [], "unknown": ["pod-1"]}),)
    found = list(BY_NAME["host-names"].judge(Evidence(cases, {0: "a"})))
    assert [symptom.is_warning for symptom in found] == [True]


class Threads:
    """Ranks of one process, a thread each, with what ``measure_links`` uses of a group."""

    def __init__(self, world: int) -> None:
        self.world, self._barrier, self._sent = world, threading.Barrier(world), defaultdict(Queue)

    def of(self, rank: int) -> SimpleNamespace:
        def exchange(sent: dict[int, torch.Tensor], received: dict[int, torch.Tensor]) -> None:
            for target, tensor in sent.items():
                self._sent[rank, target].put(tensor)
            for source, tensor in received.items():
                tensor.copy_(self._sent[source, rank].get(timeout=600))

        return SimpleNamespace(world=self.world, barrier=self._barrier.wait, exchange=exchange)


@pytest.mark.parametrize(
    ("world", "sources"),
    [(2, []), (4, [[2], [], [0], []]), (6, [[4, 2], [], [0, 4], [], [2, 0], []])],
    ids=["one host", "two hosts", "three hosts"],
)
def test_the_first_process_of_a_host_hears_from_those_of_the_two_before_it(world: int, sources: list[list[int]]):
    group = Threads(world)

    def measured(rank: int) -> list[int]:
        place = RankPlace(torch.device("cpu"), rank, ranks=group.of(rank), nproc=2)
        rates = MEASUREMENTS["links"](place)["rates"]
        assert all(rate > 0 for _, rate in rates)
        return [source for source, _ in rates]

    with ThreadPoolExecutor(world) as pool:
        assert list(pool.map(measured, range(world))) == (sources or [[]] * world)


def test_a_slow_link_blames_the_host_of_most_slow_pairs():
    fast, slow = 200e6, 12e6
    facts = [[[4, fast], [2, slow]], [], [[0, slow], [4, slow]], [], [[2, slow], [0, fast]], []]
    found = symptoms("link-rate", [{"rates": rates} for rates in facts], nproc=2)
    assert [node for node, _ in found] == [1]
    links = "h1 to h0 12 MB/s, h0 to h1 12 MB/s, h2 to h1 12 MB/s, h1 to h2 12 MB/s"
    assert found[0][1] == f"its links are slow: {links}, expected 40 MB/s or more"
    assert symptoms("link-rate", [{"rates": [[1, fast]]}, {"rates": [[0, fast]]}]) == []


def test_of_two_clocks_the_second_is_wrong_and_of_three_the_odd_one():
    at = [{"offset": 0.0, "error_bound": 0.0}, {"offset": -3.0, "error_bound": 0.01}]
    assert symptoms("clock-skew", at) == [(1, "its clock is 3.0 s behind those of the other hosts")]
    three = [*at, {"offset": -3.01, "error_bound": 0.01}]
    assert symptoms("clock-skew", three) == [(0, "its clock is 3.0 s ahead of those of the other hosts")]
    ranks = [found for found in three for _ in range(2)]
    assert len(symptoms("clock-skew", ranks, nproc=2)) == 1, "the processes of a host have one clock"
    assert symptoms("clock-skew", [at[0], {"offset": 1.5, "error_bound": 0.6}]) == []


# --- the host


def test_memory_and_space_are_compared_with_the_plan():
    free = [{"free": 3 << 30, "recipe": True}]
    assert symptoms("host-memory", free, nproc=1, plan={"host_bytes": 2 << 30}) == []
    assert symptoms("host-memory", free, nproc=1, plan={"host_bytes": 3 << 30}) == [
        (0, "3 GiB of memory are free, and 1 process needs 3.5 GiB")
    ]
    assert symptoms("run-folder-space", free, plan={"disk_bytes": 2 << 30}) == []
    assert len(symptoms("run-folder-space", free, plan={"disk_bytes": 4 << 30})) == 1


def test_device_memory_in_use_and_too_small():
    facts = [{"free": 60e9, "total": 80e9}, {"free": 79e9, "total": 80e9}, {}]
    assert [node for node, _ in symptoms("device-in-use", facts)] == [0]
    assert [node for node, _ in symptoms("device-memory", facts, plan={"rank_bytes": 70e9})] == [0]


def test_a_healthy_folder_is_left_as_it_was(tmp_path: Path):
    for name in ("run-folder-writable", "run-folder-space", "run-folder-locks", "run-folder-speed"):
        check = BY_NAME[name]
        facts = check.measure(place(tmp_path))
        assert list(check.judge(Evidence((Case(0, None, facts),), {0: "a"}))) == [], (name, facts)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_beneath_a_file_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").touch()
    facts = BY_NAME["run-folder-writable"].measure(place(tmp_path / "file/run"))
    assert "cannot be written: Not a directory" in symptoms("run-folder-writable", [facts])[0][1]


def test_a_full_disk_is_a_matter_of_space_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    found = {}
    for name in ("run-folder-writable", "run-folder-space", "run-folder-locks", "run-folder-speed"):
        found[name] = len(symptoms(name, [BY_NAME[name].measure(place(tmp_path))]))
    assert found == dict.fromkeys(found, 0) | {"run-folder-space": 1}


def test_locks_that_are_granted_twice_are_found(tmp_path: Path):
    facts = BY_NAME["run-folder-locks"].measure(place(tmp_path, HostTools(flock=lambda descriptor, operation: None)))
    assert symptoms("run-folder-locks", [facts]) == [(0, "a file that is locked was locked a second time")]


def test_a_process_with_the_lock_file_and_the_lock_itself_are_found(tmp_path: Path):
    lock = tmp_path / ".lock"
    lock.write_text("pid 1 on elsewhere, launcher none")
    assert BY_NAME["leftover-processes"].measure(place(tmp_path)) == {"found": []}
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = subprocess.Popen(["sleep", "60"], pass_fds=[held.fileno()])
        try:
            processes = BY_NAME["leftover-processes"].measure(place(tmp_path))
            holder = BY_NAME["run-lock"].measure(place(tmp_path))
        finally:
            process.kill()
            process.wait()
    assert [pid for pid, _ in processes["found"]] == [process.pid]  # this process, which asks, is not among them
    assert symptoms("run-lock", [holder, holder])[0][0] == 0 and "elsewhere" in holder["holder"]
    assert BY_NAME["run-lock"].measure(place(tmp_path)) == {"holder": ""}


@pytest.mark.skipif(heartbeat_root() is None, reason="there is no /dev/shm")
def test_heartbeats_of_an_ended_process_of_this_run_are_a_warning(tmp_path: Path):
    (tmp_path / ".run-id").write_text("run-of-this-test")
    folder = heartbeat_root() / f"hlat-test-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / "run").write_text("run-of-this-test")
        facts = BY_NAME["stale-heartbeats"].measure(place(tmp_path))
    finally:
        (folder / "run").unlink()
        folder.rmdir()
    assert facts == {"found": [str(folder)]}


def test_a_recipe_that_differs_is_named_with_its_fields():
    same = {"fields": {"training.steps": 10, "run.name": "a"}, "wrong": ""}
    other = {**same, "fields": {"training.steps": 20, "run.name": "a"}}
    assert symptoms("recipe-equal", [same, other, same]) == [(1, "training.steps is 20, and 10 on the other hosts")]


# --- judgement


def test_a_check_that_another_makes_meaningless_is_skipped_and_a_failed_measurement_is_a_finding():
    gathered = Gathered({0: "a", 1: "b"}, 1)
    gathered.add("connections", 0, None, {"failed": [[1, "timed out"]]})
    gathered.add("link-rate", 0, None, {"rates": [[1, 1.0]]})
    gathered.add("host-memory", 1, None, {"error": "cannot be read"})
    report = judge(gathered, 2, 1.0)
    assert [(finding.name, finding.host, finding.message) for finding in report.findings] == [
        ("host-memory", "b", "cannot be read"),
        ("connections", "b", "a cannot connect to it (timed out)"),
    ]
    assert ("HD24", "not judged, because of connections") in report.skipped
    assert report.bad_hosts == ["b"] and not report.ok


def test_warnings_leave_a_host_healthy():
    gathered = Gathered({0: "a"}, 1)
    gathered.add("host-names", 0, None, {"wrong": [], "unknown": ["x"]})
    report = judge(gathered, 1, 1.0)
    assert report.ok and len(report.findings) == 1 and next(iter(report.lines())).startswith("warning HD20")
    assert type(report).from_dict(report.to_dict()) == report


# --- earlier incidents


def test_incidents_of_this_host_count_for_a_day_and_until_it_is_started_again(tmp_path, monkeypatch):
    now = 1_800_000_000.0
    boot = tmp_path / "stat"
    monkeypatch.setattr(incidents, "_BOOT", boot)
    boot.write_text("cpu 1 2\nbtime 1700000000\n")
    tools = HostTools(clock=lambda: now)
    here = place(tmp_path, tools)
    assert BY_NAME["earlier-incidents"].measure(here) == {"incidents": []}, "a run that has not begun"
    host = here.request.name
    for age, kind, name in [
        (100_000.0, "host", host),  # too old
        (3000.0, "hang", host),
        (2000.0, "exception", host),  # the program failed
        (1500.0, "signal", "another"),
        (1000.0, "host", host),
    ]:
        log = EventLog(tmp_path / "events.jsonl", lambda age=age: now - age)
        log.append("incident", host=name, kind=kind, cause=f"{age:.0f} s ago")
        log.append("hosts", hosts=[name])
        log.close()
    assert BY_NAME["earlier-incidents"].measure(here)["incidents"] == [["hang", "3000 s ago"], ["host", "1000 s ago"]]
    boot.write_text(f"btime {now - 2500:.0f}\n")
    assert BY_NAME["earlier-incidents"].measure(here)["incidents"] == [["host", "1000 s ago"]]


def test_a_host_that_was_blamed_again_and_again_is_named_unless_most_were():
    def blamed(*counts):
        return symptoms(
            "earlier-incidents", [{"incidents": [["hang", f"cause {n}"] for n in range(c)]} for c in counts]
        )

    assert blamed(0, 1, 0) == [] and blamed(3, 3) == [] and blamed(2, 2, 2, 0) == []
    message = "blamed for 2 incidents of this run within a day; the last: cause 1"
    assert blamed(0, 2) == [(1, message)] and blamed(2, 0, 1) == [(0, message)]
    (alone,) = BY_NAME["earlier-incidents"].judge(
        Evidence((Case(0, None, {"incidents": [["host", ""]] * 2}),), {0: "a"})
    )
    assert alone.is_warning, "nobody else could train instead"
