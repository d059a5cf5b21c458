"""Pods in practice: containers of this machine, each with a network, a host name and process ids of its own."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.launch import net_hosts as simulated
from tests.support.launch.launching import wait_until
from tests.support.launch.net_hosts import net_hosts
from tests.support.launch.pods import start_pod, write
from tests.support.same_runs import assert_same_run, events_of, metrics_of

pytestmark = pytest.mark.slow
PROGRAM = [sys.executable, "-m", "hlat"]
CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
PORT = 9464
ASK = f"""
import sys, urllib.error, urllib.request
try:
    print(urllib.request.urlopen("http://127.0.0.1:{PORT}" + sys.argv[1], timeout=600).status)
except urllib.error.HTTPError as error:
    print(error.code)
except OSError:
    print(None)
"""


class Pods:
    """Pods of a run. `hlat` is process 1 of each, as in a container; when it ends, everything in the container ends."""

    def __init__(self, hosts, folder, recipe_file, corpus, *overrides):
        self.hosts, self.run, self._folder = hosts, folder / "run", folder
        own = (f"data.path={corpus}", f"run.dir={self.run}", "tracking.console=plain", "recovery.hang_seconds=20")
        more = ("recovery.backoff_seconds=0.1", "checkpoint.every_steps=5", *overrides)
        size = {"nproc": 1, "nodes": len(hosts.names)}
        self._found = write(recipe_file, overrides=(*own, *more), volumes=(f"shared:{folder}",), **size)

    def start(self, index):
        """Start the pod with an index."""
        files = self._folder / f"pod-{index}"
        files.mkdir(exist_ok=True)
        container = [
            str(self.hosts.transport),
            f"h{index}",
            "unshare",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]
        address = self.hosts.address(index)
        return start_pod(self._found, files, index, PROGRAM, address, container, OMP_NUM_THREADS="1")

    def probe(self, index):
        """Answers of a pod to its probes: statuses of /healthz and /readyz, or None."""
        ask = [str(self.hosts.transport), f"h{index}", sys.executable, "-c", ASK]
        words = [subprocess.check_output([*ask, path], text=True).strip() for path in ("/healthz", "/readyz")]
        return tuple(None if word == "None" else int(word) for word in words)

    def first_process(self, index):
        """Process 1 of a pod, by its id outside."""
        return next(pid for pid in self.hosts.pids(f"h{index}") if _own_id(pid) == 1)

    def step(self):
        """Last logged step."""
        lines = metrics_of(self.run) if (self.run / "metrics.jsonl").exists() else []
        return lines[-1]["step"] if lines else 0


def _own_id(pid):
    """Id that a process has in its own container."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])
    return None


@pytest.fixture
def pods(tmp_path, recipe_file, corpus):
    """A function that returns so many pods of a run."""
    if reason := simulated.missing():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:

        def make(count, *overrides):
            hosts = stack.enter_context(net_hosts(tmp_path / "net", count))
            return Pods(hosts, tmp_path, recipe_file, corpus, *overrides)

        yield make


def ended(*processes):
    """Exit codes of pods, and what they printed."""
    printed = [process.communicate(timeout=300)[0] for process in processes]
    return [process.returncode for process in processes], printed


def test_a_pod_answers_its_probes_while_it_runs(pods):
    alone = pods(1, "training.steps=100")
    process, seen = alone.start(0), set()
    while process.poll() is None:
        seen.add(alone.probe(0))
    assert process.returncode == 0, process.communicate()[0]
    assert (200, 200) in seen, "it trains"
    assert {health for health, _ in seen} <= {None, 200}, "never unhealthy, from the first answer to the last"
    assert {ready for _, ready in seen} >= {200, 503}, "not ready before it trains"


def test_a_pod_that_is_lost_is_replaced_while_the_other_stays_healthy(pods, recipe_file, tmp_path):
    """Same bits as two processes of one machine; the pod that is left answers its probes while it waits."""
    two = pods(2, "training.steps=200")
    first, other = two.start(0), two.start(1)
    wait_until(lambda: two.step() >= 20)
    os.kill(two.first_process(1), signal.SIGKILL)  # with it everything in the container
    other.communicate()
    wait_until(lambda: events_of(two.run, "incident") != [])
    time.sleep(25)  # longer than hang_seconds: processes that have ended are no hang
    assert two.probe(0) == (200, 503)
    codes, printed = ended(first, two.start(1))
    assert codes == [0, 0], printed
    [incident] = events_of(two.run, "incident")
    assert incident["host"] == "h1"
    one = tmp_path / "one"
    words = [str(tmp_path / "pod-1/recipe.yaml"), f"run.dir={one}", "tracking.prometheus=null", "--nproc", "2"]
    subprocess.run([*PROGRAM, "train", *words], check=True, stdout=subprocess.DEVNULL)
    assert_same_run(one, two.run)


def test_a_pod_that_is_drained_lets_the_run_save(pods):
    """Every pod ends with 75, which counts as no failure."""
    two = pods(2, "training.steps=100000")
    processes = [two.start(0), two.start(1)]
    wait_until(lambda: two.step() >= 20)
    os.kill(two.first_process(1), signal.SIGTERM)  # as the kubelet does
    codes, printed = ended(*processes)
    assert codes == [75, 75], printed
    assert events_of(two.run, "checkpoint")[-1]["step"] >= two.step()
