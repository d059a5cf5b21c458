"""One log file per process of a run.

    rank 0        stdout, stderr --Tee--> console and <run_dir>/logs/rank-00000.log
    other ranks   file descriptors 1 and 2 -----> <run_dir>/logs/rank-00003.log

The other ranks are redirected below Python, so that what C++ prints and the traceback of a crash are in the file too.
Rank 0 is not: the descriptors stay those of the console, which remains a terminal where it was one.
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
from hlat.runtime.terminal_text import escape_controls
from hlat.runtime.urls import redact

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")


def log_path(run_dir: Path, rank: int) -> Path:
    """Where the log of a rank lies."""
    return run_dir / "logs" / f"rank-{rank:05d}.log"


@contextmanager
def rank_log(run_dir: Path, rank: int, world: int) -> Iterator[None]:
    """Keep what this process prints in its log file, which is appended to; nothing where it is alone.

    Rank 0 prints on the console as well, the others in their file only. An exception that passes is written to the
    file, with its traceback unless it is the user's to put right, and goes on.

    Args:
        run_dir: the folder of the run, which exists.
        rank, world: of this process.

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
    with log:
        _write(log, _header(rank, world))
        redirected = _copied(log) if rank == 0 else _redirected(log)
        with _crashes(log), redirected:
            try:
                yield
            except BaseException as error:
                _write(log, _report(error))
                raise


def _header(rank: int, world: int) -> str:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    place = f"rank {rank} of {world}, pid {os.getpid()} on {platform.node()}"
    return f"==== {now} {place}: {redact(' '.join(sys.argv))}\n"


def _report(error: BaseException) -> str:
    if isinstance(error, HlatError):
        return f"error: {error}\n"
    return redact("".join(traceback.format_exception(error)))


def _write(log: io.FileIO, text: str) -> None:
    with suppress(OSError):  # a full disk must not replace the error that is being told, or end a run that goes well
        log.write(escape_controls(text).encode("utf-8", "backslashreplace"))


@contextmanager
def _crashes(log: io.FileIO) -> Iterator[None]:
    """Have the Python stacks of a crash (SIGSEGV, SIGABRT) written to the file."""
    before = faulthandler.is_enabled()
    faulthandler.enable(log)
    try:
        yield
    finally:
        faulthandler.disable()
        if before:
            faulthandler.enable(2)  # sys.stderr, its default, need not have a descriptor


@contextmanager
def _redirected(log: io.FileIO) -> Iterator[None]:
    _flush()  # what was printed before belongs to the console
    saved = [os.dup(descriptor) for descriptor in (1, 2)]
    try:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
        stream: Any = _LogStream(log)  # Python's own may be buffered, or, in a notebook, not lead to the descriptors
        with redirect_stdout(stream), redirect_stderr(stream):
            yield
    finally:
        _flush()
        for descriptor, console in zip((1, 2), saved, strict=True):
            os.dup2(console, descriptor)
            os.close(console)


@contextmanager
def _copied(log: io.FileIO) -> Iterator[None]:
    copy = _Lines(log)
    with redirect_stdout(Tee(sys.stdout, copy)), redirect_stderr(Tee(sys.stderr, copy)):
        yield


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with suppress(OSError):  # a reader that has gone away must not end the work
            if stream is not None:
                stream.flush()


class _LogStream(io.TextIOBase):
    """The log as a text stream: unbuffered, since the last lines of a process that is killed are the ones wanted."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, log: io.FileIO) -> None:
        self._log = log

    def write(self, text: str) -> int:
        _write(self._log, text)
        return len(text)

    def fileno(self) -> int:
        return self._log.fileno()

    def writable(self) -> bool:
        return True


class _Lines:
    """What a terminal is sent, as lines of a file: colours are dropped, and a line that is drawn again is another."""

    def __init__(self, log: io.FileIO) -> None:
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
            _write(self._log, text)
            self._at_start = text.endswith("\n")


class Tee(io.TextIOBase):
    """A text stream whose writing is copied; everything else, ``isatty`` above all, is the original's."""

    def __init__(self, console: TextIO, copy: _Lines) -> None:
        self._console, self._copy = console, copy

    def write(self, text: str) -> int:
        self._copy.write(text)
        return self._console.write(text)

    def flush(self) -> None:
        self._console.flush()

    def isatty(self) -> bool:
        return self._console.isatty()

    def fileno(self) -> int:
        return self._console.fileno()

    def writable(self) -> bool:
        return True

    @property
    def rich_proxied_file(self) -> "TextIO | Tee":
        """The same copying onto the stream that rich is to write to (see ``escape_controls.Shown``)."""
        beneath = getattr(self._console, "rich_proxied_file", self._console)
        return self if beneath is self._console else Tee(beneath, self._copy)

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typeshed has an attribute, which is None in TextIOBase
        return self._console.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._console.errors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._console, name)
