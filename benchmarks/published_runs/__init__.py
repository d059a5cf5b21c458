"""Published training runs, the errors of the cost model on them, and intervals that follow from these errors."""

from published_runs.accuracy import prediction_errors
from published_runs.accuracy_report import accuracy_lines, accuracy_page
from published_runs.intervals import LeftOutErrors

__all__ = [
    "LeftOutErrors",
    "accuracy_lines",
    "accuracy_page",
    "prediction_errors",
]
