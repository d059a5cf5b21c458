"""Parquet and arrow files -> rows, in memory that one record batch bounds; and row groups of parquet as a whole."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import ipc
from pyarrow import parquet as pq

from hlat.data.formats.line_reading import MAX_LINE_BYTES
from hlat.data.formats.records import SET_TEXT_COLUMN, Row, RowError, convert_file_errors, make_row, missing_column
from hlat.runtime import DataError

_BATCH_ROWS = 64  # small, since a row may be large
_BATCH_BYTES = 1 << 26  # of rows that are looked at together, about
_REPAIR_ROW = "Repair or remove the row."


def read_parquet(file: Path, column: str, start: int) -> Iterator[Row]:
    """The documents of a parquet file from row ``start`` on; raises what the library does."""
    size = file.stat().st_size
    with pq.ParquetFile(file) as parquet:
        _check_column(file, parquet.schema_arrow, column)
        total = max(parquet.metadata.num_rows, 1)
        first = 0
        for group in range(parquet.num_row_groups):
            rows, size_of_row = _size_of_group(parquet, column, group)
            if first + rows > start:
                together = min(max(_BATCH_BYTES // size_of_row, 1), _BATCH_ROWS)
                batches = parquet.iter_batches(together, row_groups=[group], columns=[column], use_threads=False)
                yield from _rows((b.column(0) for b in batches), first, start, lambda row: size * row // total)
            first += rows


def _size_of_group(parquet: pq.ParquetFile, column: str, group: int) -> tuple[int, int]:
    """Rows of a row group, and how many bytes one of them has in the column, decompressed and on average."""
    found = parquet.metadata.row_group(group)
    chunks = [found.column(index) for index in range(found.num_columns)]
    total = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == column)
    return found.num_rows, max(total // max(found.num_rows, 1), 1)


def row_group_sizes(file: Path) -> list[int]:
    """Rows of each row group of a parquet file.

    Raises:
        DataError: as ``read_documents``.
    """
    with convert_file_errors(file), pq.ParquetFile(file) as parquet:
        return [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]


def read_row_group(file: Path, column: str, group: int) -> Any:
    """The text column of a row group of a parquet file, a pyarrow array, whole in memory.

    Raises:
        DataError: as ``read_documents``.
    """
    with convert_file_errors(file), pq.ParquetFile(file) as parquet:
        _check_column(file, parquet.schema_arrow, column)
        return parquet.read_row_group(group, columns=[column], use_threads=False).column(0)


def rows_of_column(file: Path, values: Any, first: int) -> Iterator[Row]:
    """The rows of a column that ``read_group`` gave, or of a slice of it, whose first row is ``first``.

    Raises:
        DataError: as ``read_documents``.
    """
    with convert_file_errors(file):
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
        raise DataError(f"{file}: {missing_column(column, schema.names)}. {SET_TEXT_COLUMN}")
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
                yield make_row(row, text, position(row + 1))
        first += len(values)


def _texts(values: Any) -> Iterable[str | RowError | None]:
    """The values of one column chunk; only large ones and a text that is not UTF-8 make it look at them one by one."""
    most = _BATCH_BYTES // _BATCH_ROWS if pa.types.is_dictionary(values.type) else _BATCH_BYTES
    if values.nbytes > most:  # where values are numbers of others, each of these may be meant by all of them
        return map(_text, values)
    try:
        return list(values.to_pylist())
    except UnicodeDecodeError:
        return map(_text, values)


def _text(value: Any) -> str | RowError | None:
    plain = value.value if isinstance(value, pa.DictionaryScalar) else value
    buffer = plain.as_buffer() if plain is not None and plain.is_valid else None
    if buffer is not None and buffer.size > MAX_LINE_BYTES:
        reason = f"a text of {buffer.size:,} bytes, and a document may have {MAX_LINE_BYTES:,}"
        return RowError(None, reason, "Cut it into several rows.")
    try:
        text: str | None = value.as_py()
    except UnicodeDecodeError as error:
        return RowError(None, f"invalid UTF-8 at byte {error.start} of the text ({error.reason})", _REPAIR_ROW)
    return text
