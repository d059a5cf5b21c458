"""Supervisors of several hosts, each a process of its own, that lose hosts, leaders and ranks; ranks need no torch."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hlat.launch.hosts.records import FOLDER, HostStatus, host_file, parse_record
from tests.support.launch.host_worker import NPROC
from tests.support.launch.launching import ROOT, wait_until


class Hosts:
    """Supervisors of a run on this machine, one per host."""

    def __init__(self, folder: Path, nodes: str, hang_seconds: float = 10.0) -> None:
        self.folder, self._nodes, self._hang_seconds = folder, nodes, hang_seconds
        (folder / "run").mkdir()
        (folder / "run" / ".run-id").write_text("run-a")
        self.processes: dict[int, subprocess.Popen] = {}

    def start(self, *nodes: int) -> None:
        words = [sys.executable, "-m", "tests.support.launch.host_worker", "supervise", str(self.folder)]
        for node in nodes:
            with (self.folder / f"log-{node}").open("ab") as log:
                command = [*words, str(node), self._nodes, str(self._hang_seconds)]
                self.processes[node] = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def tree(self, node: int) -> list[psutil.Process]:
        """All processes of a host."""
        supervisor = psutil.Process(self.processes[node].pid)
        return [*supervisor.children(recursive=True), supervisor]

    def signal(self, node: int, number: int) -> None:
        for process in self.tree(node):
            process.send_signal(number)

    def attempts(self) -> list[dict]:
        """Return the line that each rank wrote when it started."""
        path = self.folder / "attempts"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_attempt(self, ranks: int) -> None:
        """Wait until so many ranks have been started in all, and have trained."""
        wait_until(lambda: len(self.attempts()) >= ranks and self._train())

    def _train(self) -> bool:
        """True if all supervisors that run say that their ranks of one attempt have made steps."""
        nodes = [node for node, process in self.processes.items() if process.poll() is None]
        files = [host_file(self.folder / "run" / FOLDER, node) for node in nodes]
        found = [
            status
            for file in files
            if file.exists() and (status := parse_record(HostStatus, file.read_bytes())) is not None
        ]
        beats = [rank.beat for status in found for rank in status.ranks if rank.code is None and rank.beat is not None]
        trained = [beat for beat in beats if beat.start_step is not None and beat.step > beat.start_step]
        return len({status.attempt for status in found}) == 1 and len(trained) == NPROC * len(nodes)

    def events(self, kind: str) -> list[dict]:
        path = self.folder / "run" / "events.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if line["event"] == kind]

    def finish(self) -> list[int]:
        """Let the ranks finish; return the exit codes of the supervisors that are left."""
        (self.folder / "finish").touch()
        return self.codes()

    def codes(self) -> list[int]:
        return [self.processes[node].wait(600) for node in sorted(self.processes)]

    def log(self, node: int) -> str:
        return (self.folder / f"log-{node}").read_text()

    def end(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
                process.wait()


@pytest.fixture
def hosts(tmp_path, request):
    started = Hosts(tmp_path, **getattr(request, "param", {"nodes": "2"}))
    yield started
    started.end()


# No busy machine makes a host so silent that it counts as lost.
PATIENT = pytest.mark.parametrize("hosts", [{"nodes": "2", "hang_seconds": 1e5}], indirect=True, ids=["patient"])


@PATIENT
def test_a_stop_signal_to_one_host_saves_and_stops_all(hosts):
    hosts.start(0, 1)
    hosts.wait_for_attempt(4)
    hosts.processes[1].send_signal(signal.SIGUSR1)
    assert hosts.codes() == [75, 75]
    assert hosts.events("incident") == []


@PATIENT
def test_ranks_of_all_hosts_are_one_run_and_one_that_is_killed_is_blamed_and_restarts_it_everywhere(hosts):
    hosts.start(0, 1)
    hosts.wait_for_attempt(4)
    assert sorted((each["rank"], each["world"]) for each in hosts.attempts()) == [(rank, 4) for rank in range(4)]
    assert hosts.events("hosts")[0]["world"] == 4
    rank = next(child for child in hosts.tree(1) if _rank_of(child) == "3")
    rank.kill()
    hosts.wait_for_attempt(8)
    assert hosts.finish() == [0, 0]
    [incident] = hosts.events("incident")
    assert (incident["rank"], incident["kind"], incident["cause"]) == (3, "signal", "SIGKILL")


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [{"nodes": "1:2"}], indirect=True)
def test_without_a_host_that_is_killed_the_run_goes_on_and_takes_it_back_when_it_returns(hosts):
    hosts.start(0, 1)
    hosts.wait_for_attempt(4)
    hosts.signal(1, signal.SIGKILL)
    hosts.processes[1].wait()
    wait_until(lambda: any(each["world"] == 2 for each in hosts.attempts()))
    [incident] = hosts.events("incident")
    assert incident["kind"] == "host" and incident["rank"] == 2
    assert "no sign of life" in incident["cause"]
    seconds = hosts.events("goodput")[0]["seconds"]
    assert seconds["lost"] < 10, "found before recovery.hang_seconds"
    hosts.start(1)
    hosts.wait_for_attempt(4 + 2 + 4)
    assert hosts.finish() == [0, 0]
    assert [each["world"] for each in hosts.events("hosts")] == [4, 2, 4]
    first = {each["world"]: each["step"] for each in hosts.attempts()}
    assert first[4] > first[2] > 0, "each attempt goes on from what the last one has saved"
    assert len(hosts.events("incident")) == 1, "to take a host back is no failure"


@pytest.mark.parametrize(
    "how",
    [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)],
    ids=["killed", "stopped"],
)
def test_if_the_leader_is_lost_another_host_leads_and_a_stopped_one_follows_when_it_goes_on(hosts, how):
    hosts.start(0, 1)
    hosts.wait_for_attempt(4)
    hosts.signal(0, how)
    wait_until(lambda: hosts.events("incident") != [])
    [incident] = hosts.events("incident")
    assert incident["kind"] in ("host", "hang") and incident["rank"] == 0
    assert "no sign of life" in incident["cause"]
    if how == signal.SIGKILL:
        hosts.processes[0].wait()
        hosts.start(0)
    else:
        hosts.signal(0, signal.SIGCONT)
    hosts.wait_for_attempt(8)
    assert hosts.finish() == [0, 0]
    assert [each["world"] for each in hosts.attempts()[4:]] == [4] * 4
    assert "leads now" in hosts.log(1)
    assert len(hosts.events("incident")) == 1


@pytest.mark.parametrize("hosts", [{"nodes": "2", "hang_seconds": 5.0}], indirect=True)
def test_a_rank_that_is_stopped_on_another_host_is_found_and_its_stacks_are_there(hosts):
    hosts.start(0, 1)
    hosts.wait_for_attempt(4)
    rank = next(child for child in hosts.tree(1) if _rank_of(child) == "3")
    rank.suspend()
    hosts.wait_for_attempt(8)
    assert hosts.finish() == [0, 0]
    [hang] = hosts.events("hang")
    assert hang["ranks"] == [3]
    assert hang["why"].startswith("stopped by a signal (on ")
    assert "run_rank" in hang["stack"]
    assert all(f"==== rank {rank}," in Path(hang["stacks"]).read_text() for rank in range(4))


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [{"nodes": "1:2"}], indirect=True)
def test_a_host_that_was_to_blame_examines_itself_and_takes_no_part_while_it_is_bad(hosts):
    hosts.start(0, 1)
    hosts.wait_for_attempt(4)
    (hosts.folder / "bad-1").touch()
    next(child for child in hosts.tree(1) if _rank_of(child) == "3").kill()
    wait_until(lambda: any(each["world"] == 2 for each in hosts.attempts()))
    assert not (hosts.folder / "examined-0").exists(), "only the host that was to blame"
    (hosts.folder / "bad-1").unlink()
    hosts.wait_for_attempt(4 + 2 + 4)
    assert hosts.finish() == [0, 0]
    assert [each["world"] for each in hosts.events("hosts")] == [4, 2, 4]


@pytest.mark.slow
def test_two_supervisors_with_one_number_are_refused(hosts):
    hosts.start(0, 1)
    hosts.wait_for_attempt(4)
    first = hosts.processes[1]
    hosts.start(1)
    assert hosts.processes[1].wait(30) != 0
    assert "Give each host a number of its own" in hosts.log(1)
    hosts.processes[1] = first
    assert hosts.finish() == [0, 0]


def _rank_of(process: psutil.Process) -> str | None:
    return process.environ().get("RANK") if "rank" in process.cmdline() else None


@pytest.mark.slow
def test_files_of_an_earlier_launch_that_was_killed_are_no_leader(hosts):
    hosts.start(0, 1)
    hosts.wait_for_attempt(4)
    for node in (0, 1):
        hosts.signal(node, signal.SIGKILL)
    for process in hosts.processes.values():
        process.wait()
    assert (hosts.folder / "run" / ".hosts" / "orders.json").exists()
    hosts.start(0, 1)
    hosts.wait_for_attempt(8)
    assert hosts.finish() == [0, 0]
    assert hosts.events("incident") == []
    assert (hosts.folder / "run" / ".hosts" / "orders.json").stat().st_mode & 0o077 == 0
