"""``hlat train --nproc N``: launch N processes of one command on this machine.

    command, N --> a store on loopback --> torch elastic starts N processes, each in its own session

This process serves the store, on a free port that stays bound from the start: the store outlives the processes, and two
launches cannot get the same port. On one machine everything uses loopback: nothing listens on the network, and no host
name is resolved.
"""

import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, SubprocessContext, start_processes

from hlat.launch.local_processes import RankPlaces, follow_output
from hlat.runtime.backend.table import interface_variables
from hlat.runtime.distributed.network import RUN_SECRET_ENV, is_loopback, listen
from hlat.runtime.process import LAUNCHER_ENV

_LOOPBACK = "127.0.0.1"
_LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
_ELASTIC_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"


class ElasticWorkers:
    """Processes of one command, started by torch elastic; ``first`` is the rank of the first one."""

    def __init__(self, context: SubprocessContext, first: int = 0) -> None:
        self._context, self._first = context, first
        self._handlers = {first + number: handler for number, handler in context.subprocess_handlers.items()}

    @property
    def pids(self) -> dict[int, int]:
        return {rank: handler.proc.pid for rank, handler in self._handlers.items()}

    def poll(self, rank: int) -> int | None:
        code = self._handlers[rank].proc.poll()
        return None if code is None else int(code)

    def error_file(self, rank: int) -> Path:
        return Path(self._context.error_files[rank - self._first])


@contextmanager
def launch_multiprocess(
    command: Sequence[str],
    nproc: int,
    environment: Mapping[str, str],
    folder: Path,
    show: Callable[[str], None] | None = None,
) -> Iterator[ElasticWorkers]:
    """Launch ``nproc`` processes of a command as one run; kill those still running at the end of the block.

    Error reports go into ``folder``; ``show`` receives what they print, None leaves it on the streams of this process.
    """
    with open_store() as port:
        shared = {RUN_SECRET_ENV: secrets.token_hex(32), **environment}
        places = RankPlaces(0, nproc, nproc, 0, _LOOPBACK, port)
        with launch_ranks(command, places, shared, folder, show) as workers:
            yield workers


@contextmanager
def launch_ranks(
    command: Sequence[str],
    places: RankPlaces,
    environment: Mapping[str, str],
    folder: Path,
    show: Callable[[str], None] | None = None,
) -> Iterator[ElasticWorkers]:
    """Launch this machine's ranks of a run whose store another process serves; ``environment`` has the secret."""
    _quieten_elastic()
    envs = {local: {**_environment(local, places), **environment} for local in range(places.nproc)}
    context = _start(command, envs, DefaultLogsSpecs(str(folder), Std.NONE if show is None else Std.ALL))
    try:
        with follow_output(_output_files(context), show):
            yield ElasticWorkers(context, places.first)
    finally:
        context.close()  # kills processes left by a bug in hlat


def hlat_command(arguments: Sequence[str]) -> list[str]:
    """Command line of ``hlat`` with these arguments."""
    # -P: the current folder must not hide installed packages, as it does not with a single process.
    return [sys.executable, "-P", "-m", "hlat", *arguments]


def _start(command: Sequence[str], envs: dict[int, dict[str, str]], logs: DefaultLogsSpecs) -> SubprocessContext:
    before = os.environ.get(_ELASTIC_SIGNALS)
    os.environ[_ELASTIC_SIGNALS] = ""  # its handlers would raise in the midst of starting; ``Stops`` has ours
    try:
        # Each process leads its own session: a terminal's Ctrl-C reaches only this one, which forwards it once.
        context = start_processes(
            name="hlat",
            entrypoint=command[0],
            args={rank: tuple(command[1:]) for rank in envs},
            envs=envs,
            logs_specs=logs,
        )
    finally:
        if before is None:
            del os.environ[_ELASTIC_SIGNALS]
        else:
            os.environ[_ELASTIC_SIGNALS] = before
    assert isinstance(context, SubprocessContext), "elastic's type for commands"
    return context


def _output_files(context: SubprocessContext) -> list[Path]:
    return [Path(name) for names in (context.stdouts, context.stderrs) for name in names.values() if name]


@contextmanager
def open_store(address: str = _LOOPBACK) -> Iterator[int]:
    """Serve the rendezvous store on this address only, and yield its port; OSError if it is not this machine's."""
    listener = listen(address, 0)
    port = int(listener.getsockname()[1])
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        is_master=True,
        wait_for_workers=False,  # they are started afterwards
        timeout=timedelta(seconds=30),
        master_listen_fd=listener.detach(),  # the default listens on every interface
    )
    yield port
    del store


def _environment(local: int, places: RankPlaces) -> dict[str, str]:
    """Environment variables as torchrun sets them, and settings for several processes on one machine."""
    own = {
        "RANK": places.first + local,
        "LOCAL_RANK": local,
        "WORLD_SIZE": places.world,
        "LOCAL_WORLD_SIZE": places.nproc,
        "GROUP_RANK": places.node,
        "MASTER_ADDR": places.address,
        "MASTER_PORT": places.port,
        "TORCHELASTIC_RUN_ID": f"hlat-{os.getpid()}",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,  # hlat's supervisor restarts
        "TORCHELASTIC_USE_AGENT_STORE": True,  # rank 0 connects to our store instead of serving one
        LAUNCHER_ENV: os.getpid(),
    }
    defaults = {
        "OMP_NUM_THREADS": max(1, _cores() // places.nproc),  # by default each process takes all cores
        # By default gloo resolves this machine's name. On a network, a rank takes the interface that reaches the store.
        **(dict.fromkeys(interface_variables(), _LOOPBACK_INTERFACE) if is_loopback(places.address) else {}),
    }
    unset = {name: value for name, value in defaults.items() if name not in os.environ}
    return {name: str(value) for name, value in {**unset, **own}.items()}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _quieten_elastic() -> None:
    """Hide the warnings that elastic logs for each process that it ends; hlat reports the failure once itself."""
    logger = logging.getLogger("torch.distributed.elastic")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())  # or logging's handler of last resort prints them
    logger.propagate = False
