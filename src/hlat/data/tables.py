"""Parquet and arrow files -> rows, in memory that one record batch bounds; and row groups of parquet as a whole."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import ipc
from pyarrow import parquet as pq

from hlat.data.records import ANOTHER_COLUMN, Fault, Row, no_column, reading, row_of
from hlat.runtime import DataError

_BATCH_ROWS = 64  # small, since a row may be large
_REPAIR_ROW = "Repair or remove the row."


def read_parquet(file: Path, column: str, start: int) -> Iterator[Row]:
    """The documents of a parquet file from row ``start`` on; raises what the library does."""
    size = file.stat().st_size
    with pq.ParquetFile(file) as parquet:
        _check_column(file, parquet.schema_arrow, column)
        total = max(parquet.metadata.num_rows, 1)
        first = 0
        for group in range(parquet.num_row_groups):
            rows = parquet.metadata.row_group(group).num_rows
            if first + rows > start:
                batches = parquet.iter_batches(_BATCH_ROWS, row_groups=[group], columns=[column], use_threads=False)
                yield from _rows((b.column(0) for b in batches), first, start, lambda row: size * row // total)
            first += rows


def group_rows(file: Path) -> list[int]:
    """Rows of each row group of a parquet file.

    Raises:
        DataError: as ``read_documents``.
    """
    with reading(file), pq.ParquetFile(file) as parquet:
        return [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]


def read_group(file: Path, column: str, group: int) -> Any:
    """The text column of a row group of a parquet file, a pyarrow array, whole in memory.

    Raises:
        DataError: as ``read_documents``.
    """
    with reading(file), pq.ParquetFile(file) as parquet:
        _check_column(file, parquet.schema_arrow, column)
        return parquet.read_row_group(group, columns=[column], use_threads=False).column(0)


def rows_of_group(file: Path, values: Any, first: int) -> Iterator[Row]:
    """The rows of a column that ``read_group`` gave, or of a slice of it, whose first row is ``first``.

    Raises:
        DataError: as ``read_documents``.
    """
    with reading(file):
        yield from _rows(iter([values]), first, first, lambda _: 0)


def read_arrow(file: Path, column: str, start: int) -> Iterator[Row]:
    """The documents of an arrow file or stream from row ``start`` on; raises what the library does."""
    size = file.stat().st_size
    with pa.memory_map(str(file)) as source:
        if source.read(6) == b"ARROW1":
            reader = ipc.open_file(source)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            source.seek(0)
            reader = ipc.open_stream(source)
            batches = iter(reader)
        _check_column(file, reader.schema, column)
        columns = (batch.column(reader.schema.get_field_index(column)) for batch in batches)
        yield from _rows(columns, 0, start, lambda _: min(source.tell(), size))


def _check_column(file: Path, schema: pa.Schema, column: str) -> None:
    if column not in schema.names:
        raise DataError(f"{file}: {no_column(column, schema.names)}. {ANOTHER_COLUMN}")
    kind = schema.field(column).type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(value) or pa.types.is_large_string(value) or pa.types.is_string_view(value)):
        texts = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
        raise DataError(
            f"{file}: column {column!r} holds {kind}, not text. Set data.text_column to a column of strings"
            f" ({', '.join(texts) or 'this file has none'})."
        )


def _rows(columns: Iterator[Any], first: int, start: int, position: Callable[[int], int]) -> Iterator[Row]:
    for values in columns:
        skip = min(max(start - first, 0), len(values))
        for begin in range(skip, len(values), _BATCH_ROWS):
            for row, text in enumerate(_texts(values.slice(begin, _BATCH_ROWS)), first + begin):
                yield row_of(row, text, position(row + 1))
        first += len(values)


def _texts(values: Any) -> list[str | Fault | None]:
    """The values of one column chunk; only a text that is not UTF-8 makes it look at them one by one."""
    try:
        return list(values.to_pylist())
    except UnicodeDecodeError:
        return [_text(value) for value in values]


def _text(value: Any) -> str | Fault | None:
    try:
        text: str | None = value.as_py()
    except UnicodeDecodeError as error:
        return Fault(None, f"invalid UTF-8 at byte {error.start} of the text ({error.reason})", _REPAIR_ROW)
    return text
