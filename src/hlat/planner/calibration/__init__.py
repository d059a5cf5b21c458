"""Published training runs, and the errors of the cost model on them."""

from hlat.planner.calibration.accuracy import prediction_errors

__all__ = ["prediction_errors"]
