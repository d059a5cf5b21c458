"""Published training runs, the errors of the cost model on them, and intervals that follow from these errors."""

from hlat.planner.calibration.accuracy import prediction_errors
from hlat.planner.calibration.accuracy_report import accuracy_lines, accuracy_page
from hlat.planner.calibration.intervals import LeftOutErrors

__all__ = [
    "LeftOutErrors",
    "accuracy_lines",
    "accuracy_page",
    "prediction_errors",
]
