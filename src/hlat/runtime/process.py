"""This process: its rank, its signals and exit codes, its output streams; and whether other processes are running.

    RANK, WORLD_SIZE, LOCAL_RANK, GROUP_RANK (from torchrun, hlat train --nproc, a scheduler) --rank_info--> RankInfo

    SIGTERM, SIGUSR1, the deadline --> 75: queue the run again
    SIGINT, SIGHUP                 --> 128 + n: a person ended it

    SIGINT within an import --> the same signal again, a moment later, until the import has ended
    KeyboardInterrupt where Python must drop it (a callback of a weak reference, __del__) --> likewise
    SIGINT anywhere else --> KeyboardInterrupt

    /proc/<pid>/stat of another process --> running, stopped, session; without /proc, only signals are available

    text --TextIOWrapper--> LossyOutput --> descriptor
                                 |  refused (full disk, closed pipe, hung-up terminal), or taken by nobody in time
                                 +--> lost lines --> the next line that is written, events of the run, exit code

Python's own handler of SIGINT raises wherever it is. importlib takes its global lock in a callback of a weak reference:
an interrupt there is dropped, and the lock stays taken. The command then goes on, and in a process that it forks the
first thread that imports anything waits for ever. An interrupt within an import is also lost where C code imports and
drops errors (torch asks for numpy that way), or becomes another error: numpy cannot be imported a second time.

A run must not end because of its log. So a command whose work is what counts (training, preparing) goes on without
the line, and does not wait for a reader. A command whose output is its result waits for its reader like any other
program, and its exit code tells whether the disk refused the result.
"""

import _thread
import ctypes
import errno
import io
import math
import os
import platform
import select
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO
from weakref import WeakSet

from hlat.runtime.errors import LaunchError, StorageError
from hlat.runtime.terminal import plural, takes_output

_PORTS = range(1, 1 << 16)


@dataclass(frozen=True)
class RankInfo:
    """Rank of this process among the processes of a run."""

    rank: int = 0  # global rank, 0 <= rank < world
    world: int = 1  # world size, the number of processes
    local_rank: int = 0  # rank among the processes of this machine, which is the index of its accelerator
    node: int = 0  # index of this machine


def host_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return Slurm's name of this node, which its commands take, or the host name."""
    return environment.get("SLURMD_NODENAME") or platform.node()


def rank_info(environment: Mapping[str, str] = os.environ) -> RankInfo:
    """Read the rank of this process from the environment, as torchrun or hlat's launcher sets it.

    Raises:
        LaunchError: the variables are incomplete or contradict each other; every problem is listed.
    """
    problems: list[str] = []
    world = _integer_variable(environment, "WORLD_SIZE", problems, default=1)
    if world == 1:
        return RankInfo()  # the process is alone, and the other variables are ignored
    rank = _integer_variable(environment, "RANK", problems)
    local_rank = _integer_variable(environment, "LOCAL_RANK", problems, default=rank)  # right on one machine
    node = _integer_variable(environment, "GROUP_RANK", problems, default=0)
    port = _integer_variable(environment, "MASTER_PORT", problems)
    if not environment.get("MASTER_ADDR"):
        problems.append("MASTER_ADDR is not set: it is the address of rank 0's machine, 127.0.0.1 on one machine.")
    if world is not None and world < 1:
        problems.append(f"WORLD_SIZE={world}: it is the number of processes of the run, 1 or more.")
    elif rank is not None and world is not None and not 0 <= rank < world:
        problems.append(f"RANK={rank}: with WORLD_SIZE={world} it must be between 0 and {world - 1}.")
    if local_rank is not None and local_rank < 0:
        problems.append(f"LOCAL_RANK={local_rank}: it is the index of the process on its machine, 0 or more.")
    if node is not None and node < 0:
        problems.append(f"GROUP_RANK={node}: it is the index of the machine, 0 or more.")
    if port is not None and port not in _PORTS:
        problems.append(f"MASTER_PORT={port}: a port is between {_PORTS[0]} and {_PORTS[-1]}.")
    if problems:
        head = "the environment does not say which process of the run this is:"
        remedy = (
            "Start the processes with `hlat train --nproc N` or torchrun, which set all of these, or unset WORLD_SIZE."
        )
        raise LaunchError("\n".join([head, *(f"  {problem}" for problem in problems), remedy]))
    assert rank is not None and local_rank is not None and world is not None, "missing variables are problems above"
    assert node is not None, "it has a default"
    return RankInfo(rank, world, local_rank, node)


