"""Logs of a process: files that it appends to, one log file per rank, and its output as JSON lines.

    name --AppendedFile--> the open file: append
                       --> no file, or an empty one (removed, renamed, rotated): write the content back, then append
                       --> another file (an editor's copy): append to that

    rank 0        stdout, stderr --Tee--> console and <run_dir>/logs/rank-00000.log
    other ranks   file descriptors 1 and 2 -----> <run_dir>/logs/rank-00003.log

    hlat's messages and events --json_line--> descriptors 1, 2 --pipes--> helper (json_lines.py) --> original streams
    tracebacks, libraries, C++ -------------------^

A file is appended to for months, and others may give its name to another file meanwhile. Names are looked up in the
folder that was opened, wherever that is moved: another folder in its place is left alone. Rank 0 keeps the descriptors
of the console, which remains a terminal if it was one. Elsewhere descriptors are redirected, so that output of C++ code
and the traceback of a crash are in the file, or in JSON, too.
"""

import atexit
import faulthandler
import os
import platform
import re
import stat
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from hlat.runtime.errors import HlatError, StorageError
from hlat.runtime.json_lines import format_line
from hlat.runtime.process import lossy_stream
from hlat.runtime.terminal import EscapingStream, StreamAround, terminal_below
from hlat.runtime.urls import redact, redact_json

_COPIED_BYTES = 1 << 20
_MOST_VAIN = 2  # then the file system never gives a file the same identity twice, and nothing is followed


class AppendedFile:
    """An open file in an existing folder, appended to under its name. Closing it twice is harmless.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, restores: bool = True) -> None:
        self._name, self._restores = path.name, restores  # restores: write the content back if it was moved
        self._vain = 0  # follows in a row that did not find the file that they opened
        self._folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.descriptor = self._open()  # the same number until close; then -1
        except OSError:
            os.close(self._folder)
            raise

    def follow(self) -> str:
        """Open the file under the name if it is another; return ``written back``, ``another file`` or ""."""
        if self._vain == _MOST_VAIN or self._is_in_place():
            return ""
        # Another file with content may lack what was appended while a program made it.
        is_empty = self._size_in_place() == 0
        try:
            if self._restores and is_empty:
                self._write_back()
            new = self._open()
        except OSError:
            return ""  # it cannot be opened or written back: the old one is appended to
        os.dup2(new, self.descriptor, inheritable=False)
        os.close(new)
        self._vain = 0 if self._is_in_place() else self._vain + 1
        return "written back" if is_empty else "another file"

    def write(self, content: bytes | memoryview) -> int:
        return os.write(self.descriptor, content)

    def fileno(self) -> int:
        return self.descriptor

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            os.close(self._folder)
            self.descriptor = -1

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return os.open(self._name, flags, 0o644, dir_fd=self._folder)

    def _is_in_place(self) -> bool:
        opened = os.fstat(self.descriptor)
        if not stat.S_ISREG(opened.st_mode):
            return True
        try:
            found = os.stat(self._name, dir_fd=self._folder)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # a file system that does not answer
        return os.path.samestat(found, opened)

    def _size_in_place(self) -> int:
        try:
            return os.stat(self._name, dir_fd=self._folder).st_size
        except FileNotFoundError:
            return 0

    def _write_back(self) -> None:
        copy = f".{self._name}.{os.getpid()}.tmp"
        new = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644, dir_fd=self._folder)
        try:
            offset = 0
            while content := os.pread(self.descriptor, _COPIED_BYTES, offset):
                offset += os.write(new, content)
            # Before the rename: a crash leaves all of the content under the name, or nothing.
            os.fsync(new)
            os.rename(copy, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError:
            os.unlink(copy, dir_fd=self._folder)
            raise
        finally:
            os.close(new)


_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")


def log_path(run_dir: Path, rank: int) -> Path:
    """Path of a rank's log file in a run's folder."""
    return run_dir / "logs" / f"rank-{rank:05d}.log"


@contextmanager
def rank_log(run_dir: Path, rank: int, world: int) -> Iterator[None]:
    """Append the output of this process to its log file within the block; no effect if the process is alone.

    Raises:
        StorageError: the file cannot be opened.
    """
    if world == 1:
        yield
        return
    path = log_path(run_dir, rank)
    try:
        path.parent.mkdir(exist_ok=True)
        log = _LogFile(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}. Give another run.dir.") from error
    with closing(log), lossy_stream(log.fileno()) as lines:
        stream = _LogStream(log, lines)
        stream.write(_header(rank, world))
        redirected = _copied_to(stream) if rank == 0 else _redirected_to(log, stream)
        with _crash_stacks_in(log), redirected:
            try:
                yield
            except BaseException as error:
                # The file has the exception, too, without the traceback for errors that the user can fix.
                stream.write(_report(error))
                raise


class _LogFile(AppendedFile):
    """The log; if it is renamed or removed, as log rotation does, a new one begins under its name."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, restores=False)
        self._copies: tuple[int, ...] = ()

    def copy_to(self, *descriptors: int) -> None:
        self._copies = descriptors
        for descriptor in descriptors:
            os.dup2(self.descriptor, descriptor)

    def follow(self) -> str:
        if move := super().follow():
            # The redirected descriptors still lead to the renamed file.
            self.copy_to(*self._copies)
        return move


