"""The metrics of a run as a table, for pandas, polars and anything else that reads Arrow.

    metrics.jsonl --lines, superseded ones dropped--> some rows --> columns of numbers --> pyarrow.Table

Lines are converted as they are read: a million of them take 3 GB as objects of Python, and 0.2 GB as columns.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hlat.runtime.errors import DataError
from hlat.runtime.terminal_text import escape_controls
from hlat.tracking.jsonl import from_json_value, iter_records

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS = 1 << 12  # rows that are converted together


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
    table = _TableBuilder()
    for number, line in enumerate(iter_records(path), start=1):
        if type(step := line.get("step")) is not int:
            raise DataError(f"{path}: record {number} has no step. Correct or delete that line.")
        table.add(step, _flat(line))
    return table.build()


class _TableBuilder:
    """Builder of a table, which keeps finished rows as columns."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._parts: list[dict[str, pa.Array]] = []

    def add(self, step: int, row: dict[str, Any]) -> None:
        """Add a row in place of all rows whose step is not smaller."""
        while self._rows and self._rows[-1]["step"] >= step:
            self._rows.pop()
        while not self._rows and self._parts and self._last_step() >= step:
            self._rows = _rows_of(self._parts.pop())
            while self._rows and self._rows[-1]["step"] >= step:
                self._rows.pop()
        self._rows.append(row)
        if len(self._rows) == _ROWS:
            self._finish_part()

    def build(self) -> "pa.Table":
        """Return the table."""
        import pyarrow as pa  # noqa: PLC0415  (a supervisor needs no tables)

        if self._rows or not self._parts:
            self._finish_part()
        names = dict.fromkeys(["step", *(name for part in self._parts for name in part)])
        return pa.table({name: self._column(name) for name in names})

    def _last_step(self) -> int:
        return int(self._parts[-1]["step"][-1].as_py())

    def _finish_part(self) -> None:
        names = dict.fromkeys(["step", *(name for row in self._rows for name in row)])
        self._parts.append({name: _column([row.get(name) for row in self._rows]) for name in names})
        self._rows = []

    def _column(self, name: str) -> "pa.ChunkedArray":
        """Join a column of all parts, in the narrowest type that holds it."""
        import pyarrow as pa  # noqa: PLC0415  (a supervisor needs no tables)

        parts = [part.get(name) for part in self._parts]
        known = {part.type for part in parts if part is not None and part.null_count < len(part)}
        if known == {pa.int64(), pa.float64()}:
            known = {pa.float64()}
        wanted = pa.int64() if not known else known.pop() if len(known) == 1 else pa.string()
        lengths = [len(part["step"]) for part in self._parts]
        return pa.chunked_array(
            [_cast(part, wanted, length) for part, length in zip(parts, lengths, strict=True)], wanted
        )


def _rows_of(part: "dict[str, pa.Array]") -> list[dict[str, Any]]:
    """Return the rows of finished columns, without the nulls."""
    columns = {name: column.to_pylist() for name, column in part.items()}
    return [
        {name: values[index] for name, values in columns.items() if values[index] is not None}
        for index in range(len(columns["step"]))
    ]


def _cast(part: "pa.Array | None", wanted: "pa.DataType", length: int) -> "pa.Array":
    import pyarrow as pa  # noqa: PLC0415  (a supervisor needs no tables)

    if part is None or part.null_count == len(part):
        return pa.nulls(length, wanted)
    if pa.types.is_string(wanted) and not pa.types.is_string(part.type):
        texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in part.to_pylist()]
        return pa.array(texts, wanted)
    return part.cast(wanted, safe=False)


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