def _integer_variable(
    environment: Mapping[str, str], name: str, problems: list[str], default: int | None = None
) -> int | None:
    text = environment.get(name)
    # A missing or malformed variable is a problem, so that all are reported at once.
    if not text:
        if default is None:
            problems.append(f"{name} is not set.")
        return default
    try:
        return int(text)
    except ValueError:
        problems.append(f"{name}={text}: it must be an integer.")
        return None


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals on which a run saves and stops. Slurm can send SIGUSR1 before a job's time limit."""

REQUEUE_CODE = 75
"""EX_TEMPFAIL of sysexits.h, "try again later": the state is saved, and the same command resumes from it."""

DEADLINE_ENV = "HLAT_DEADLINE"
"""Environment variable with the time at which a run saves and stops, in seconds of ``machine_clock``."""

INTERRUPTED_MESSAGE = "interrupted: completed work is kept; the same command goes on from there, or begins anew"
"""Message that is printed after Ctrl-C."""

_PREEMPTING = (signal.SIGTERM, signal.SIGUSR1)


def stop_exit_code(number: int) -> int:
    """Exit code of a run that was stopped by signal ``number``."""
    return REQUEUE_CODE if number in _PREEMPTING else 128 + number


STOP_EXIT_CODES = tuple({stop_exit_code(number) for number in STOP_SIGNALS})
"""Exit codes of runs that saved and stopped on request."""


_IMPORTLIB = "<frozen importlib._bootstrap>"  # name of the file of the functions that import and that take its locks
_COMMAND = "hlat.command"  # module of the handler that the command begins with
_REPEAT_SECONDS = 0.005
_LONGEST_IMPORT = 60.0  # seconds that an interrupt waits for an import, which may never end

_interrupted_at = math.inf  # when the interrupt came that waits for an import
_sender = 0  # process in which a thread is about to send a signal again; 0 for none


def raise_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt in this process."""
    # As in a background job: whoever started it wants it to go on.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return
    signal.signal(signal.SIGINT, interrupt)
    if not isinstance(sys.unraisablehook, _RepeatDropped):
        sys.unraisablehook = _RepeatDropped(sys.unraisablehook)


def end_at_sigterm() -> None:
    """Let SIGTERM end this process as it ends any program; no effect if it is ignored."""
    # The command's first handler (hlat.command) says that nothing had been started.
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def after_start(handler: Any) -> Any:
    """Return a handler for use after processes have run: the same, or the default for that of ``hlat.command``."""
    # hlat.command's says that nothing had been started, which is no longer true.
    return signal.SIG_DFL if getattr(handler, "__module__", None) == _COMMAND else handler


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle a signal: raise KeyboardInterrupt, or send the signal again a moment later if an import is under way."""
    global _interrupted_at  # noqa: PLW0603 - signals reach the main thread only
    _interrupted_at = min(_interrupted_at, time.monotonic())
    outer = frame
    while outer is not None and outer.f_code.co_filename != _IMPORTLIB:
        outer = outer.f_back
    is_late = time.monotonic() - _interrupted_at >= _LONGEST_IMPORT
    # The innermost frame may hold importlib's locks, however late it is.
    if outer is not None and (outer is frame or not is_late):
        _repeat(number)
        return
    _interrupted_at = math.inf
    raise KeyboardInterrupt


class _RepeatDropped:
    """A hook for exceptions that Python drops: sends the signal of a dropped KeyboardInterrupt again."""

    def __init__(self, other: Any) -> None:
        self._other = other

    def __call__(self, dropped: Any) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            _repeat(signal.SIGINT)
        else:
            self._other(dropped)


def _repeat(number: int) -> None:
    global _sender  # noqa: PLW0603 - as above
    # Further signals until then are the same request.
    if _sender != os.getpid():
        _sender = os.getpid()
        # A thread of threading takes locks, which handlers must not.
        _thread.start_new_thread(_send_later, (_sender, number))


def _send_later(process: int, number: int) -> None:
    global _sender  # noqa: PLW0603
    time.sleep(_REPEAT_SECONDS)
    _sender = 0
    os.kill(process, number)


def signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to a process's main thread, or to the process without ``tgkill``; errors of ``os.kill``."""
    library = ctypes.CDLL(None, use_errno=True)
    # glibc has tgkill from 2.30 on; macOS has none.
    if not hasattr(library, "tgkill"):
        os.kill(pid, number)
    # On Linux the id of a process is that of its main thread too.
    elif library.tgkill(pid, pid, number) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


LAUNCHER_ENV = "HLAT_LAUNCHER_PID"  # environment variable with the process id of the launcher that started this process

_PROC = Path("/proc")


def is_running(pid: int) -> bool:
    """Return True if a process with this id exists and is no zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _process_stat(pid)[:1] != ["Z"]  # a zombie: it has ended, and its parent has not waited for it


def is_stopped(pid: int) -> bool:
    """Return True if SIGSTOP or the like stopped a process; False if the system does not report it."""
    return process_state(pid) in ("T", "t")


def process_state(pid: int) -> str:
    """Return a process's state as Linux names it, such as R, S, D or T; empty if unknown."""
    return next(iter(_process_stat(pid)), "")


