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
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from hlat.runtime.errors import HlatError, StorageError
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
        log = path.open("ab", buffering=0)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}. Give another run.dir.") from error
    with log, lossy_stream(log.fileno()) as lines:
        stream = EscapingStream(lines)
        stream.write(_header(rank, world))
        redirected = _copied_to(stream) if rank == 0 else _redirected_to(stream)
        with _crash_stacks_in(log), redirected:
            try:
                yield
            except BaseException as error:
                stream.write(_report(error))
                raise


def _header(rank: int, world: int) -> str:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    identity = f"rank {rank} of {world}, pid {os.getpid()} on {platform.node()}"
    return f"==== {now} {identity}: {redact(' '.join(sys.argv))}\n"


def _report(error: BaseException) -> str:
    if isinstance(error, HlatError):
        return f"error: {error}\n"
    return redact("".join(traceback.format_exception(error)))


@contextmanager
def _crash_stacks_in(log: io.FileIO) -> Iterator[None]:
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
def _redirected_to(log: EscapingStream) -> Iterator[None]:
    _flush()  # earlier output belongs to the console
    saved = [os.dup(descriptor) for descriptor in (1, 2)]
    try:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
        # sys.stdout may be buffered, or bypass the descriptors in a notebook
        with redirect_stdout(log), redirect_stderr(log):
            yield
    finally:
        _flush()
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
