"""``hlat doctor`` on two simulated hosts with one injected fault each: it names that fault, on that host, and no other.

Hosts are network namespaces with mounts of their own; faults are those of real machines wherever the system can make
them: a full disk is a full file system, a slow link is a shaped one, a firewall drops packets.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import hlat
from tests.support.launch.net_hosts import NetHosts, missing, net_hosts

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "hosts can be simulated")]

ROOT = Path(hlat.__file__).parents[1]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[NetHosts]:
    """Two hosts."""
    with net_hosts(tmp_path / "hosts", 2) as found:
        yield found


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Run folder, which all hosts share."""
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def doctor(hosts: NetHosts, *words: str | Path, wait: float = 40, ok: bool = False) -> dict:
    """Examine all hosts; return the report."""
    command = [sys.executable, "-P", "-m", "hlat", "doctor", *map(str, words), "--hosts", ",".join(hosts.names)]
    command += ["--ssh", str(hosts.transport), "--wait", str(wait), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == (0 if ok else 1), done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def found(report: dict) -> list[tuple[str, str]]:
    """(Host, name of the check) of everything that was found, warnings included."""
    return [(host["host"], check["name"]) for host in report["hosts"] for check in host["checks"] if check["message"]]


def test_healthy_hosts_have_no_finding_and_nothing_is_left(hosts: NetHosts, tiny: list[str], recipe_file: Path):
    folder = Path(next(word for word in tiny if word.startswith("run.dir=")).partition("=")[2])
    began = time.monotonic()
    report = doctor(
        hosts, recipe_file, *tiny, "batch.micro_batch=1", "parallel.tensor=2", "--nproc", "2", wait=120, ok=True
    )
    print(f"healthy: {time.monotonic() - began:.1f} s", report["measured"])
    assert found(report) == [] and report["ok"] and report["bad_hosts"] == []
    assert [host["host"] for host in report["hosts"]] == ["h0", "h1"] and report["ranks"] == 4
    assert report["skipped"] == []
    assert any("over tp" in text and "over dp" in text for text in report["measured"])
    assert not folder.exists()


@contextmanager
def other_code(hosts: NetHosts, tmp_path: Path, run_dir: Path) -> Iterator[None]:
    """A copy of hlat with one changed file on h1."""
    shutil.copytree(ROOT / "hlat", tmp_path / "code/hlat", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "code/hlat/data/input_check.py").open("a") as file:
        file.write("# changed\n")
    hosts.setup("h1", f"export PYTHONPATH={tmp_path / 'code'}")
    yield


@contextmanager
def other_torch(hosts: NetHosts, tmp_path: Path, run_dir: Path) -> Iterator[None]:
    """Another version of torch on h1, as far as torch says."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(
        "import importlib.machinery, sys, importlib.util\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name != 'torch.version': return None\n"
        "        spec = importlib.machinery.PathFinder.find_spec(name, path)\n"
        "        run = spec.loader.exec_module\n"
        "        def exec_module(module):\n"
        "            run(module); module.__version__ = '2.12.1+other'\n"
        "        spec.loader.exec_module = exec_module\n"
        "        return spec\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    hosts.setup("h1", f"export PYTHONPATH={tmp_path / 'site'}:{ROOT}")
    yield


@contextmanager
def read_only(hosts: NetHosts, tmp_path: Path, run_dir: Path) -> Iterator[None]:
    hosts.setup("h1", f"mount --bind {run_dir} {run_dir}", f"mount -o remount,ro,bind {run_dir}")
    yield


@contextmanager
def not_shared(hosts: NetHosts, tmp_path: Path, run_dir: Path) -> Iterator[None]:
    hosts.setup("h1", f"mount -t tmpfs tmpfs {run_dir}")
    yield


@contextmanager
def few_files(hosts: NetHosts, tmp_path: Path, run_dir: Path) -> Iterator[None]:
    hosts.setup("h1", "ulimit -n 200")
    yield


@contextmanager
def wrong_name(hosts: NetHosts, tmp_path: Path, run_dir: Path) -> Iterator[None]:
    hosts.name_addresses("h1", {"h0": "10.77.0.99", "h1": hosts.address(1)})
    yield


@contextmanager
def firewall(hosts: NetHosts, tmp_path: Path, run_dir: Path) -> Iterator[None]:
    """Packets to new connections on h1 are dropped."""
    if shutil.which("iptables") is None:
        pytest.skip("iptables is not installed")
    hosts.on("h1", "iptables", "-A", "INPUT", "-p", "tcp", "--syn", "-i", "eth0", "-j", "DROP")
    yield


@contextmanager
def slow_link(hosts: NetHosts, tmp_path: Path, run_dir: Path) -> Iterator[None]:
    """Everything from the switch to h1 at 100 Mbit/s."""
    shape = ("root", "tbf", "rate", "100mbit", "burst", "64kbit", "latency", "50ms")
    hosts.on_switch("tc", "qdisc", "replace", "dev", "p1", *shape)
    yield


@contextmanager
def cut_link(hosts: NetHosts, tmp_path: Path, run_dir: Path) -> Iterator[None]:
    hosts.switch("link", "set", "p1", "down")
    yield


@contextmanager
def little_memory(hosts: NetHosts, tmp_path: Path, run_dir: Path) -> Iterator[None]:
    """A limit of address space that torch does not fit into."""
    hosts.setup("h1", "ulimit -v 400000")
    yield


@contextmanager
def leftover(hosts: NetHosts, tmp_path: Path, run_dir: Path) -> Iterator[None]:
    """A process of an earlier run on h1 that has the lock file open."""
    (run_dir / ".lock").touch()
    process = hosts.start("h1", "bash", "-c", f"exec 9<{run_dir}/.lock; echo ready; exec sleep 300")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield
    process.kill()
    process.wait()


@contextmanager
def held_lock(hosts: NetHosts, tmp_path: Path, run_dir: Path) -> Iterator[None]:
    """A lock that a process outside of both hosts holds, which says that it is on h1."""
    (run_dir / ".lock").write_text("pid 4711 on h1, launcher none")
    process = subprocess.Popen(
        ["flock", run_dir / ".lock", "bash", "-c", "echo ready; exec sleep 300"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield
    process.kill()
    process.wait()


@contextmanager
def no_command(hosts: NetHosts, tmp_path: Path, run_dir: Path) -> Iterator[None]:
    """Nothing can be started on h1."""
    hosts.setup("h1", "echo 'h1: no route to host' >&2; exit 255")
    yield


@contextmanager
def taken_address(hosts: NetHosts, tmp_path: Path, run_dir: Path) -> Iterator[None]:
    """GLOO_SOCKET_IFNAME names an interface that h1 does not have."""
    hosts.setup("h1", "export GLOO_SOCKET_IFNAME=ib0")
    yield


FAULTS: list[tuple[Callable, str]] = [
    (other_code, "code-equal"),
    (other_torch, "software-equal"),
    (read_only, "run-folder-writable"),
    (not_shared, "run-folder-shared"),
    (few_files, "open-files"),
    (wrong_name, "host-names"),
    (firewall, "connections"),
    (slow_link, "link-rate"),
    (cut_link, "connections"),
    (little_memory, "host-memory"),
    (leftover, "leftover-processes"),
    (held_lock, "run-lock"),
    (no_command, "sign-of-life"),
    (taken_address, "listen"),
]


@pytest.mark.parametrize(("fault", "name"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_fault_is_named_and_nothing_else(fault: Callable, name: str, hosts: NetHosts, tmp_path: Path, run_dir: Path):
    wait = 12 if name in ("run-folder-writable", "run-folder-shared", "sign-of-life") else 40
    with fault(hosts, tmp_path, run_dir):
        began = time.monotonic()
        report = doctor(hosts, "--run-dir", run_dir, wait=wait)
        print(f"{fault.__name__}: {time.monotonic() - began:.1f} s", found(report))
        for host in report["hosts"]:
            print([check["message"] for check in host["checks"] if check["message"]])
    assert found(report) == [("h1", name)]
    assert report["bad_hosts"] == ["h1"]


def start_both(hosts: NetHosts, run_dir: Path, *words: str | Path) -> list["subprocess.Popen[str]"]:
    """Start the command on both hosts, as srun does."""
    command = [sys.executable, "-P", "-m", "hlat", "doctor", "--run-dir", str(run_dir), "--nodes", "2", "--json"]
    return [hosts.start(name, *command, *map(str, words), "--node", str(node)) for node, name in enumerate(hosts.names)]


def test_a_launch_can_go_on_without_the_bad_host(hosts: NetHosts, tmp_path: Path, run_dir: Path):
    hosts.setup("h1", "ulimit -n 200")
    processes = start_both(hosts, run_dir, "--exclude-bad", tmp_path / "bad")
    outputs = [process.communicate(timeout=250)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert found(json.loads(outputs[0])) == [("h1", "open-files")] and outputs[1] == ""
    assert (tmp_path / "bad").read_text() == "h1\n"


def test_a_host_that_freezes_is_named_in_bounded_time(hosts: NetHosts, run_dir: Path):
    processes = start_both(hosts, run_dir, "--wait", "60")
    while len(list(run_dir.glob("doctor/**/*-host.json"))) < 2:
        assert processes[0].poll() is None
        time.sleep(0.02)
    for pid in hosts.pids("h1"):
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    report = json.loads(processes[0].communicate(timeout=250)[0])
    print(f"frozen host: {time.monotonic() - began:.1f} s")
    assert found(report) == [("h1", "sign-of-life")]


def test_a_full_disk_is_named(tmp_path: Path, run_dir: Path):
    """A file system of 2 MiB that is full, on one host."""
    fill = f"mount -t tmpfs -o size=2m tmpfs {run_dir} && head -c 2097152 /dev/zero > {run_dir}/full"
    command = f"{fill} && exec {sys.executable} -P -m hlat doctor --run-dir {run_dir} --json"
    done = subprocess.run(["unshare", "--mount", "bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert [name for _, name in found(json.loads(done.stdout))] == ["run-folder-space"]