def session_is_alive(leaders: set[int]) -> bool:
    """Return True if a process of these sessions runs; False if the system does not report sessions."""
    if not _PROC.is_dir():
        return False
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            stat = _process_stat(int(entry.name))
            if len(stat) > 3 and stat[0] not in "ZX" and int(stat[3]) in leaders:
                return True
    return False


def _process_stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the state on; empty if there is no such process."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


_PIECE = select.PIPE_BUF  # bytes that a pipe takes without blocking if it says that it takes any
_READER_PATIENCE = 1.0  # seconds for a full pipe or a stopped terminal to take a line; no time after a line was lost
_READER_GONE = (errno.EPIPE, errno.EBADF)  # the reader has gone, as that of ``| head``: it has seen what it wanted

_outputs: "WeakSet[LossyOutput]" = WeakSet()
_waits = True


def let_output_be_lost() -> None:
    """Do not wait for readers from now on, and do not count lost lines as a failure of the command."""
    global _waits  # noqa: PLW0603 - the process has one command
    _waits = False


def lost_output() -> tuple[int, str]:
    """Return how many lines this process could not print, and why the last of them was lost."""
    whys = [output.why for output in _outputs if output.why]
    return sum(output.lines for output in _outputs), whys[-1] if whys else ""


def check_result() -> None:
    """Raise StorageError if the output of this process is its result, and the disk refused a part of it."""
    for output in _outputs:
        if _waits and output.descriptor == 1 and output.refused:
            raise StorageError(
                f"standard output is incomplete: {plural(output.lines, 'line')} lost: {output.why}. "
                "Free space, or send the output elsewhere, and run the same command again."
            )


class LossyOutput(io.RawIOBase):
    """Binary stream onto a descriptor that takes everything: what the descriptor refuses is lost."""

    def __init__(self, descriptor: int) -> None:
        # why: reason of the last loss; refused: a reader would have wanted it
        self.descriptor, self.why, self.refused = descriptor, "", False
        self._told = self._untold = 0  # lines lost before and after the last notice
        self._is_losing = self._lost_a_beginning = self._within_line = False
        _outputs.add(self)

    @property
    def lines(self) -> int:
        return self._told + self._untold + self._lost_a_beginning

    def write(self, data: Any, /) -> int:
        """Write data or lose it; return its length. Signal handlers may call it within a call."""
        written = 0
        rest = memoryview(data).cast("B")
        try:
            if self._untold or self._lost_a_beginning:
                self._put(self._notice())
                self._told, self._untold, self._lost_a_beginning = self.lines, 0, False
            for begin in range(0, len(rest), _PIECE):
                written += self._put(rest[begin : begin + _PIECE])
        except OSError as error:
            self._lose(bytes(rest[written:]), error)
        return len(rest)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        # The descriptor stays open when the stream is closed.
        return self.descriptor

    def isatty(self) -> bool:
        return os.isatty(self.descriptor)

    def _put(self, piece: memoryview | bytes) -> int:
        rest = memoryview(piece)
        while rest:
            patience = None if _waits else 0.0 if self._is_losing else _READER_PATIENCE
            if not takes_output(self.descriptor, patience):
                raise BlockingIOError(errno.EAGAIN, "nobody reads it")
            try:
                taken = os.write(self.descriptor, rest)
            except BlockingIOError:  # another process has set the pipe to non-blocking, and filled it
                if not _waits:
                    raise
                continue
            self._within_line = rest[taken - 1] != ord("\n")
            rest = rest[taken:]
        self._is_losing = False
        return len(piece)

    def _lose(self, data: bytes, error: OSError) -> None:
        self._untold += data.count(b"\n")
        self._lost_a_beginning = not data.endswith(b"\n")
        self._is_losing, self.why = True, error.strerror or str(error)
        self.refused = self.refused or error.errno not in _READER_GONE

    def _notice(self) -> bytes:
        begin = "\n" if self._within_line else ""
        lost = plural(self._untold + self._lost_a_beginning, "line")
        return f"{begin}({lost} of output lost: {self.why})\n".encode()


def lossy_stream(descriptor: int, encoding: str = "utf-8", *, by_line: bool = True) -> TextIO:
    """Return a text stream that never raises; unless ``by_line``, it writes when it is flushed."""
    # No BufferedWriter between them: its lock would make a signal handler fail that prints within a print.
    raw: Any = LossyOutput(descriptor)
    return io.TextIOWrapper(raw, encoding, "replace", line_buffering=by_line)
