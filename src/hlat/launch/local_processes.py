"""Processes of this machine: what every launcher gives, what they print, and the launch of one or several of them.

    launcher --> ProcessSet (pids, poll, error_file)
    output of a process --copy_lines, on a thread--> show
    supervisor, about 40 MB --fork, launch_forked--> worker in its own session --work--> exit code, error report
    command, RankPlaces --launch_ranks--> so many new interpreters, with the variables of their ranks
    command, N --launch_multiprocess--> the same, and a store on loopback, which this process serves

The protocol ``ProcessSet`` is the same for every launcher. A rank leads its own session, so that processes which it
started (the saver of checkpoints, tokenizer workers) can be found and ended after the rank has exited.

The fork is made before the supervisor has imported torch: a restart costs no more than a new start, and the supervisor
uses little memory during the run. The store that several processes meet in needs torch. Its port stays bound from the
start: the store outlives the processes, and two launches cannot get the same port. On one machine everything uses
loopback: nothing listens on the network, and no host name is resolved.
"""

import multiprocessing
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import IO, Protocol

from hlat.runtime.backend.table import interface_variables
from hlat.runtime.distributed.network import RUN_SECRET_ENV, interface_of, is_loopback, listen
from hlat.runtime.process import INTERRUPTED_MESSAGE, LAUNCHER_ENV, STOP_SIGNALS, stop_exit_code
from hlat.runtime.terminal import erase_line

_POLL = 0.05  # seconds
_SAVING = 30.0  # seconds to save after an error of the supervisor


@dataclass(frozen=True)
class RankPlaces:
    """Ranks of one machine in a run, and where they meet."""

    first: int  # its first rank
    nproc: int  # number of its ranks
    world: int  # number of all ranks
    node: int  # number of the machine
    address: str  # address and port of the store
    port: int


class ProcessSet(Protocol):
    """The processes of one run, by rank."""

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""

    def poll(self, rank: int) -> int | None:
        """Exit code of a rank, or minus the signal that ended it; None while it runs."""

    def error_file(self, rank: int) -> Path:
        """Path of a rank's error report."""


def signal_group(leader: int, number: int) -> None:
    """Send a signal to the process group of a leader, if it is there."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


_CLOSING = 5.0  # seconds for the last lines of a process: one that it has left behind may hold its output open


def copy_lines(stream: IO[bytes], show: Callable[[str], None]) -> None:
    """Show each line of a process's output until it ends."""
    with stream:
        for line in stream:
            show(line.decode("utf-8", "replace").rstrip("\r\n"))


class ForkedWorker:
    """A forked worker as a set of one process; ``work`` returns its exit code."""

    def __init__(self, work: Callable[[], int], environment: Mapping[str, str], folder: Path) -> None:
        self._error_file = folder / "error-0.json"
        own = {**environment, "TORCHELASTIC_ERROR_FILE": str(self._error_file), LAUNCHER_ENV: str(os.getpid())}
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or both processes would write the buffered text
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_run_worker, args=(work, own), name="hlat")
        with _blocked(STOP_SIGNALS):  # one between the fork and the child's own handlers would be lost in the child
            self._process.start()

    @property
    def pids(self) -> dict[int, int]:
        assert self._process.pid is not None, "it was started"
        return {0: self._process.pid}

    def poll(self, rank: int) -> int | None:
        assert rank == 0
        return self._process.exitcode

    def error_file(self, rank: int) -> Path:
        assert rank == 0
        return self._error_file

    def end(self) -> None:
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()


@contextmanager
def _blocked(signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Block signals in this thread, and in the processes that it starts until they unblock them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_worker(work: Callable[[], int], environment: Mapping[str, str]) -> None:
    os.setsid()  # a terminal's Ctrl-C reaches the supervisor only, which forwards it once
    os.environ.update(environment)
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupted_early if number == signal.SIGINT else signal.SIG_DFL)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        code = work()
    except KeyboardInterrupt:
        print(INTERRUPTED_MESSAGE, file=sys.stderr, flush=True)  # noqa: T201  (output of the command)
        code = stop_exit_code(signal.SIGINT)
    sys.exit(code)


