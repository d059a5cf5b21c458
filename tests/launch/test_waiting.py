"""Processes of a run that wait for each other: they handle signals, and listen on loopback only.

Each is the command ``hlat train`` in a process of its own.
"""

import ipaddress
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hlat.runtime.distributed import rendezvous
from hlat.runtime.distributed.network import Signer
from hlat.runtime.distributed.rendezvous import Rendezvous
from hlat.runtime.process import RankInfo
from tests.support.commands import StartedCommand
from tests.support.launch.launching import wait_until
from tests.support.launch.ports import free_port

LISTENS = "0A"  # TCP_LISTEN in /proc/net/tcp
BOUND = 1200.0  # seconds until a wait fails


def _stay_silent() -> None:
    rendezvous._SILENCE = 1e6  # on a busy machine, one that waits would say so after a while


@pytest.fixture
def begin(recipe_file, tiny, tmp_path):
    """Start the command with these environment variables; kill it after the test."""
    started = []

    def start(*words: str, **variables: object) -> StartedCommand:
        environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
        environment |= {name: str(value) for name, value in variables.items()}
        with (tmp_path / f"errors-{len(started)}").open("w") as errors:
            streams = {"errors": errors, "env": environment}
            started.append(StartedCommand("train", recipe_file, *tiny, *words, **streams, prepare=_stay_silent))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def rank_variables(rank: int, port: int) -> dict[str, object]:
    return {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def is_waiting(tmp_path: Path, rank: int, pid: int) -> bool:
    """Return True if a process waits for the others: its log is open, and its saver has been started."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return (tmp_path / f"run/logs/rank-0000{rank}.log").exists() and bool(children.read_text().split())


EXIT_CODES = {signal.SIGTERM: 75, signal.SIGINT: 130}


@pytest.mark.parametrize(
    ("rank", "number"),
    [(0, signal.SIGINT), (1, signal.SIGTERM), pytest.param(0, signal.SIGTERM, marks=pytest.mark.slow)],
)
def test_a_signal_ends_a_process_that_waits_for_its_peers(begin, tmp_path, rank, number):
    """Rank 0 waits in its own store, rank 1 for a listener; both would wait for ten minutes."""
    process = begin(**rank_variables(rank, free_port()))
    wait_until(lambda: is_waiting(tmp_path, rank, process.pid))
    time.sleep(1.0)  # a few instructions remain until it waits
    process.send_signal(number)
    out, _ = process.communicate(timeout=BOUND)
    assert process.returncode == EXIT_CODES[number]
    stages = re.compile(r".+ \.\.\.|.+: \d+ s")  # the second at the end of one that took over 2 s, on a busy machine
    assert all(stages.fullmatch(line) for line in out.splitlines()), f"not only the stages of the start: {out}"
    printed = (tmp_path / "errors-0").read_text().splitlines()
    if rank == 0:
        assert (
            len(printed) == 1 and ("SIGTERM: ended before" if number == signal.SIGTERM else "interrupted") in printed[0]
        )
    else:
        assert printed == [], "other ranks print to their logs only"


def test_a_signal_ends_a_process_whose_peer_does_not_connect(begin, tmp_path):
    """The peer completes the rendezvous and then connects to no rank: rank 0 waits inside gloo."""
    port, key = free_port(), "of this run"
    process = begin(**rank_variables(0, port), HLAT_RUN_SECRET=key)
    store = rendezvous._client("127.0.0.1", port, 1)
    rendezvous._arrive(store, Rendezvous("hlat/0/1", Signer(key.encode())), RankInfo(1, 2))
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=BOUND)
    err = (tmp_path / "errors-0").read_text()
    assert process.returncode == 130 and len(err.splitlines()) == 1, err


def test_a_late_peer_is_found(begin, tmp_path):
    """Rank 1 waits for a listener, rank 0 starts later, and both train."""
    port, saving = free_port(), ("training.steps=8", "checkpoint.every_steps=4")  # by a saver
    last = begin(*saving, **rank_variables(1, port))
    wait_until(lambda: is_waiting(tmp_path, 1, last.pid))
    time.sleep(2.5)  # more than two polls
    first = begin(*saving, **rank_variables(0, port))
    out, _ = first.communicate(timeout=BOUND)
    assert (first.returncode, last.wait(timeout=BOUND)) == (0, 0), (tmp_path / "errors-1").read_text()
    assert "finished at step 8" in out
    assert not list((tmp_path / "run").glob(".secret*")), "the secret is removed after the rendezvous"


# --- listening sockets ------------------------------------------------------------------------------------------------


def process_tree(pid: int) -> Iterator[int]:
    """Process ids of a process and all of its descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from process_tree(int(child))


def sockets_of(pid: int) -> set[str]:
    """Inode numbers of a process's sockets."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:  # closed in the meantime
            continue
        if target.startswith("socket:["):
            found.add(target[len("socket:[") : -1])
    return found


def listeners(pids: list[int]) -> list[str]:
    """Addresses on which processes listen."""
    numbers = {number for pid in pids for number in sockets_of(pid)}
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        lines = Path(table).read_text().splitlines()[1:] if Path(table).exists() else []
        for fields in (line.split() for line in lines):
            if fields[3] == LISTENS and fields[9] in numbers:
                digits = bytes.fromhex(fields[1].partition(":")[0])
                words = [
                    digits[start : start + 4][::-1] for start in range(0, len(digits), 4)
                ]  # in the byte order of the machine
                found.append(str(ipaddress.ip_address(b"".join(words))))
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="this system has no /proc/net/tcp")
@pytest.mark.parametrize("how", ["--nproc 2", "two processes"])
def test_a_run_on_one_machine_listens_on_loopback_only(begin, tmp_path, how):
    # Quiet: nothing reads the pipes, and a run that prints into a full one waits.
    words = ("training.steps=1000000", "checkpoint.every_steps=5", "--quiet")
    if how == "--nproc 2":
        processes = [begin("--nproc", "2", *words)]
    else:
        port = free_port()
        processes = [begin(*words, **rank_variables(rank, port)) for rank in range(2)]
    # So the savers have joined, too. Any checkpoint: a fast run removes the first ones between two looks.
    saved = tmp_path / "run/checkpoints"
    wait_until(lambda: any(saved.glob("step-*")) or any(process.poll() is not None for process in processes))
    assert all(process.poll() is None for process in processes), [each.communicate()[0] for each in processes]
    found = listeners([pid for process in processes for pid in process_tree(process.pid)])
    for process in processes:
        process.send_signal(signal.SIGTERM)
    assert [process.wait(timeout=BOUND) for process in processes] == [75] * len(processes)
    assert len(found) >= 5, "the store, and gloo of two ranks and of their savers"
    assert all(ipaddress.ip_address(address).is_loopback for address in found), found
