"""One log file per process of a run.

    rank 0        stdout, stderr --Tee--> console and <run_dir>/logs/rank-00000.log
    other ranks   file descriptors 1 and 2 -----> <run_dir>/logs/rank-00003.log

The other ranks are redirected at the level of file descriptors, so that output of C++ code and the traceback of a
crash are in the file too. Rank 0 keeps the descriptors of the console, which remains a terminal if it was one.
"""

import faulthandler
import io
import os
import platform
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from hlat.runtime.errors import HlatError, StorageError
from hlat.runtime.process.appended_file import AppendedFile
from hlat.runtime.process.lossy_output import lossy_stream
from hlat.runtime.terminal_text import EscapingStream
from hlat.runtime.urls import redact

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")


def log_path(run_dir: Path, rank: int) -> Path:
    """Path of a rank's log file."""
    return run_dir / "logs" / f"rank-{rank:05d}.log"


@contextmanager
def rank_log(run_dir: Path, rank: int, world: int) -> Iterator[None]:
    """Write the output of this process to its log file, appending; no effect if the process is alone.

    Rank 0 also prints on the console, the others only to their file. An exception that leaves the block is written to
    the file and raised again; the traceback is omitted for errors that the user can fix.

    Args:
        run_dir: folder of the run, which exists.
        rank: rank of this process.
        world: world size.

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
                stream.write(_report(error))
                raise


class _LogFile(AppendedFile):
    """The log; if it is renamed or removed, as programs that rotate logs do, a new one begins under its name."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, restores=False)
        self._copies: tuple[int, ...] = ()

    def copy_to(self, *descriptors: int) -> None:
        """Let other descriptors be the log, too, from now on; without any, none of them follows it any more."""
        self._copies = descriptors
        for descriptor in descriptors:
            os.dup2(self.descriptor, descriptor)

    def follow(self) -> str:
        """Open the file under the name if it is another one, and return what was done."""
        if move := super().follow():
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
    """Write the Python stacks of a crash (SIGSEGV, SIGABRT) to the file."""
    before = faulthandler.is_enabled()
    faulthandler.enable(log)
    try:
        yield
    finally:
        faulthandler.disable()
        if before:
            faulthandler.enable(2)  # the default, sys.stderr, may have no descriptor


@contextmanager
def _redirected_to(log: _LogFile, stream: EscapingStream) -> Iterator[None]:
    _flush()  # earlier output belongs to the console
    saved = [os.dup(descriptor) for descriptor in (1, 2)]
    try:
        log.copy_to(1, 2)
        # sys.stdout may be buffered, or bypass the descriptors in a notebook
        with redirect_stdout(stream), redirect_stderr(stream):
            yield
    finally:
        _flush()
        log.copy_to()
        for descriptor, console in zip((1, 2), saved, strict=True):
            os.dup2(console, descriptor)
            os.close(console)


@contextmanager
def _copied_to(log: EscapingStream) -> Iterator[None]:
    copy = _LineCopy(log)
    with redirect_stdout(Tee(sys.stdout, copy)), redirect_stderr(Tee(sys.stderr, copy)):
        yield


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with suppress(OSError):  # a closed pipe must not end the work
            if stream is not None:
                stream.flush()


class _LogStream(EscapingStream):
    """The log as a text stream, which follows the log's name."""

    def __init__(self, log: _LogFile, lines: TextIO) -> None:
        super().__init__(lines)
        self._log = log

    def write(self, text: str) -> int:
        """Write text to the log; return its length."""
        self._log.follow()
        return super().write(text)


class _LineCopy:
    """Converts terminal output to lines of a file: colours are dropped, and a redrawn line becomes a new line."""

    def __init__(self, log: EscapingStream) -> None:
        self._log = log
        self._at_start = True

    def write(self, text: str) -> None:
        """Append text that was sent to the terminal."""
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


class Tee(io.TextIOBase):
    """A text stream that copies what is written; everything else, above all ``isatty``, is forwarded to the console."""

    def __init__(self, console: TextIO, copy: _LineCopy) -> None:
        self._console, self._copy = console, copy

    def write(self, text: str) -> int:
        """Write text to the console and to the copy."""
        self._copy.write(text)
        return self._console.write(text)

    def flush(self) -> None:
        """Flush the console."""
        self._console.flush()

    def isatty(self) -> bool:
        """Return True if the console is a terminal."""
        return self._console.isatty()

    def fileno(self) -> int:
        """Return the descriptor of the console."""
        return self._console.fileno()

    def writable(self) -> bool:
        """Return True."""
        return True

    @property
    def rich_proxied_file(self) -> "TextIO | Tee":
        """A tee onto the stream that rich writes to (see ``terminal_text.EscapingStream``)."""
        underlying = getattr(self._console, "rich_proxied_file", self._console)
        return self if underlying is self._console else Tee(underlying, self._copy)

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typeshed has an attribute, which is None in TextIOBase
        """Encoding of the console."""
        return self._console.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        """Error handler of the console's encoding."""
        return self._console.errors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._console, name)
