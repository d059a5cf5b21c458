"""Reading of one row of published runs: its columns put together as a workload of the cost model.

columns -> shape, layout, software, device -> run.read_run -> RunReading
"""

from hlat.planner.calibration.row.columns import CsvRow, RowColumns
from hlat.planner.calibration.row.run import read_run

__all__ = ["CsvRow", "RowColumns", "read_run"]
