"""Helper processes: how they are started, how both sides talk, how each learns of the other's end, how they end.

    start_program(work, ...)   in a new interpreter, which imports only this module and that of the work
    start_helper(work)         in a fork of this process where that is safe, else in a new interpreter

    this process --command line: code folders, name of the work; environment-----> helper: main
                 --hello: arguments----------------------------------------------> work(channel, *arguments)
                 <-- any number of messages, with open descriptors, either way -->
                 <-- its error, as the last message, or its exit code: PeerEnded--
                 --channel closed, however this process ends---> it ends, with all that it has started
                 <-- ProgressRecord: it works, waits for a disk or a server, or neither

A fork takes milliseconds, a new interpreter a part of a second, and torch seconds. A fork is safe while torch is
imported, and nothing exists yet that a copy must not share, such as driver state or connections. A helper ignores
signals of terminals and schedulers, which are for this process. What it prints goes to standard error.

Messages are pickled: they come from the same program of the same user. Programs that are not hlat's (a compiler, a
program that a model wrote) have protocols of their own.
"""

import contextlib
import gc
import os
import pickle
import pkgutil
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
import traceback
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from hlat.runtime import errors
from hlat.runtime.backend.table import is_device_file
from hlat.runtime.process import let_output_be_lost, lossy_stream
from hlat.runtime.progress import ProgressRecord, begin_progress
from hlat.runtime.terminal import EscapingStream

SINGLE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
"""Environment of helpers of which there is one per processor."""

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_NICENESS = 10  # a tenth of a busy core, so that training is not slowed down
_PICKLE = 5
_HEAD = struct.Struct("<Q")  # bytes of the message that follows
_MOST_DESCRIPTORS = 16
_POLL = 0.05  # seconds
_LOOK_AT_PARENT = 1.0  # seconds
_REAP_SECONDS = 10.0  # a killed process ends at once, unless it waits in the kernel
_STANDARD_ERROR = 2

Work = Callable[["Channel"], None]
"""Function that the helper runs. It must be picklable if the helper is a new interpreter."""


class PeerEnded(EOFError):
    """The other process has ended. A parent is told, in words, how."""

    code = 0  # exit code of the helper, or minus the signal


@dataclass(frozen=True)
class _HelperError:
    """Last message of a helper whose work has raised an error."""

    kind: type[Exception]
    text: str

    @classmethod
    def of(cls, error: BaseException) -> "_HelperError":
        # The class may be of a module that the parent has not, or take other arguments: the nearest one of hlat.
        kinds = [kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__]
        return cls(kinds[0], str(error)) if kinds else cls(RuntimeError, "".join(traceback.format_exception(error)))

    def error(self, name: str) -> Exception:
        return self.kind(f"{name} failed:\n{self.text}" if self.kind is RuntimeError else self.text)


