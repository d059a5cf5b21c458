"""Reading of one row of published runs: its columns put together as a workload of the cost model.

columns -> shape, layout, software, device -> run.read_run -> RunReading
"""

from published_runs.row.columns import CsvRow, RowColumns
from published_runs.row.run import read_run

__all__ = ["CsvRow", "RowColumns", "read_run"]
