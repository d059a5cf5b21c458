"""A process of a run, as its launcher sets it up: stop signals, death of the launcher, error reports, heartbeats.

    worker_context, around all that the process does
        stop signal before there is anything to save --> exit code
        launcher gone --stop_with_launcher--> SIGTERM to oneself, once --> save and stop
        exception --report_errors--> $TORCHELASTIC_ERROR_FILE --> hlat's launcher (``read_report``), or torchrun
        phases, steps --> heartbeat

A launcher that is killed (SIGKILL, out of memory) cannot forward signals, so its processes check their parent.

A failed process writes a file for its launcher instead of printing on the shared console. The file has the format of
``torch.distributed.elastic.multiprocessing.errors``, which torchrun reads; fields that this format lacks are under the
key ``hlat``.
"""

import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from hlat.resilience import HEARTBEAT_FOLDER, running_heartbeat
from hlat.runtime import errors
from hlat.runtime.errors import HlatError
from hlat.runtime.process import LAUNCHER_ENV, STOP_SIGNALS, let_output_be_lost, rank_info, stop_exit_code
from hlat.runtime.storage.local_files import write_atomic
from hlat.runtime.terminal import erase_line
from hlat.runtime.urls import redact

_PARENT_EVERY = 1.0  # seconds


def stop_with_launcher() -> None:
    """Stop this process when its launcher dies; no effect if no launcher of hlat started it."""
    launcher = os.environ.get(LAUNCHER_ENV)
    if launcher is not None:
        # Linux could send the signal itself (PR_SET_PDEATHSIG), but does so once per thread of the launcher, and a
        # second one would end the run without saving.
        threading.Thread(target=_follow_launcher, args=(int(launcher),), name="follow-launcher", daemon=True).start()


def _follow_launcher(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_PARENT_EVERY)
    if HEARTBEAT_FOLDER in os.environ:  # the launcher's folder, perhaps in memory, which it can no longer remove
        shutil.rmtree(Path(os.environ[HEARTBEAT_FOLDER]).parent, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)  # save and stop, as if a scheduler asked


ErrorOrigin = Literal["own", "forwarded", "connection", "lost"]
"""Origin of an error: "own" process; "forwarded" by another process; lost "connection" to another process.

"lost" is written by nobody: the host of the process is gone, and others say so."""

# Texts of gloo's errors after a peer died or closed its connections (its transport/tcp/pair.cc and buffers).
_LOST_PEER_TEXTS = (
    "closed by peer",
    "reset by peer",
    "connection refused",
    "broken pipe",
    "timed out",
    "timeout",
    "pair closure",
)


@dataclass(frozen=True)
class ErrorReport:
    """The reason for the failure of a process."""

    kind: ErrorOrigin
    message: str  # for an HlatError the text for the user; for a bug its traceback
    is_bug: bool  # True if the error is not an HlatError
    exit_code: int
    time: float  # seconds since the epoch, by the clock of the process's machine
    retryable: bool = False  # see HlatError
    error: str = ""  # class of the HlatError; empty for a bug
    mistake: str = ""  # class and place of a bug that the same state would raise again; empty for others


# Not RuntimeError, OSError and ImportError: what a device, a collective or a file raises may be gone the next time.
_MISTAKES = (AttributeError, TypeError, NameError, LookupError, NotImplementedError, AssertionError)


@contextmanager
def report_errors() -> Iterator[None]:
    """End the process if an exception leaves the block: with an error report if a launcher asked for one."""
    try:
        yield
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            raise
        raise SystemExit(
            stop_exit_code(signal.SIGINT)
        ) from None  # interrupted at the same time: rank 0 says so for all
    except Exception as error:
        file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if not file:
            raise
        report = describe_error(error)
        try:
            write_report(Path(file), report, type(error).__name__)
        except OSError:
            # no report, as without a launcher: the error itself is shown
            raise error from None
        raise SystemExit(report.exit_code) from error


def describe_error(error: Exception) -> ErrorReport:
    """Describe an exception for the launcher: an ``HlatError`` by its text, a bug by its traceback."""
    forwarded = isinstance(error, HlatError) and error.from_rank is not None
    kind: ErrorOrigin = "forwarded" if forwarded else "connection" if _lost_a_peer(error) else "own"
    if isinstance(error, HlatError):
        return ErrorReport(kind, str(error), False, error.exit_code, time.time(), error.retryable, type(error).__name__)
    text = redact("".join(traceback.format_exception(error)).rstrip())  # URLs in it may have secrets
    return ErrorReport(kind, text, is_bug=True, exit_code=1, time=time.time(), mistake=_mistake(error))


def write_report(file: Path, report: ErrorReport, name: str) -> None:
    """Write a report atomically, as torchrun reads it, or raise OSError; ``name`` is the exception's class."""
    # torchrun takes the earliest error as the cause, in whole seconds: consequences of other errors are rounded up.
    second = int(report.time) + (report.kind != "own")
    head = report.message if report.is_bug else f"{name}: {report.message}"
    message = {
        "message": head.rpartition("\n")[2] if report.is_bug else head,
        "errorCode": report.exit_code,
        "extraInfo": {"py_callstack": head, "timestamp": str(second)},
    }
    write_atomic(file, json.dumps({"message": message, "hlat": asdict(report)}).encode(), sync=False)


def read_report(file: Path) -> ErrorReport | None:
    """Read the report of a process; None if it left none: it was killed, or failed before it could write one."""
    with suppress(OSError):
        found = json.loads(file.read_text(encoding="utf-8")).get("hlat")
        return None if found is None else ErrorReport(**found)
    return None


def _mistake(error: BaseException) -> str:
    """Describe an exception that a mistake in a program raises, not a device, a file or another process."""
    *_, error = errors.causes(error)
    places = traceback.extract_tb(error.__traceback__)
    if not isinstance(error, _MISTAKES) or not places:
        return ""
    return f"{type(error).__name__} at {places[-1].filename}:{places[-1].lineno}"


def _lost_a_peer(error: BaseException | None) -> bool:
    """Return True if an exception, or one in its chain of causes, shows that another process died."""
    dist = sys.modules.get("torch.distributed")  # a process that has not imported it has no peers
    while error is not None:
        if dist is not None and isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError) and "gloo" in str(error).lower():
            return any(words in str(error).lower() for words in _LOST_PEER_TEXTS)
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def worker_context() -> Iterator[None]:
    """Run the block as a process of a run; without a launcher, only signals are set up.

    An exception that leaves it is reported and becomes SystemExit. LaunchError: the variables of the rank are invalid.
    """
    let_output_be_lost()
    _stop_early()
    stop_with_launcher()
    with report_errors(), running_heartbeat(rank_info().rank):
        yield


def _stop_early() -> None:
    """Exit at once on a stop signal, until training handles these signals: there is nothing to save yet."""
    for number in STOP_SIGNALS:
        # Ctrl-C raises KeyboardInterrupt. Ignored signals (nohup, a shell's background job) stay ignored.
        if number != signal.SIGINT and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _exit_before_training)


def _exit_before_training(number: int, frame: FrameType | None) -> None:
    # With a launcher, the launcher prints the message: it may have sent the signal after another rank failed.
    erase_line()
    if os.environ.get("RANK", "0") == "0" and not {LAUNCHER_ENV, "TORCHELASTIC_RUN_ID"} & os.environ.keys():
        name = signal.Signals(number).name
        with suppress(OSError):
            os.write(2, f"{name}: ended before the first step; run the same command again\n".encode())
    os._exit(stop_exit_code(number))
