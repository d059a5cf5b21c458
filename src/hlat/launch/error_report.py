"""How a process of a run tells why it failed: in a file, to whoever started it, rather than on the shared console.

    process: exception --write_report--> $TORCHELASTIC_ERROR_FILE --> our launcher (``read_report``), or torchrun

The file is the one that ``torch.distributed.elastic.multiprocessing.errors`` describes and torchrun reads; what it has
no field for stands under ``hlat``.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from hlat.runtime import HlatError, redact

ErrorOrigin = Literal["own", "told", "connection"]
"""Where an error began: in this process, in another that told this one, or in another that is just gone."""

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it

# What gloo says when a peer has died or closed its connections (its transport/tcp/pair.cc and buffers).
_GONE = ("closed by peer", "reset by peer", "connection refused", "broken pipe", "timed out", "timeout", "pair closure")


@dataclass(frozen=True)
class ErrorReport:
    """Why a process failed."""

    kind: ErrorOrigin
    message: str  # of an HlatError: what the user reads; of a bug: its traceback
    is_bug: bool
    exit_code: int
    time: float  # seconds since the epoch, by the clock of the process's machine
    retryable: bool = False  # see HlatError


@contextmanager
def report_errors() -> Iterator[None]:
    """End the process on an exception: with a report where somebody asked for one, on the console otherwise.

    Raises:
        SystemExit: with the error's exit code, once the report is written.
        Exception: the error itself, where nobody asked for a report or it cannot be written.
        KeyboardInterrupt: on rank 0; the others, which were interrupted with it, leave without a word.
    """
    try:
        yield
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            raise
        raise SystemExit(_INTERRUPTED) from None
    except Exception as error:
        file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if not file:
            raise
        report = describe_error(error)
        try:
            write_report(Path(file), report, type(error).__name__)
        except OSError:
            raise error from None
        raise SystemExit(report.exit_code) from error


def describe_error(error: Exception) -> ErrorReport:
    """What is reported of an exception."""
    told = isinstance(error, HlatError) and error.from_rank is not None
    kind: ErrorOrigin = "told" if told else "connection" if _lost_a_peer(error) else "own"
    if isinstance(error, HlatError):
        return ErrorReport(kind, str(error), False, error.exit_code, time.time(), error.retryable)
    text = redact("".join(traceback.format_exception(error)).rstrip())
    return ErrorReport(kind, text, is_bug=True, exit_code=1, time=time.time())


def write_report(file: Path, report: ErrorReport, name: str) -> None:
    """Write a report, whole or not at all.

    Args:
        file: where torchrun and our launcher look for it.
        report: why this process failed.
        name: the type of its exception.

    Raises:
        OSError: the file cannot be written.
    """
    # torchrun takes the earliest for the cause, and compares whole seconds: what only followed is rounded up.
    second = int(report.time) + (report.kind != "own")
    head = report.message if report.is_bug else f"{name}: {report.message}"
    message = {
        "message": head.rpartition("\n")[2] if report.is_bug else head,
        "errorCode": report.exit_code,
        "extraInfo": {"py_callstack": head, "timestamp": str(second)},
    }
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps({"message": message, "hlat": asdict(report)}), encoding="utf-8")
    partial.replace(file)


def read_report(file: Path) -> ErrorReport | None:
    """The report that a process left, or None: it was ended from outside, or before it could write one."""
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get("hlat")
    except OSError:
        return None
    return None if found is None else ErrorReport(**found)


def _lost_a_peer(error: BaseException | None) -> bool:
    """Whether an exception, or one that it came of, is what the death of another process looks like from here."""
    dist = sys.modules.get("torch.distributed")  # a process that has not imported it has no peers to lose
    while error is not None:
        if dist is not None and isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError) and "gloo" in str(error).lower():
            return any(words in str(error).lower() for words in _GONE)
        error = error.__cause__ or error.__context__
    return False