def _header(rank: int, world: int) -> str:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    identity = f"rank {rank} of {world}, pid {os.getpid()} on {platform.node()}"
    return f"==== {now} {identity}: {redact(' '.join(sys.argv))}\n"


def _report(error: BaseException) -> str:
    if isinstance(error, HlatError):
        return f"error: {error}\n"
    return redact("".join(traceback.format_exception(error)))


@contextmanager
def _crash_stacks_in(log: _LogFile) -> Iterator[None]:
    before = faulthandler.is_enabled()
    # Python's stacks of a crash (SIGSEGV, SIGABRT).
    faulthandler.enable(log)
    try:
        yield
    finally:
        faulthandler.disable()
        if before:
            faulthandler.enable(2)  # the default, sys.stderr, may have no descriptor


@contextmanager
def _redirected_to(log: _LogFile, stream: EscapingStream) -> Iterator[None]:
    _flush_streams()  # earlier output belongs to the console
    saved = [os.dup(descriptor) for descriptor in (1, 2)]
    try:
        log.copy_to(1, 2)
        # sys.stdout may be buffered, or bypass the descriptors in a notebook
        with redirect_stdout(stream), redirect_stderr(stream):
            yield
    finally:
        _flush_streams()
        log.copy_to()
        for descriptor, console in zip((1, 2), saved, strict=True):
            os.dup2(console, descriptor)
            os.close(console)


@contextmanager
def _copied_to(log: EscapingStream) -> Iterator[None]:
    copy = _LineCopy(log)
    with redirect_stdout(Tee(sys.stdout, copy)), redirect_stderr(Tee(sys.stderr, copy)):
        yield


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with suppress(OSError, ValueError):  # a closed pipe, or a closed stream, must not end the work
            if stream is not None:
                stream.flush()


class _LogStream(EscapingStream):
    """The log as a text stream, which follows the log's name."""

    def __init__(self, log: _LogFile, lines: TextIO) -> None:
        super().__init__(lines)
        self._log = log

    def write(self, text: str) -> int:
        self._log.follow()
        return super().write(text)


class _LineCopy:
    """Converts terminal output to lines of a file: colours are dropped, a redrawn line becomes a new line."""

    def __init__(self, log: EscapingStream) -> None:
        self._log = log
        self._at_start = True

    def write(self, text: str) -> None:
        plain = _CONTROL.sub("", text).replace("\r\n", "\n")
        for part in re.split(r"(\r)", plain):
            if part == "\r":
                self._put("" if self._at_start else "\n")
            else:
                self._put(part)

    def _put(self, text: str) -> None:
        if text:
            self._log.write(text)
            self._at_start = text.endswith("\n")


class Tee(StreamAround):
    """A text stream that copies what is written; all else, above all ``isatty``, is the console's."""

    def __init__(self, console: TextIO, copy: _LineCopy) -> None:
        super().__init__(console)
        self._copy = copy

    def write(self, text: str) -> int:
        self._copy.write(text)
        return super().write(text)

    @property
    def rich_proxied_file(self) -> "TextIO | Tee":
        # As terminal.EscapingStream: rich writes there.
        below = terminal_below(self.stream)
        return self if below is self.stream else Tee(below, self._copy)


_JSON_MARK = "HLAT_JSON_LINES"  # environment variable of the processes whose streams are converted

_JSON_HELPER = Path(__file__).with_name("json_lines.py")
_JSON_ENDING = 5.0  # seconds for the helper to write the last lines; a child may have inherited its pipes and live on


def json_line(event: str, message: str, *, values: Mapping[str, Any] | None = None, **others: Any) -> str:
    """Return a log line, without credentials in URLs; arguments as ``json_lines.format_line``."""
    return format_line(event, redact(message), values=redact_json(values or {}), **others)


def prints_json() -> bool:
    """Return True if the streams of this process are converted to JSON lines."""
    return _JSON_MARK in os.environ


def print_json_lines() -> None:
    """Convert everything that this process and its children print from now on."""
    if prints_json():  # by a parent, or earlier
        return
    _flush_streams()
    saved = [os.dup(descriptor) for descriptor in (1, 2)]
    pipes = [os.pipe(), os.pipe()]
    sources = [reads for reads, _ in pipes]
    helper = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_JSON_HELPER), *map(str, sources)],
        pass_fds=sources,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a terminal's Ctrl-C is for the run
    )
    for descriptor, (reads, writes) in enumerate(pipes, 1):
        os.dup2(writes, descriptor)
        os.close(reads)
        os.close(writes)
    os.environ[_JSON_MARK] = "1"
    sys.excepthook = _report_exception
    atexit.register(_restore_streams, os.getpid(), saved, helper)


def _restore_streams(owner: int, saved: list[int], helper: "subprocess.Popen[bytes]") -> None:
    if os.getpid() != owner:  # a forked child
        return
    _flush_streams()
    for descriptor, original in enumerate(saved, 1):
        os.dup2(original, descriptor)
    with suppress(subprocess.TimeoutExpired):
        # The helper may still have lines to write.
        helper.wait(_JSON_ENDING)


def _report_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    text = "".join(traceback.format_exception(kind, error, trace)).rstrip()
    sys.stderr.write(json_line("output", text, level="error", values={"stream": "stderr"}) + "\n")
