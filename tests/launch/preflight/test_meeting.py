"""The meeting of hosts in a folder, their processes, options, and reports merged by ``--hosts``."""

import json
import math
import os
import shutil
import stat
import sys
import threading
from pathlib import Path

import pytest

from hlat.launch import examine_by_ssh
from hlat.launch.hosts.records import HostStatus, host_file, write_record
from hlat.launch.preflight import meeting as meetings
from hlat.launch.preflight.meeting import Meeting, existing_part, remove_if_empty
from hlat.launch.preflight.rank_processes import rank_processes
from hlat.launch.preflight.request import PreflightOptions, make_request
from hlat.runtime.errors import LaunchError
from hlat.runtime.helper_process import Channel


def meet(folder: Path, node: int, nodes: int, patience: float) -> Meeting:
    options = PreflightOptions(nodes=nodes, node=node, patience=patience)
    return Meeting(folder, make_request(None, (), options, {}))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch):
    """Limits that no host on a busy machine exceeds."""
    for name in ("_SILENCE", "_LEAVING"):
        monkeypatch.setattr(meetings, name, 600.0)


def test_hosts_meet_exchange_reports_and_leave_nothing(tmp_path: Path, patient: None):
    """Files of an earlier meeting that was killed lie there."""
    folder = tmp_path / "doctor"
    folder.mkdir()
    for node in range(3):
        old = HostStatus(node, f"earlier{node}", 7, "", "", 0, 1, "")
        write_record(host_file(folder, node), old)
        (folder / f"earlier{node}").mkdir()
        (folder / f"earlier{node}" / "earlier0-verdict.json").write_text(json.dumps({"stale": True}))
    verdicts = {}

    def host(node: int) -> None:
        meeting = meet(folder, node, 3, patience=600)
        meeting.post("host", {"node": node})
        if node == 0:
            meeting.post("verdict", {"heard": sorted(meeting.gather("host", range(3)))})
        verdicts[node] = meeting.read_first("verdict")
        meeting.leave()

    threads = [threading.Thread(target=host, args=(node,)) for node in (1, 2, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == {node: {"heard": [0, 1, 2]} for node in range(3)}
    assert list(tmp_path.iterdir()) == []


def test_a_host_that_does_not_come_or_stops_counting_is_left_behind(
    tmp_path: Path, patient: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(meetings, "_BEAT", 0.1)
    hosts: dict[int, Meeting] = {}

    def arrive(node: int) -> None:
        hosts[node] = meet(tmp_path, node, 3, patience=600)

    arrive(0)
    thread = threading.Thread(target=arrive, args=(1,))
    thread.start()
    with monkeypatch.context() as impatient:
        impatient.setattr(hosts[0], "_patience", 0.2)
        assert hosts[0].gather("never", [2]) == {}
    thread.join()
    hosts[1].post("first", {})
    assert set(hosts[0].gather("first", [1])) == {1}
    monkeypatch.setattr(meetings, "_SILENCE", 0.0)
    hosts[1]._stop.set()  # as a host that is killed
    assert hosts[0].gather("second", [1], math.inf) == {}, "it waits no longer than for a silent host"
    hosts[0]._stop.set()
    with pytest.raises(TimeoutError, match="no sign of life from host 0"):
        hosts[1].read_first("second")


def test_a_meeting_that_begins_while_another_ends_keeps_its_files(tmp_path: Path):
    old = meet(tmp_path / "doctor", 0, 1, patience=600)
    new = meet(tmp_path / "doctor", 0, 1, patience=600)
    new.post("host", {"here": 1})
    old.leave()
    assert new.gather("host", [0]) == {0: {"here": 1}}
    new.leave()
    assert list(tmp_path.iterdir()) == []


def test_a_host_is_waited_for_that_reported_long_ago(tmp_path: Path, patient: None, monkeypatch: pytest.MonkeyPatch):
    first = meet(tmp_path, 0, 2, patience=600)
    other = meet(tmp_path, 1, 2, patience=600)
    other.post("host", {})
    assert set(first.gather("host", [1])) == {1}
    monkeypatch.setattr(meetings, "_SILENCE", -1.0)  # any time is too long
    waits: list[bool] = []
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: waits.append(host_file(tmp_path, 1).exists()))
    monkeypatch.setattr(meetings.time, "sleep", lambda _: other.leave())  # while host 0 waits
    first.leave()
    assert waits == [False]


def test_without_host_0_another_gives_up(tmp_path: Path):
    with pytest.raises(TimeoutError, match="no sign of life from host 0"):
        meet(tmp_path / "doctor", 1, 2, patience=0.2)
    assert list(tmp_path.iterdir()) == []


def test_folders_that_were_made_are_removed_up_to_those_that_were_there(tmp_path: Path):
    folder = tmp_path / "a/b/c"
    kept = existing_part(folder)
    folder.mkdir(parents=True)
    (tmp_path / "a/file").touch()
    remove_if_empty(folder, kept)
    assert kept == tmp_path and [path.name for path in (tmp_path / "a").iterdir()] == ["file"]


def answer(channel: Channel) -> None:
    """Answer orders as the program of a rank does; rank 1 ends then, and rank 2 fails."""
    while True:
        order, _ = channel.receive()
        channel.send({"module": "device", "facts": {"order": order}})
        if os.environ["LOCAL_RANK"] == "1":
            os.write(2, b"starting\nno memory\n")
            os._exit(3)
        if os.environ["LOCAL_RANK"] == "2":
            raise ValueError("no such device")
        if "late" not in order:
            channel.send({"done": True})


def test_a_process_of_a_rank_answers_its_own_order_or_says_how_it_ended():
    with rank_processes(3, f"{__name__}:answer") as ranks:
        done, died, failed = ranks.ask([{"n": 5}, {"n": 6}, {"n": 7}], 60.0)
        late, *_ = ranks.ask([{"n": 8, "late": True}], 0.5)
    assert [found["modules"]["device"]["order"]["n"] for found in (done, died, failed)] == [5, 6, 7]
    assert (done["died"], done["trouble"], done["progress"]) == ("", "", 2)
    assert died["died"] == died["trouble"] == "ended with exit code 3: no memory"
    assert failed["died"] == failed["trouble"] == "failed: ValueError: no such device"
    assert (late["died"], late["trouble"]) == ("", "its process did not finish within 0.5 s")
    assert late["modules"]["device"]["order"]["n"] == 8, "not what it had answered before"


SLURM_TASK = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (1, 0)),
        ({**SLURM_TASK, "SLURM_NNODES": "4", "SLURM_NODEID": "2"}, (4, 2)),
        ({"GROUP_WORLD_SIZE": "3", "GROUP_RANK": "1"}, (3, 1)),
    ],
)
def test_the_environment_says_which_host_this_is(environment: dict[str, str], expected: tuple[int, int]):
    request = make_request(None, (), PreflightOptions(), environment)
    assert (request.nodes, request.node) == expected


