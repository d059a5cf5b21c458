"""``hlat train --nproc N``: launch N processes of one command on this machine.

    command, N --> a store on loopback --> torch elastic starts N processes, each in its own session

This process serves the store, on a free port that stays bound from the start: the store outlives the processes, and two
launches cannot get the same port. Everything uses loopback: nothing listens on the network, and no host name is
resolved.
"""

import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, SubprocessContext, start_processes

from hlat.launch.output import follow_output
from hlat.runtime.backend import interface_variables
from hlat.runtime.distributed import RUN_SECRET_ENV
from hlat.runtime.process import LAUNCHER_ENV

_LOOPBACK = "127.0.0.1"
_LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
_ELASTIC_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"


class ElasticWorkers:
    """Processes of one command, started by torch elastic.

    Args:
        context: torch elastic's handle of the processes.
    """

    def __init__(self, context: SubprocessContext) -> None:
        self._context = context
        self._handlers = context.subprocess_handlers

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: handler.proc.pid for rank, handler in self._handlers.items()}

    def poll(self, rank: int) -> int | None:
        """Exit code of a rank; None while it runs."""
        code = self._handlers[rank].proc.poll()
        return None if code is None else int(code)

    def error_file(self, rank: int) -> Path:
        """Path of a rank's error report."""
        return Path(self._context.error_files[rank])


@contextmanager
def launch_multiprocess(
    command: Sequence[str],
    nproc: int,
    environment: Mapping[str, str],
    folder: Path,
    show: Callable[[str], None] | None = None,
) -> Iterator[ElasticWorkers]:
    """Launch several processes of a command as one run; kill those still running at the end of the block.

    Args:
        command: words of the command.
        nproc: number of processes.
        environment: variables to set in each process.
        folder: folder of their error reports.
        show: receives the lines that they print; None prints them on the streams of this process.

    Yields:
        The processes.
    """
    _quieten_elastic()
    with open_store() as port:
        shared = {RUN_SECRET_ENV: secrets.token_hex(32), **environment}
        envs = {rank: {**_environment(rank, nproc, port), **shared} for rank in range(nproc)}
        context = _start(command, envs, DefaultLogsSpecs(str(folder), Std.NONE if show is None else Std.ALL))
        try:
            with follow_output(_output_files(context), show):
                yield ElasticWorkers(context)
        finally:
            context.close()  # kills processes left by a bug in hlat


def hlat_command(arguments: Sequence[str]) -> list[str]:
    """Command line of ``hlat`` with these arguments."""
    # -P: the current folder must not hide installed packages, as it does not with a single process.
    return [sys.executable, "-P", "-m", "hlat", *arguments]


def _start(command: Sequence[str], envs: dict[int, dict[str, str]], logs: DefaultLogsSpecs) -> SubprocessContext:
    """Start the processes, each in its own session.

    A terminal's Ctrl-C then reaches this process only, which forwards it once.
    """
    before = os.environ.get(_ELASTIC_SIGNALS)
    os.environ[_ELASTIC_SIGNALS] = ""  # its handlers would raise in the midst of starting; ``Stops`` has ours
    try:
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
    """Files with the output of the processes, if it is redirected."""
    return [Path(name) for names in (context.stdouts, context.stderrs) for name in names.values() if name]


@contextmanager
def open_store() -> Iterator[int]:
    """Serve the store of the rendezvous within the block; yield its port."""
    listener = socket.create_server((_LOOPBACK, 0))
    port = int(listener.getsockname()[1])
    store = dist.TCPStore(  # type: ignore[attr-defined]
        _LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
        master_listen_fd=listener.detach(),  # the default listens on every interface
    )
    yield port
    del store


def _environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    """Environment variables as torchrun sets them, and settings for several processes on one machine."""
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
        LAUNCHER_ENV: os.getpid(),
    }
    defaults = {
        "OMP_NUM_THREADS": max(1, _cores() // nproc),
        # By default gloo resolves this machine's name.
        **dict.fromkeys(interface_variables(), _LOOPBACK_INTERFACE),
    }
    unset = {name: value for name, value in defaults.items() if name not in os.environ}
    return {name: str(value) for name, value in {**unset, **own}.items()}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _quieten_elastic() -> None:
    """Hide the warnings that elastic logs for each process that it ends; hlat reports the failure once itself."""
    logger = logging.getLogger("torch.distributed.elastic")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
    logger.propagate = False
