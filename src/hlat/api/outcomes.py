"""Errors of processes that a function of the API has started."""

from hlat.launch import RunOutcome
from hlat.runtime.errors import HlatError, error_class


def outcome_error(outcome: RunOutcome) -> HlatError:
    """Make the error of a run in other processes: of the class that ended its first failing process."""
    report = outcome.cause.report if outcome.cause is not None else None
    kind = error_class(report.error if report is not None else "", outcome.exit_code)
    return kind(outcome.message)