def test_kubernetes_gives_the_index_and_slurm_the_name():
    request = make_request(None, (), PreflightOptions(nodes=4), {"JOB_COMPLETION_INDEX": "3", "SLURMD_NODENAME": "n3"})
    assert (request.node, request.name) == (3, "n3")


def test_all_problems_of_the_options_are_listed():
    options = PreflightOptions(nodes=3, nproc=0, patience=0, instance="no-such-machine")
    with pytest.raises(LaunchError) as caught:
        make_request(None, ["a.b=c"], options, {})
    for part in ("--node is missing", "--nproc 0", "--wait 0", "--instance no-such-machine", "a.b=c"):
        assert part in str(caught.value)


def test_the_script_of_a_job_of_several_machines_is_told_to_use_srun():
    with pytest.raises(LaunchError, match="srun --ntasks-per-node=1 hlat doctor"):
        make_request(None, (), PreflightOptions(), {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"})


TRANSPORT = """#!{python}
import json, sys
host, words = sys.argv[1], sys.argv[2:]
node = words[words.index("--node") + 1]
def report(name, findings, partial):
    checks = [{{"id": i, "name": n, "ok": False, "message": m, "remedy": "r"}} for i, n, m in findings]
    return {{"host": name, "ok": not findings, "checks": checks}}
def show(hosts, partial, stream):
    content = {{"ok": False, "hosts": hosts, "bad_hosts": [], "measured": [], "skipped": [], "ranks": 1, "seconds": 1}}
    print(json.dumps({{**content, "partial": partial}}), file=stream)
silent = [("HD01", "sign-of-life", "no sign of life")]
{body}
"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (  # host 1 is alive, and sees no host 0: the folder is not shared
            "if node == '0': show([report('a', [], 0), report('b', silent, 0)], False, sys.stdout)\n"
            "else: show([report('b', [], 1), report('a', silent, 1)], True, sys.stderr)",
            [("b", "run-folder-shared")],
        ),
        (  # host 0 cannot write, which is why nobody meets it
            "if node == '0': show([report('a', [('HD14', 'run-folder-writable', 'x')], 1)], True, sys.stdout)\n"
            "else: show([report('b', [], 1), report('a', silent, 1)], True, sys.stderr)",
            [("a", "run-folder-writable")],
        ),
        (  # host 1 cannot be reached
            "if node == '0': show([report('a', [], 0), report('b', silent, 0)], False, sys.stdout)\n"
            "else: sys.exit('no route to host')",
            [("b", "sign-of-life")],
        ),
    ],
    ids=["not shared", "host 0 read-only", "unreachable"],
)
def test_reports_of_hosts_that_did_not_meet_are_merged(tmp_path: Path, body: str, expected: list[tuple[str, str]]):
    transport = tmp_path / "transport"
    transport.write_text(TRANSPORT.format(python=sys.executable, body=body))
    transport.chmod(transport.stat().st_mode | stat.S_IXUSR)
    report = examine_by_ssh(["a", "b"], None, [], PreflightOptions(), str(transport))
    assert [(finding.host, finding.name) for finding in report.findings] == expected
    assert [host.name for host in report.hosts] == ["a", "b"]


def test_hosts_are_named_once_and_do_not_look_like_options():
    for hosts in (["a", "a"], ["-oProxyCommand=x"], [""]):
        with pytest.raises(LaunchError, match="--hosts"):
            examine_by_ssh(hosts, None, [], PreflightOptions())
