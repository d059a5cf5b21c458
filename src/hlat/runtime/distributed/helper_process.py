"""A helper process, forked or spawned, and a duplex channel for messages and file descriptors.

    this process --fork, or a new interpreter--> work(channel) in the helper
        --send--> messages, descriptors        <--send-- replies
        <------- ProgressRecord: it works, waits for a disk or a server, or neither
        channel closed: the helper finishes the work it has begun, then exits

The helper is forked if that is safe: torch is imported, and nothing exists yet that a copy must not share, such as
driver state or connections. A fork takes milliseconds, a new interpreter seconds. The helper ignores signals of
terminals and schedulers, which are for this process, and closes inherited connections and files of devices.
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
from typing import IO, Any, Protocol

import torch.distributed as dist

from hlat.runtime.backend.device import accelerator_in_use
from hlat.runtime.backend.table import is_device_file
from hlat.runtime.process import let_output_be_lost, lossy_stream
from hlat.runtime.progress import ProgressRecord, begin_progress
from hlat.runtime.terminal import EscapingStream

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_NICENESS = 10  # a tenth of a busy core, so that training is not slowed down
_PICKLE = 5
_POLL = 0.05  # seconds

Work = Callable[["Channel"], None]
"""Function that the helper runs. It must be picklable if the helper is a new interpreter."""


class Channel:
    """One end of the connection between two processes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Send a message and open descriptors, which also stay open here; EOFError if the other process has exited."""
        try:
            self._connection.send_bytes(pickle.dumps((message, len(descriptors)), _PICKLE))
            for descriptor in descriptors:
                send_handle(self._connection, descriptor, 0)
        except OSError as error:
            raise EOFError from error

    def receive(self, seconds: float | None = None) -> tuple[Any, list[int]] | None:
        """Receive the next message and its descriptors; None if none arrived in time (None: no limit).

        Raises:
            EOFError: the other process has exited, and all of its messages have been received.
        """
        try:
            if not self._connection.poll(seconds):
                return None
            message, count = pickle.loads(self._connection.recv_bytes())
            return message, [recv_handle(self._connection) for _ in range(count)]
        except OSError as error:
            raise EOFError from error

    def has_unread(self) -> bool:
        count = array("i", [0])
        fcntl.ioctl(self._connection.fileno(), termios.FIONREAD, count)
        return count[0] > 0

    def on_peer_exit(self, action: Callable[[], None], seconds: Callable[[], float]) -> None:
        """Run an action on a thread once the other process has exited and ``seconds()`` to wait are 0 or less."""

        def watch() -> None:
            poll = select.poll()
            poll.register(self._connection.fileno(), 0)  # a hang-up is always reported
            poll.poll()
            while (left := seconds()) > 0:
                time.sleep(min(left, _POLL))
            action()

        threading.Thread(target=watch, name="end-of-line", daemon=True).start()

    def close(self) -> None:
        self._connection.close()


class HelperProcess:
    """The helper process, as its parent sees it."""

    def __init__(self, channel: Channel, process: "_Process", progress: ProgressRecord) -> None:
        self.channel, self._process, self._progress = channel, process, progress
        self.pid = process.pid  # process id of the helper

    def silence(self, since: float) -> float:
        """Return the seconds without a sign of life of the helper, from ``since`` (monotonic) on."""
        return self._progress.silence(since, self.pid)

    @property
    def blocked_seconds(self) -> float:
        """Seconds that the helper has been waiting for a disk or a server."""
        return self._progress.blocked_seconds

    def close(self) -> None:
        # The helper finishes the work it has begun, then exits; wait() waits for that.
        self.channel.close()

    def wait(self, patience: float | None = None) -> int:
        """Wait for the exit code, or minus the signal; kill it after ``patience`` seconds of silence (None: never)."""
        since = time.monotonic()
        while patience is not None and self._process.poll() is None:
            if self.silence(since) > patience:
                self._process.kill()
                break
            time.sleep(_POLL)
        return self._process.wait()

    def kill(self) -> None:
        """Close the channel and kill the helper; it has ended when this returns."""
        self.channel.close()
        self._process.kill()
        self._process.wait()


def start_helper(work: Work, progress_file: IO[bytes] | None = None) -> HelperProcess:
    """Start a helper process, which calls ``work``.

    The progress file is for a third process that reads the helper's record; None for an unnamed one.
    """
    ours, theirs = Pipe()
    with progress_file or ProgressRecord.open_file() as file:
        progress, start = ProgressRecord.starting(file), _fork if _may_fork() else _spawn
        process: _Process = start(work, ours, theirs, file.fileno())
    theirs.close()
    return HelperProcess(Channel(ours), process, progress)


class _Process(Protocol):
    pid: int

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def kill(self) -> None: ...


class _ForkedProcess:
    """A forked child with the interface of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        code = self._wait(0)
        assert code is not None, "it has waited"
        return code

    def _wait(self, options: int) -> int | None:
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, options)
                self._code = os.waitstatus_to_exitcode(status) if pid else None
            except ChildProcessError:  # another part of the program has waited for it
                self._code = 0
        return self._code

    def kill(self) -> None:
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _may_fork() -> bool:
    # A fork cannot copy the state of a driver, nor a process group.
    return sys.platform == "linux" and not accelerator_in_use() and not dist.is_initialized()


def _fork(work: Work, ours: Connection, theirs: Connection, progress: int) -> _ForkedProcess:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    with warnings.catch_warnings():
        # Python warns if there are other threads. The copy has none of them, and waits for none.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return _ForkedProcess(pid)
    code = 1
    try:
        ours.close()
        gc.freeze()  # the parent's garbage must not close reused descriptors here
        _close_inherited(theirs.fileno())
        _detach()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        begin_progress(progress)
        work(Channel(theirs))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # skip the parent's exit handlers


def _close_inherited(own: int) -> None:
    # Readers of an inherited pipe would not see the parent exit. A driver frees the memory of a killed process only
    # when no process has its files open any more: the next attempt would find the device full.
    for entry in list(Path("/proc/self/fd").iterdir()):
        descriptor = int(entry.name)
        if descriptor > 2 and descriptor != own:
            with contextlib.suppress(OSError):  # the descriptor of the folder itself, closed by now
                mode = os.fstat(descriptor).st_mode
                is_connection = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
                if is_connection or (stat.S_ISCHR(mode) and is_device_file(str(entry.readlink()))):
                    os.close(descriptor)


def _spawn(work: Work, ours: Connection, theirs: Connection, progress: int) -> "subprocess.Popen[bytes]":
    program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main(*map(int, sys.argv[1:]))"
    descriptors = [theirs.fileno(), progress]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, descriptors)], pass_fds=descriptors, start_new_session=True
    )
    with contextlib.suppress(OSError):  # it has exited already: the channel reports that
        ours.send_bytes(pickle.dumps(work, _PICKLE))
    return process


def main(descriptor: int, progress: int) -> None:
    """Run the work that is the first message of the channel, in a new interpreter; arguments are descriptors."""
    _detach()
    begin_progress(progress)
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError):
        work: Work = pickle.loads(connection.recv_bytes())
        work(Channel(connection))


def _detach() -> None:
    # These signals are for the parent, which tells the helper when to end.
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if os.getsid(0) != os.getpid():
        os.setsid()  # signals of a terminal, or to the parent's process group, do not end this one
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    with contextlib.suppress(OSError):  # Linux may schedule by session first, and this is one
        Path("/proc/self/autogroup").write_text(str(_NICENESS))
    let_output_be_lost()  # a helper must not wait for a reader of its output
    sys.stdout = sys.stderr = EscapingStream(lossy_stream(2))
