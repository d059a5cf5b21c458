"""A process beside this one, with a line to it: messages and open files go both ways.

    this process --fork, or a new interpreter--> work(line) there
        --send--> orders, descriptors        <--send-- what came of them
        end of the line: what has been begun is finished, then it leaves

It begins as a copy of this process where that is safe: early, torch is imported and nothing else has happened that a
copy must not take along. That costs milliseconds, a new interpreter seconds. It decides nothing about its end: signals
of terminals and schedulers are for this process, and it holds none of its connections.
"""

import contextlib
import fcntl
import gc
import os
import pickle
import select
import signal
import stat
import subprocess
import sys
import termios
import threading
import time
import traceback
import warnings
from array import array
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from hlat.runtime.backend import accelerator_in_use
from hlat.runtime.terminal_text import EscapingStream

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_NICENESS = 10  # a tenth of a busy core: it is to finish, and not to hold training up
_PICKLE = 5

Work = Callable[["Channel"], None]
"""What the other process does. Where it is a new interpreter it has to be picklable."""


class Channel:
    """One end of the line between two processes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Send a message, and open files with it, which stay open here.

        Raises:
            EOFError: the other process has gone.
        """
        try:
            self._connection.send_bytes(pickle.dumps((message, len(descriptors)), _PICKLE))
            for descriptor in descriptors:
                send_handle(self._connection, descriptor, 0)
        except OSError as error:
            raise EOFError from error

    def receive(self, seconds: float | None = None) -> tuple[Any, list[int]] | None:
        """The next message and the files that came with it; None if there was none within so many seconds.

        Raises:
            EOFError: the other process has gone, and everything that it said has been received.
        """
        try:
            if not self._connection.poll(seconds):
                return None
            message, count = pickle.loads(self._connection.recv_bytes())
            return message, [recv_handle(self._connection) for _ in range(count)]
        except OSError as error:
            raise EOFError from error

    def has_unread(self) -> bool:
        """Whether something has been sent that was not received yet."""
        count = array("i", [0])
        fcntl.ioctl(self._connection.fileno(), termios.FIONREAD, count)
        return count[0] > 0

    def on_peer_exit(self, action: Callable[[], None], seconds: Callable[[], float]) -> None:
        """Have an action done, on a thread, so many seconds after the other process has gone."""

        def watch() -> None:
            poll = select.poll()
            poll.register(self._connection.fileno(), 0)  # of the hang-up one is told unasked
            poll.poll()
            time.sleep(seconds())
            action()

        threading.Thread(target=watch, name="end-of-line", daemon=True).start()

    def close(self) -> None:
        """End the line."""
        self._connection.close()


class HelperProcess:
    """The other process, as this one sees it.

    Attributes:
        channel: this end of the line.
        pid: of the other process.
    """

    def __init__(self, channel: Channel, process: "_Process") -> None:
        self.channel, self._process = channel, process
        self.pid = process.pid

    def close(self) -> None:
        """End the line; the process leaves when it has finished what it has begun. Nobody waits."""
        self.channel.close()

    def wait(self) -> int:
        """Wait until it has left; its exit code, or minus the signal that ended it."""
        return self._process.wait()

    def kill(self) -> None:
        """End the line and the process, whatever it does; once this returns, it does no more."""
        self.channel.close()
        self._process.kill()
        self._process.wait()


def start_helper(work: Work) -> HelperProcess:
    """Start a process that does some work for this one.

    Args:
        work: called there with the other end of the line.
    """
    ours, theirs = Pipe()
    process: _Process = _fork(work, ours, theirs) if _may_fork() else _spawn(work, ours, theirs)
    theirs.close()
    return HelperProcess(Channel(ours), process)


class _Process(Protocol):
    pid: int

    def wait(self) -> int: ...

    def kill(self) -> None: ...


class _ForkedProcess:
    """A child, as ``subprocess.Popen`` would have it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def wait(self) -> int:
        if self._code is None:
            try:
                self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:  # somebody else has looked at how it ended
                self._code = 0
        return self._code

    def kill(self) -> None:
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _may_fork() -> bool:
    """Whether a copy of this process could work: not with a driver's state, or connections, that cannot be copied."""
    return sys.platform == "linux" and not accelerator_in_use() and not dist.is_initialized()


def _fork(work: Work, ours: Connection, theirs: Connection) -> _ForkedProcess:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    with warnings.catch_warnings():
        # Python warns where there are other threads: of those the copy has none, and waits for none.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return _ForkedProcess(pid)
    code = 1
    try:
        ours.close()
        gc.freeze()  # what was garbage in the other process must not close files here, by numbers used anew
        _close_connections(theirs.fileno())
        _settle_in()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        work(Channel(theirs))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # nothing that the other process wants to have done at its end is done here


def _close_connections(own: int) -> None:
    """Close pipes and sockets that were copied: whoever listens at their other end waits for the process to end."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        descriptor = int(entry.name)
        if descriptor > 2 and descriptor != own:
            with contextlib.suppress(OSError):  # the folder's own, which is closed by now
                mode = os.fstat(descriptor).st_mode
                if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
                    os.close(descriptor)


def _spawn(work: Work, ours: Connection, theirs: Connection) -> "subprocess.Popen[bytes]":
    program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main(int(sys.argv[1]))"
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(theirs.fileno())], pass_fds=[theirs.fileno()], start_new_session=True
    )
    with contextlib.suppress(OSError):  # it has gone already: the line says so
        ours.send_bytes(pickle.dumps(work, _PICKLE))
    return process


def main(descriptor: int) -> None:
    """Do, in a new interpreter, the work that comes first on the line."""
    _settle_in()
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError):
        work: Work = pickle.loads(connection.recv_bytes())
        work(Channel(connection))


def _settle_in() -> None:
    """Leave signals to the other process, and give way to it; say what there is to say on standard error."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if os.getsid(0) != os.getpid():
        os.setsid()  # neither a terminal, nor whoever ends the other process's group, ends this one in its work
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    with contextlib.suppress(OSError):  # Linux may share out processors among sessions first, and this is one
        Path("/proc/self/autogroup").write_text(str(_NICENESS))
    error = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stderr = EscapingStream(error)
