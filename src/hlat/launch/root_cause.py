"""How a run of several processes ended, in one voice.

how each ended --judge--> the exit code that one process would have given, and what the user reads

One failure makes several: the others lose their connections, or are told. The one that the user has to read is the
first that did not come of another.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hlat.launch.wait import ProcessExit
from hlat.runtime.process import log_path, stop_exit_code

_BUG = 1


@dataclass(frozen=True)
class RunOutcome:
    """What the launcher says and ends with; ``message`` is empty where the processes have said it all.

    Attributes:
        cause: of the failure; None where the run finished or was asked to stop.
    """

    exit_code: int
    message: str = ""
    cause: ProcessExit | None = None


def find_root_cause(ends: Sequence[ProcessExit], passed_on: Sequence[int], run_dir: Path) -> RunOutcome:
    """Find what ended the run.

    Args:
        ends: how each process ended, in the order of ranks.
        passed_on: the signals that asked the run to stop, in the order in which they came.
        run_dir: where the logs of the ranks lie.
    """
    failures = sorted((end for end in ends if end.failed), key=_order)
    if passed_on or any(end.stopped for end in ends):
        # Where one stops early the others lose it: what only followed is no failure of the run.
        failures = [end for end in failures if not _followed(end)]
    if failures:
        return RunOutcome(_exit_code(failures[0]), _message(failures[0], ends, run_dir), failures[0])
    stopped = [_stopped_with(end) for end in ends if end.code != 0 and (end.stopped or end.was_told)]
    if stopped:
        return RunOutcome(stopped[0])
    return RunOutcome(stop_exit_code(passed_on[0]) if any(end.failed for end in ends) else 0)


def _followed(end: ProcessExit) -> bool:
    """Whether a failure came of another process's, or of a signal of ours."""
    return end.was_told or (end.report is not None and end.report.kind != "own")


def _order(end: ProcessExit) -> tuple[int, float, int]:
    """Sorts causes before what came of them, then by time, then by rank."""
    time = end.report.time if end.report is not None else end.noticed
    if end.was_told:
        place = 5
    elif end.report is not None:
        # A peer's error that was told is the cause itself in other words; a lost connection says nothing about it.
        place = {"own": 1, "told": 2, "connection": 4}[end.report.kind]
    elif end.code == -signal.SIGABRT:
        place = 3  # NCCL's watchdog aborts the process when a peer is lost
    else:
        place = 0 if end.code < 0 else 3
    return place, time, end.rank


def _exit_code(end: ProcessExit) -> int:
    if end.report is not None:
        return end.report.exit_code
    return end.code if end.code > 0 else _BUG


def _stopped_with(end: ProcessExit) -> int:
    return end.code if end.code > 0 else stop_exit_code(-end.code)


def _message(cause: ProcessExit, ends: Sequence[ProcessExit], run_dir: Path) -> str:
    log = log_path(run_dir, cause.rank)
    where = [f"each rank's log: {log.parent}/rank-*.log"] if _is_there(log.parent) else []
    return "\n".join([_what(cause, ends, log), *where])


def _what(cause: ProcessExit, ends: Sequence[ProcessExit], log: Path) -> str:
    report = cause.report
    who = f"rank {cause.rank}" if len(ends) > 1 else "the process of the run"
    if report is not None and report.is_bug:
        return f"{who} failed:\n{report.message}"
    if report is not None:
        together = all(end.report is not None and end.report.message == report.message for end in ends)
        return f"error: {report.message}" if together else f"{who} failed: {report.message}"
    see = f"; see {log}" if _is_there(log) else ""
    if cause.code < 0:
        memory = ", as the system does where memory runs out" if -cause.code == signal.SIGKILL else ""
        return f"{who} was ended by {signal_name(-cause.code)}{memory}{see}"
    return f"{who} ended with exit code {cause.code} and reported nothing{see}"


def _is_there(path: Path) -> bool:
    """Whether there is such a file or folder, as far as this user may know: what is explained here is another error."""
    try:
        return path.exists()
    except (OSError, ValueError):  # a folder that may not be entered, a name that no file can have
        return False


def signal_name(number: int) -> str:
    """``SIGKILL``, or the number where it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
