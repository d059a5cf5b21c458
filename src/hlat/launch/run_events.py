"""What the supervisor has to tell, as events of the run.

an incident, a restart, a slow rank, the account of time --> one line each in <run.dir>/events.jsonl

Rank 0 writes into the same file; each line is appended whole. The file is opened for every event and closed again: it
is not the supervisor's to hold, and a run directory that somebody else trains in is left alone until there is something
to say.
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
    """Appends to the events of a run; a disk that refuses is passed over, for the run to notice.

    Args:
        path: of the events.
        is_there: whether the folder is the run's; nothing is written to another one.
    """

    def __init__(self, path: Path, is_there: Callable[[], bool]) -> None:
        self._path, self._is_there = path, is_there

    def event(self, kind: str, /, **fields: Any) -> None:
        """Record that something happened now."""
        if not self._is_there():
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
        verdict: RunOutcome,
        beat: Reading | None,
        seen: ObservedHang | None,
        decision: Decision | None,
    ) -> None:
        """Record what ended an attempt, and what is done about it.

        Args:
            failure, verdict: what it was.
            beat: the last sign of life of the rank where it began.
            seen: the hang, if it was one.
            decision: about the restart; None where the run had been asked to stop.
        """
        if seen is not None:
            hang = seen.hang
            self.event(
                "hang",
                rank=hang.ranks[0],
                ranks=hang.ranks,
                phase=hang.phase,
                step=hang.step,
                seconds=hang.seconds,
                why=hang.why,
                stack=seen.stack,
                stacks=None if seen.file is None else str(seen.file),
            )
        step, phase = (beat.step_at_work, beat.phase) if beat is not None else (None, None)
        if seen is not None:
            step, phase = seen.hang.step, seen.hang.phase
        self.event(
            "incident",
            rank=failure.rank,
            step=step,
            phase=phase,
            kind=failure.kind,
            cause=_cause(failure, verdict, seen),
            detail=verdict.message,
            restart=decision is not None and decision.restart,
            decision="the run had been asked to stop" if decision is None else decision.reason,
            seconds=0.0 if decision is None else decision.seconds,
        )


def _cause(failure: Failure, verdict: RunOutcome, seen: ObservedHang | None) -> str:
    """In a few words: the signal, the last line of the exception, why it hangs."""
    cause = verdict.cause
    assert cause is not None, "an incident has one"
    if seen is not None:
        return seen.hang.why
    if cause.report is not None:
        return cause.report.message.rpartition("\n")[2] if cause.report.is_bug else cause.report.message
    return signal_name(-cause.code) if failure.kind == "signal" else f"exit code {cause.code}"
