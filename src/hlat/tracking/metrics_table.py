"""The metrics of a run as a table, for pandas, polars and anything else that reads Arrow.

metrics.jsonl --read_records--> lines --superseded ones dropped--> one row per logged step --> pyarrow.Table
"""

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hlat.runtime import DataError, escape_controls
from hlat.tracking.jsonl import from_json_value, read_records

if TYPE_CHECKING:
    import pyarrow as pa


def metrics_table(run: Path) -> "pa.Table":
    """Read the metrics of a run, which may be in progress.

    A half-written last line is ignored. A run that resumes from an earlier step repeats steps: a line replaces all
    lines before it whose step is not smaller, since they belong to weights that the run no longer has. hlat cuts such
    lines off when it resumes; they are left in files that were concatenated or restored from a copy.

    Args:
        run: run folder, or its metrics.jsonl.

    Returns:
        One row per logged step, in ascending order. A column for each key of ``Metrics``; nested values such as
        ``seconds`` have a column per key, as in ``seconds.data``. Values that a step does not have are null; NaN and
        infinities are values.

    Raises:
        DataError: there is no such file, or a line other than the last is damaged.
        StorageError: the file cannot be read.
    """
    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise DataError(
            f"{run}: has no metrics. Give the folder of a run that has logged a step, or its metrics.jsonl."
        )
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(read_records(path), start=1):
        if type(step := line.get("step")) is not int:
            raise DataError(f"{path}: record {number} has no step. Correct or delete that line.")
        while rows and rows[-1]["step"] >= step:
            rows.pop()
        rows.append(_flat(line))
    import pyarrow as pa  # noqa: PLC0415  (a supervisor needs no tables)

    names = dict.fromkeys(["step", *(name for row in rows for name in row)])
    return pa.table({name: _column([row.get(name) for row in rows]) for name in names})


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested objects: {"seconds": {"data": 1.0}} -> {"seconds.data": 1.0}."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            number = value if type(value) is float else from_json_value(value)
            flat[sys.intern(prefix + name)] = number  # one text per column, not per line
    return flat


def _column(values: Sequence[Any]) -> "pa.Array":
    import pyarrow as pa  # noqa: PLC0415  (a supervisor needs no tables)

    kinds = set(map(type, values)) - {type(None)}
    if kinds <= {int}:
        with suppress(OverflowError):  # no step of hlat's: a damaged line, whose number is shown as it is
            return pa.array(values, pa.int64())
    if kinds <= {int, float}:
        whole = int in kinds  # pyarrow refuses integers that a double cannot hold exactly
        floats = [None if value is None else float(value) for value in values] if whole else values
        return pa.array(floats, pa.float64())
    if kinds == {bool}:
        return pa.array(values, pa.bool_())
    texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    return pa.array([None if text is None else escape_controls(text) for text in texts], pa.string())
