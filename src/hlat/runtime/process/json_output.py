"""Standard output and standard error of this process and its children, as JSON lines.

    hlat's messages and events --json_line--> descriptors 1, 2 --pipes--> helper (``json_lines``) --> original streams
    tracebacks, libraries, C++ -------------------^

Descriptors are redirected, so that the guarantee holds for whatever a process prints, and whichever process it is.
"""

import atexit
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from hlat.runtime.process.json_lines import format_line
from hlat.runtime.urls import redact, redact_json

_MARK = "HLAT_JSON_LINES"
"""Environment variable of the processes whose streams are converted."""

_HELPER = Path(__file__).with_name("json_lines.py")
_ENDING = 5.0  # seconds for the helper to write the last lines; a child may have inherited its pipes and live on


def json_line(
    event: str,
    message: str,
    *,
    level: str = "info",
    rank: int | None = None,
    step: int | None = None,
    values: Mapping[str, Any] | None = None,
) -> str:
    """Return a log line, without credentials in URLs; see ``json_lines.format_line`` for the arguments."""
    return format_line(event, redact(message), level=level, rank=rank, step=step, values=redact_json(values or {}))


def prints_json() -> bool:
    """Return True if the streams of this process are converted to JSON lines."""
    return _MARK in os.environ


def print_json_lines() -> None:
    """Convert everything that this process and its children print from now on; no effect if that is done already."""
    if prints_json():
        return
    _flush()
    saved = [os.dup(descriptor) for descriptor in (1, 2)]
    pipes = [os.pipe(), os.pipe()]
    sources = [reads for reads, _ in pipes]
    helper = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_HELPER), *map(str, sources)],
        pass_fds=sources,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a terminal's Ctrl-C is for the run
    )
    for descriptor, (reads, writes) in enumerate(pipes, 1):
        os.dup2(writes, descriptor)
        os.close(reads)
        os.close(writes)
    os.environ[_MARK] = "1"
    sys.excepthook = _report_exception
    atexit.register(_restore, os.getpid(), saved, helper)


def _restore(owner: int, saved: list[int], helper: "subprocess.Popen[bytes]") -> None:
    """Give the streams back, and wait until the helper has written the last lines."""
    if os.getpid() != owner:  # a forked child
        return
    _flush()
    for descriptor, original in enumerate(saved, 1):
        os.dup2(original, descriptor)
    with suppress(subprocess.TimeoutExpired):
        helper.wait(_ENDING)


def _report_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception that nobody has caught as one line."""
    text = "".join(traceback.format_exception(kind, error, trace)).rstrip()
    sys.stderr.write(json_line("output", text, level="error", values={"stream": "stderr"}) + "\n")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
