"""Find the root cause of a failed run of several processes.

exit of each process --find_root_cause--> the exit code that a single process would have given, and the user's message

One failure causes others: the other ranks lose their connections, or receive the error. The user should read the first
failure that no other failure caused.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hlat.launch.supervision.wait import ProcessExit
from hlat.runtime.backend.faults.device_faults import DeviceFault, find_fault
from hlat.runtime.process.exit_codes import stop_exit_code
from hlat.runtime.process.rank_log import log_path

_BUG = 1
_TAIL = 1 << 16  # bytes at the end of a log where a device's fault is searched for


@dataclass(frozen=True)
class RunOutcome:
    """Exit code and message of a run.

    Attributes:
        exit_code: exit code of the launcher.
        message: message for the user; empty if the processes have printed everything.
        cause: exit of the process that failed first; None if the run finished or was asked to stop.
    """

    exit_code: int
    message: str = ""
    cause: ProcessExit | None = None


def find_root_cause(exits: Sequence[ProcessExit], forwarded_signals: Sequence[int], run_dir: Path) -> RunOutcome:
    """Find the reason for the end of a run.

    Args:
        exits: exits of all processes, in rank order.
        forwarded_signals: signals that asked the run to stop, in the order of arrival.
        run_dir: folder of the run, with the ranks' logs.
    """
    faults = {end.rank: fault for end in exits if end.failed and (fault := _device_fault(end, run_dir)) is not None}
    failures = sorted((end for end in exits if end.failed), key=lambda end: _order(end, faults.get(end.rank)))
    if forwarded_signals or any(end.stopped for end in exits):
        # If one rank stops early, the others lose their connection to it: that is no failure of the run.
        failures = [end for end in failures if not _is_consequence(end)]
    if failures:
        cause = failures[0]
        return RunOutcome(_exit_code(cause), _message(cause, exits, run_dir, faults.get(cause.rank)), cause)
    stopped = [_stop_code_of(end) for end in exits if end.code != 0 and (end.stopped or end.was_signalled)]
    if stopped:
        return RunOutcome(stopped[0])
    return RunOutcome(stop_exit_code(forwarded_signals[0]) if any(end.failed for end in exits) else 0)


def _is_consequence(end: ProcessExit) -> bool:
    """Return True if a failure was caused by another process, or by a signal that the launcher sent."""
    return end.was_signalled or (end.report is not None and end.report.kind in ("forwarded", "connection"))


def _device_fault(end: ProcessExit, run_dir: Path) -> DeviceFault | None:
    """Return the fault of a device that the exception of a process names, or its log if it left no report."""
    if end.was_signalled or (end.report is not None and not end.report.is_bug):
        return None
    return find_fault(end.report.message if end.report is not None else _tail(log_path(run_dir, end.rank)))


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL))
            return file.read().decode(errors="replace")
    except (OSError, ValueError):  # there is none, or it cannot be read: another error is being explained
        return ""


def _order(end: ProcessExit, fault: DeviceFault | None) -> tuple[int, float, int]:
    """Sort key: causes before their consequences, then by time, then by rank."""
    time = end.report.time if end.report is not None else end.noticed
    if end.was_signalled:
        priority = 5
    elif fault is not None:
        # A device that waited in vain for another worker says nothing about itself.
        priority = 4 if fault.is_consequence else 0
    elif end.report is not None:
        # A forwarded error repeats the cause; a lost connection says nothing about it.
        priority = {"lost": 0, "own": 1, "forwarded": 2, "connection": 4}[end.report.kind]
    elif end.code == -signal.SIGABRT:
        priority = 3  # NCCL's watchdog aborts the process when a peer is lost
    else:
        priority = 0 if end.code < 0 else 3
    return priority, time, end.rank


def _exit_code(end: ProcessExit) -> int:
    if end.report is not None:
        return end.report.exit_code
    return end.code if end.code > 0 else _BUG


def _stop_code_of(end: ProcessExit) -> int:
    return end.code if end.code > 0 else stop_exit_code(-end.code)


def _message(cause: ProcessExit, exits: Sequence[ProcessExit], run_dir: Path, fault: DeviceFault | None) -> str:
    log = log_path(run_dir, cause.rank)
    where = [f"each rank's log: {log.parent}/rank-*.log"] if _exists(log.parent) else []
    explained = [] if fault is None else [str(fault)]
    return "\n".join([_explanation(cause, exits, log), *explained, *where])


def _explanation(cause: ProcessExit, exits: Sequence[ProcessExit], log: Path) -> str:
    report = cause.report
    who = f"rank {cause.rank}" if len(exits) > 1 else "the process of the run"
    if report is not None and report.is_bug:
        return f"{who} failed:\n{report.message}"
    if report is not None:
        together = all(end.report is not None and end.report.message == report.message for end in exits)
        return f"error: {report.message}" if together else f"{who} failed: {report.message}"
    see = f"; see {log}" if _exists(log) else ""
    if cause.code < 0:
        memory = ", which the system sends when memory runs out" if -cause.code == signal.SIGKILL else ""
        return f"{who} was killed by {signal_name(-cause.code)}{memory}{see}"
    return f"{who} ended with exit code {cause.code} without an error report{see}"


def _exists(path: Path) -> bool:
    """Return True if a path exists; False if it cannot be accessed, because another error is being explained."""
    try:
        return path.exists()
    except (OSError, ValueError):  # no permission for a folder, or an invalid file name
        return False


def signal_name(number: int) -> str:
    """Name of a signal, such as ``SIGKILL``, or its number if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
