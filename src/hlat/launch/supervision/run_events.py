"""Events that the supervisor records in the run.

an incident, a restart, a slow rank, goodput --> one line each in <run.dir>/events.jsonl

Rank 0 writes to the same file; each line is appended in one write. The file is opened and closed for every event, so
that the supervisor does not keep it open: the folder may be in use by another run until there is something to record.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hlat.launch.supervision.monitor import ObservedHang
from hlat.launch.supervision.root_cause import RunOutcome, signal_name
from hlat.resilience import Failure, HeartbeatReading, RestartDecision
from hlat.runtime.backend.faults.hang_limits import collect_dumps
from hlat.runtime.errors import StorageError
from hlat.runtime.process.rank_log import log_path
from hlat.tracking import EventLog


class RunEvents:
    """Appends to the events of a run. Errors of the disk are ignored here; the run itself reports them.

    Args:
        path: file of the events.
        is_there: returns True if the folder is still the run's; nothing is written to another folder.
        show: called with each event, kind and fields.
    """

    def __init__(
        self, path: Path, folder_is_ours: Callable[[], bool], show: Callable[[str, Mapping[str, Any]], None]
    ) -> None:
        self._path, self._folder_is_ours, self._show = path, folder_is_ours, show

    def event(self, kind: str, /, **fields: Any) -> None:
        """Record an event with the current time."""
        self._show(kind, fields)
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
        host: str,
        outcome: RunOutcome,
        beat: HeartbeatReading | None,
        observed: ObservedHang | None,
        decision: RestartDecision | None,
    ) -> None:
        """Record why an attempt ended, and the decision about a restart.

        Args:
            failure: classified failure.
            host: name of the host of the rank that failed.
            outcome: root cause and message.
            beat: last heartbeat of the rank that failed.
            observed: the hang, if it was one.
            decision: decision about the restart; None if the run had been asked to stop.
        """
        if observed is not None:
            hang = observed.hang
            self.event(
                "hang",
                rank=hang.ranks[0],
                ranks=hang.ranks,
                phase=hang.phase,
                step=hang.step,
                seconds=hang.seconds,
                why=hang.why,
                stack=observed.stack,
                stacks=None if observed.file is None else str(observed.file),
            )
        step, phase = (beat.current_step, beat.phase) if beat is not None else (None, None)
        if observed is not None:
            step, phase = observed.hang.step, observed.hang.phase
        self.event(
            "incident",
            rank=failure.rank,
            host=host,
            step=step,
            phase=phase,
            kind=failure.kind,
            cause=_cause(failure, outcome, observed),
            detail=outcome.message,
            restart=decision is not None and decision.restart,
            decision="the run had been asked to stop" if decision is None else decision.reason,
            seconds=0.0 if decision is None else decision.seconds,
            **self._dumps(),
        )

    def _dumps(self) -> dict[str, str]:
        """Collect what the ranks' libraries of collectives have written about the incident."""
        folder = collect_dumps(log_path(self._path.parent, 0).parent) if self._folder_is_ours() else None
        return {} if folder is None else {"dumps": str(folder)}


def _cause(failure: Failure, outcome: RunOutcome, observed: ObservedHang | None) -> str:
    """Cause in a few words: the signal, the last line of the exception, or the reason of the hang."""
    cause = outcome.cause
    assert cause is not None, "an incident has a cause"
    if observed is not None:
        return observed.hang.why
    if cause.report is not None:
        return cause.report.message.rpartition("\n")[2] if cause.report.is_bug else cause.report.message
    return signal_name(-cause.code) if failure.kind == "signal" else f"exit code {cause.code}"