class Channel:
    """One end of the connection between two processes."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._lock = connection, threading.Lock()
        self._unsent = deque[memoryview]()  # messages of ``post``, the first perhaps in part

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Send a message and open descriptors, which also stay open here; PeerEnded if the other process has."""
        assert len(descriptors) <= _MOST_DESCRIPTORS, "the other side would not get them"
        content = pickle.dumps(message, _PICKLE)
        head = _HEAD.pack(len(content))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
        try:
            with self._lock:
                sent = self._socket.sendmsg([head, content], rights)
                if sent < len(head) + len(content):  # a signal has interrupted it
                    self._socket.sendall(memoryview(head + content)[sent:])
        except OSError as error:
            raise PeerEnded from error

    def post(self, *messages: object) -> int:
        """Send what the other process takes without waiting, these messages last; return how many still wait."""
        for message in messages:
            content = pickle.dumps(message, _PICKLE)
            self._unsent.append(memoryview(_HEAD.pack(len(content)) + content))
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent[0], socket.MSG_DONTWAIT)
                self._unsent[0] = self._unsent[0][sent:]
                if not self._unsent[0]:
                    self._unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:  # it has ended, which ``receive`` tells after its last messages
            self._unsent.clear()
        return len(self._unsent)

    def receive_within(self, seconds: float) -> tuple[Any, list[int]] | None:
        """Receive as ``receive``; None if no message arrived in time."""
        return self.receive() if self._polled(select.POLLIN, seconds) else None

    def receive(self) -> tuple[Any, list[int]]:
        """Receive the next message and its descriptors.

        Raises:
            PeerEnded: the other process has ended, and all of its messages have been received.
        """
        try:
            head, descriptors, _, _ = socket.recv_fds(self._socket, _HEAD.size, _MOST_DESCRIPTORS)
            head += self._exactly(_HEAD.size - len(head))
            return pickle.loads(self._exactly(*_HEAD.unpack(head))), descriptors
        except OSError as error:
            raise PeerEnded from error

    def _exactly(self, count: int) -> bytearray:
        content = bytearray(count)
        rest = memoryview(content)
        while rest:
            received = self._socket.recv_into(rest, flags=socket.MSG_WAITALL)
            if not received:  # also in the middle of a message, which nobody gets then
                raise PeerEnded
            rest = rest[received:]
        return content

    def _polled(self, events: int, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._socket.fileno(), events)  # a hang-up is always reported
        return bool(poll.poll(max(seconds, 0.0) * 1000))

    def has_unread(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        return False

    def on_parent_exit(
        self, action: Callable[[], None], seconds: Callable[[], float] = lambda: 0.0, parent: int = 0
    ) -> None:
        """Run an action on a thread once the parent has ended and ``seconds()`` to wait are 0 or less."""
        parent = parent or os.getppid()

        def watch() -> None:
            # Another child of the parent may have inherited its end, which then stays open.
            while not self._polled(0, _LOOK_AT_PARENT) and os.getppid() == parent:
                pass
            while (left := seconds()) > 0:
                time.sleep(min(left, _POLL))
            action()

        threading.Thread(target=watch, name="end-of-line", daemon=True).start()

    def close(self) -> None:
        self._socket.close()


class HelperProcess:
    """The helper process, as its parent sees it; ``name`` is for messages."""

    def __init__(
        self, name: str, channel: Channel, process: "subprocess.Popen[bytes] | _ForkedProcess", progress: ProgressRecord
    ) -> None:
        self.channel, self._name, self._process, self._progress = channel, name, process, progress
        self.pid = process.pid  # process id of the helper

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Send a message and descriptors, unless the helper has ended, which ``receive`` tells after its messages."""
        with contextlib.suppress(PeerEnded):
            self.channel.send(message, descriptors)

    def receive(self, seconds: float | None = None) -> Any:
        """Return the next message; None if none came in time.

        Raises:
            PeerEnded: the helper has ended.
            HlatError: of its work, or RuntimeError with the traceback of another error.
        """
        try:
            received = self.channel.receive() if seconds is None else self.channel.receive_within(seconds)
        except PeerEnded:
            code = self._process.wait()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            end = PeerEnded(f"{self._name} {how}")
            end.code = code
            raise end from None
        if received is None:
            return None
        if isinstance(received[0], _HelperError):
            raise received[0].error(self._name)
        return received[0]

    def silence(self, since: float = 0.0) -> float:
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
        while patience is not None and not self.has_ended():
            if self.silence(since) > patience:
                self._process.kill()
                break
            time.sleep(_POLL)
        return self._process.wait()

    def kill(self) -> None:
        """Close the channel, and kill the helper with all that it has started, unless it has ended by itself.

        It has ended when this returns, unless a disk or a server has held it for seconds.
        """
        self.channel.close()
        if not self.has_ended():
            with contextlib.suppress(ProcessLookupError):  # a fork that has no group of its own yet
                os.killpg(self.pid, signal.SIGKILL)
            self._process.kill()
        until = time.monotonic() + _REAP_SECONDS
        while not self.has_ended() and time.monotonic() < until:
            time.sleep(_POLL / 10)


def start_helper(work: Work, progress_file: IO[bytes] | None = None) -> HelperProcess:
    """Start a helper of low priority, which calls ``work``; what becomes of it when this process ends is its choice.

    The progress file is for a third process that reads the helper's record; None for an unnamed one.
    """
    if not _may_fork():
        return start_program(f"{__name__}:_call_nicely", work, linger=None, progress_file=progress_file)
    ours, theirs = socket.socketpair()
    with theirs, progress_file or ProgressRecord.open_file() as file:
        progress = ProgressRecord.starting(file)
        process = _fork(work, ours, theirs, file.fileno())
    return HelperProcess("a helper process", Channel(ours), process, progress)


def _call_nicely(channel: Channel, work: Work) -> None:
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    with contextlib.suppress(OSError):  # Linux may schedule by session first, and this is one
        Path("/proc/self/autogroup").write_text(str(_NICENESS))
    work(channel)


def start_program(
    work: str,
    *arguments: object,
    name: str = "a helper process",
    linger: float | None = 0.0,
    niceness: int = 0,
    environment: Mapping[str, str] | None = None,
    output: int = _STANDARD_ERROR,
    progress_file: IO[bytes] | None = None,
) -> HelperProcess:
    """Start a helper in a new interpreter.

    Args:
        work: "module:function", called with its channel and the arguments.
        arguments: anything that can be pickled.
        name: noun phrase for messages.
        linger: seconds after which it is killed once this process has ended; None: never.
        niceness: how much other processes come first, up to 19.
        environment: added to that of this process.
        output: descriptor that gets what it prints, or ``subprocess.DEVNULL``.
        progress_file: as for ``start_helper``.
    """
    # Where this process finds modules, it does. But those in the current folder must not hide those of Python.
    folders = sorted(sys.path, key=lambda folder: folder in ("", str(Path.cwd())))
    ours, theirs = socket.socketpair()
    with theirs, progress_file or ProgressRecord.open_file() as file:
        progress, descriptors = ProgressRecord.starting(file), (theirs.fileno(), file.fileno())
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-c"),
                f"import sys; sys.path[:] = {folders!r}; from {__name__} import main; "
                f"main(*{descriptors}, parent={os.getpid()}, linger={linger}, niceness={niceness})",
                work.partition(":")[0],  # for whoever lists processes
            ],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # signals of a terminal, or to this process's group, do not reach it
        )
    helper = HelperProcess(name, Channel(ours), process, progress)
    helper.send((work, arguments))
    return helper


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
    # Imported where torch is: a helper without it imports this module, too.
    import torch.distributed as dist  # noqa: PLC0415

    from hlat.runtime.backend.device import accelerator_in_use  # noqa: PLC0415

    # A fork cannot copy the state of a driver, nor a process group.
    return sys.platform == "linux" and not accelerator_in_use() and not dist.is_initialized()


def _fork(work: Work, ours: socket.socket, theirs: socket.socket, progress: int) -> _ForkedProcess:
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
        _close_inherited(theirs.fileno(), progress)
        _detach()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        begin_progress(progress)
        code = _run(Channel(theirs), partial(_call_nicely, work=work))
    finally:
        os._exit(code)  # skip the parent's exit handlers


def _close_inherited(*own: int) -> None:
    # Readers of an inherited pipe would not see the parent exit. A driver frees the memory of a killed process only
    # when no process has its files open any more: the next attempt would find the device full.
    for entry in list(Path("/proc/self/fd").iterdir()):
        descriptor = int(entry.name)
        if descriptor > _STANDARD_ERROR and descriptor not in own:
            with contextlib.suppress(OSError):  # the descriptor of the folder itself, closed by now
                mode = os.fstat(descriptor).st_mode
                is_connection = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
                if is_connection or (stat.S_ISCHR(mode) and is_device_file(str(entry.readlink()))):
                    os.close(descriptor)


def main(descriptor: int, progress: int, parent: int, linger: float | None, niceness: int) -> None:
    """Run a helper in a new interpreter, and end it; the first two arguments are descriptors."""
    os.nice(niceness)
    _detach()
    begin_progress(progress)
    channel = Channel(socket.socket(fileno=descriptor))
    if linger is not None:  # before the work is imported, which may take long
        channel.on_parent_exit(partial(_kill_own_group_after, linger), parent=parent)
    code = _run(channel, _do_first_message)
    sys.stderr.flush()  # the same as standard output
    os._exit(code)  # libraries may have threads and exit handlers that wait


def _do_first_message(channel: Channel) -> None:
    (work, arguments), _ = channel.receive()
    pkgutil.resolve_name(work)(channel, *arguments)


def _run(channel: Channel, work: Work) -> int:
    """Do the work of a helper; return its exit code."""
    try:
        work(channel)
    except PeerEnded:  # the parent has ended: nobody waits for more
        return 0
    except BaseException as error:
        with contextlib.suppress(PeerEnded):
            channel.send(_HelperError.of(error))
        return 1
    return 0


def _kill_own_group_after(seconds: float) -> None:
    # With the processes that libraries have started, which may wait for something else than this one.
    time.sleep(seconds)
    os.killpg(0, signal.SIGKILL)


def _detach() -> None:
    # These signals are for the parent, which tells the helper when to end.
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if os.getsid(0) != os.getpid():
        os.setsid()  # signals of a terminal, or to the parent's process group, do not end this one
    let_output_be_lost()  # a helper must not wait for a reader of its output
    sys.stdout = sys.stderr = EscapingStream(lossy_stream(_STANDARD_ERROR))
