"""Records of runs."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


def metrics(run: str | Path) -> "pa.Table":
    """Read the metrics of a run, which may be in progress, as a table.

    It is a ``pyarrow.Table``: ``.to_pandas()`` makes it a pandas.DataFrame, ``polars.from_arrow(table)`` one of polars.

    Args:
        run: run folder, or its metrics.jsonl.

    Returns:
        One row per logged step, ascending; no step twice: of repeated steps (after a resume) the last line counts, and
        an incomplete last line is ignored. Columns are the keys of metrics.jsonl; those of nested values have a dot, as
        ``seconds.forward``. Values that a step does not have are null.

    Raises:
        DataError: the run has no metrics, or a line is damaged.
        StorageError: the file cannot be read.
    """
    from hlat.tracking import metrics_table

    return metrics_table(Path(run))
