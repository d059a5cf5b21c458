"""Events that the supervisor records in the run.

an incident, a restart, a slow rank, the account of time --> one line each in <run.dir>/events.jsonl

Rank 0 writes to the same file; each line is appended in one write. The file is opened and closed for every event, so
that the supervisor does not keep it open: the folder may be in use by another run until there is something to record.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hlat.launch.monitor import ObservedHang
from hlat.launch.root_cause import RunOutcome, signal_name
from hlat.resilience import Decision, Failure, Reading
from hlat.runtime import StorageError
from hlat.tracking import EventLog


class RunEvents:
    """Appends to the events of a run. Errors of the disk are ignored here; the run itself reports them.

    Args:
        path: file of the events.
        is_there: returns True if the folder is still the run's; nothing is written to another folder.
    """

    def __init__(self, path: Path, folder_is_ours: Callable[[], bool]) -> None:
        self._path, self._folder_is_ours = path, folder_is_ours

    def event(self, kind: str, /, **fields: Any) -> None:
        """Record an event with the current time."""
        if not self._folder_is_ours():
            return
        with suppress(StorageError):
            events = EventLog(self._path)
            try:
                events.append(kind, **fields)
            finally:
                events.close()

    def incident(
        self,
        failure: Failure,
        outcome: RunOutcome,
        beat: Reading | None,
        hang_seen: ObservedHang | None,
        decision: Decision | None,
    ) -> None:
        """Record why an attempt ended, and the decision about a restart.

        Args:
            failure: classified failure.
            outcome: root cause and message.
            beat: last heartbeat of the rank that failed.
            hang_seen: the hang, if it was one.
            decision: decision about the restart; None if the run had been asked to stop.
        """
        if hang_seen is not None:
            hang = hang_seen.hang
            self.event(
                "hang",
                rank=hang.ranks[0],
                ranks=hang.ranks,
                phase=hang.phase,
                step=hang.step,
                seconds=hang.seconds,
                why=hang.why,
                stack=hang_seen.stack,
                stacks=None if hang_seen.file is None else str(hang_seen.file),
            )
        step, phase = (beat.step_at_work, beat.phase) if beat is not None else (None, None)
        if hang_seen is not None:
            step, phase = hang_seen.hang.step, hang_seen.hang.phase
        self.event(
            "incident",
            rank=failure.rank,
            step=step,
            phase=phase,
            kind=failure.kind,
            cause=_cause(failure, outcome, hang_seen),
            detail=outcome.message,
            restart=decision is not None and decision.restart,
            decision="the run had been asked to stop" if decision is None else decision.reason,
            seconds=0.0 if decision is None else decision.seconds,
        )


def _cause(failure: Failure, outcome: RunOutcome, hang_seen: ObservedHang | None) -> str:
    """Cause in a few words: the signal, the last line of the exception, or the reason of the hang."""
    cause = outcome.cause
    assert cause is not None, "an incident has a cause"
    if hang_seen is not None:
        return hang_seen.hang.why
    if cause.report is not None:
        return cause.report.message.rpartition("\n")[2] if cause.report.is_bug else cause.report.message
    return signal_name(-cause.code) if failure.kind == "signal" else f"exit code {cause.code}"