def _interrupted_early(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C during imports, before the work handles it itself."""
    erase_line()
    with suppress(OSError):
        # not print: the code that was interrupted may hold the lock of the stream
        os.write(2, f"{INTERRUPTED_MESSAGE}\n".encode())
    os._exit(stop_exit_code(number))


@contextmanager
def launch_forked(work: Callable[[], int], environment: Mapping[str, str], folder: Path) -> Iterator[ForkedWorker]:
    """Run ``work`` in a forked process, its error report in ``folder``; kill it at the end of the block."""
    process = ForkedWorker(work, environment, folder)
    try:
        yield process
    finally:
        process.end()  # needed after a bug in hlat


_LOOPBACK = "127.0.0.1"


class SpawnedRanks:
    """New processes of one command, by rank; error reports go into ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._copying: list[threading.Thread] = []

    @property
    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._processes.items()}

    def poll(self, rank: int) -> int | None:
        return self._processes[rank].poll()

    def error_file(self, rank: int) -> Path:
        return self._folder / f"error-{rank}.json"

    def start(
        self, rank: int, command: Sequence[str], environment: Mapping[str, str], show: Callable[[str], None] | None
    ) -> None:
        own = {**os.environ, **environment, "TORCHELASTIC_ERROR_FILE": str(self.error_file(rank))}
        out, err = (None, None) if show is None else (subprocess.PIPE, subprocess.STDOUT)
        # Each process leads its own session: a terminal's Ctrl-C reaches only this one, which forwards it once.
        # One while Python starts would print its traceback: the command unblocks it when it has its handler.
        with _blocked([signal.SIGINT]):
            process = subprocess.Popen(command, stdout=out, stderr=err, env=own, start_new_session=True)
        self._processes[rank] = process
        if show is not None:
            assert process.stdout is not None, "it is a pipe"
            thread = threading.Thread(target=copy_lines, args=(process.stdout, show), name="hlat-output", daemon=True)
            thread.start()
            self._copying.append(thread)

    def save_and_stop(self) -> None:
        """Ask those that still run to save and stop, and wait for them; not for ever."""
        running = [process for process in self._processes.values() if process.poll() is None]
        for process in running:
            signal_group(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + _SAVING
        while any(process.poll() is None for process in running) and time.monotonic() < deadline:
            time.sleep(_POLL)

    def end(self) -> None:
        """Kill those that still run, and show what they have printed last."""
        for process in self._processes.values():
            if process.poll() is None:
                signal_group(process.pid, signal.SIGKILL)
                process.wait()
        for thread in self._copying:
            thread.join(_CLOSING)


@contextmanager
def launch_ranks(
    command: Sequence[str],
    places: RankPlaces,
    environment: Mapping[str, str],
    folder: Path,
    show: Callable[[str], None] | None = None,
) -> Iterator[SpawnedRanks]:
    """Launch this machine's ranks of a run whose store another process serves; ``environment`` has the secret.

    Those still running at the end of the block are killed; after an error, they are asked to save first. ``show``
    receives what they print, None leaves it on the streams of this process.
    """
    workers = SpawnedRanks(folder)
    try:
        for local in range(places.nproc):
            variables = {**rank_environment(local, places), **environment}
            workers.start(places.first + local, command, variables, show)
        yield workers
    except BaseException:  # a bug in the supervisor must not lose the run's steps
        workers.save_and_stop()
        raise
    finally:
        workers.end()


@contextmanager
def launch_multiprocess(
    command: Sequence[str],
    nproc: int,
    environment: Mapping[str, str],
    folder: Path,
    show: Callable[[str], None] | None = None,
) -> Iterator[SpawnedRanks]:
    """Launch ``nproc`` processes of a command as one run, as ``launch_ranks`` does."""
    with open_store() as port:
        shared = {RUN_SECRET_ENV: secrets.token_hex(32), **environment}
        places = RankPlaces(0, nproc, nproc, 0, _LOOPBACK, port)
        with launch_ranks(command, places, shared, folder, show) as workers:
            yield workers


@contextmanager
def open_store(address: str = _LOOPBACK) -> Iterator[int]:
    """Serve the rendezvous store on this address only, and yield its port; OSError if it is not this machine's."""
    import torch.distributed as dist  # noqa: PLC0415  (most supervisors serve no store, and stay small)

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


def hlat_command(arguments: Sequence[str]) -> list[str]:
    """Command line of ``hlat`` with these arguments."""
    # -P: the current folder must not hide installed packages, as it does not with a single process.
    return [sys.executable, "-P", "-m", "hlat", *arguments]


def rank_environment(local: int, places: RankPlaces) -> dict[str, str]:
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
        "OMP_NUM_THREADS": max(1, own_cores() // places.nproc),  # by default each process takes all cores
        # By default gloo resolves this machine's name. On a network, a rank takes the interface that reaches the store.
        **(dict.fromkeys(interface_variables(), interface_of(places.address)) if is_loopback(places.address) else {}),
    }
    unset = {name: value for name, value in defaults.items() if name not in os.environ}
    return {name: str(value) for name, value in {**unset, **own}.items()}


def own_cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
