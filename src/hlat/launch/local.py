"""``hlat train --nproc N``: N processes of one command on this machine.

    command, N --> a store on loopback --> torch elastic starts N processes
        --watch--> how each ended --judge--> exit code

The store lives here, on a port that was free when it was bound and is never given back in between: it outlives any of
the processes, and two launches cannot take each other's. Everything is on loopback: nothing listens on the network, and
no host name is looked up.
"""

import logging
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SubprocessContext, start_processes

from hlat.launch.follow import LAUNCHER
from hlat.launch.verdict import judge
from hlat.launch.watch import Stops, watch

_LOOPBACK = "127.0.0.1"
_LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
_ELASTIC_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"


def launch_local(arguments: Sequence[str], nproc: int, run_dir: Path, complain: Callable[[str], None]) -> int:
    """Run ``hlat`` with these arguments in several processes that together are one run.

    SIGINT, SIGTERM and SIGHUP are passed on, so that the run saves and stops; it is waited for until it has. A second
    one is passed on too and ends it at once.

    Args:
        arguments: of the command, such as ``["train", "recipe.yaml"]``.
        nproc: how many processes, 2 or more.
        run_dir: where their logs lie.
        complain: shows the user why the run failed.

    Returns:
        The exit code: that of the same command in one process.
    """
    # -P: the folder in which the user stands must not hide installed packages, as in one process it does not.
    return run_workers([sys.executable, "-P", "-m", "hlat", *arguments], nproc, run_dir, complain)


def run_workers(command: Sequence[str], nproc: int, run_dir: Path, complain: Callable[[str], None]) -> int:
    """``launch_local`` for any command whose processes call ``runtime.start`` and report as ``reported`` does."""
    _quieten_elastic()
    with tempfile.TemporaryDirectory(prefix="hlat-launch-") as folder, open_store() as port, Stops() as stops:
        envs = {rank: _environment(rank, nproc, port) for rank in range(nproc)}
        context = _start(command, envs, folder)
        try:
            ends = watch(context, stops)
        finally:
            context.close()  # ends what still runs after a bug of ours
    verdict = judge(ends, stops.received, run_dir)
    if verdict.message:
        complain(verdict.message)
    return verdict.exit_code


def _start(command: Sequence[str], envs: dict[int, dict[str, str]], folder: str) -> SubprocessContext:
    """Start the processes, each in a session of its own: a terminal's Ctrl-C reaches this process only, which passes
    it on once."""
    before = os.environ.get(_ELASTIC_SIGNALS)
    os.environ[_ELASTIC_SIGNALS] = ""  # its handlers would raise in the midst of starting; ``Stops`` has ours
    try:
        context = start_processes(
            name="hlat",
            entrypoint=command[0],
            args={rank: tuple(command[1:]) for rank in envs},
            envs=envs,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
    finally:
        if before is None:
            del os.environ[_ELASTIC_SIGNALS]
        else:
            os.environ[_ELASTIC_SIGNALS] = before
    assert isinstance(context, SubprocessContext), "what a command, rather than a function, is started as"
    return context


@contextmanager
def open_store() -> Iterator[int]:
    """Serve the store through which the processes find each other; yields its port."""
    listener = socket.create_server((_LOOPBACK, 0))
    port = int(listener.getsockname()[1])
    store = dist.TCPStore(  # type: ignore[attr-defined]
        _LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
        master_listen_fd=listener.detach(),  # left to itself it would listen on every interface
    )
    yield port
    del store


def _environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    """What torchrun would set, and what keeps several processes on one machine out of each other's way."""
    own = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": nproc,
        "LOCAL_WORLD_SIZE": nproc,
        "GROUP_RANK": 0,
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": f"hlat-{os.getpid()}",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        LAUNCHER: os.getpid(),
    }
    defaults = {
        "OMP_NUM_THREADS": max(1, _cores() // nproc),
        "GLOO_SOCKET_IFNAME": _LOOPBACK_INTERFACE,  # gloo would look up this machine's name
        "NCCL_SOCKET_IFNAME": _LOOPBACK_INTERFACE,
    }
    unset = {name: value for name, value in defaults.items() if name not in os.environ}
    return {name: str(value) for name, value in {**unset, **own}.items()}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _quieten_elastic() -> None:
    """Elastic logs warnings of each process that it ends. What is worth saying is said once, by the verdict."""
    logger = logging.getLogger("torch.distributed.elastic")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
    logger.propagate = False
