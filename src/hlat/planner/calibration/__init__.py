"""Published training runs, and the error of the cost model on them."""

from hlat.planner.calibration.accuracy import validate

__all__ = ["validate"]
