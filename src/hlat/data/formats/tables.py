"""Read parquet and arrow files as rows, with memory bounded by one record batch; read complete parquet row groups."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import ipc
from pyarrow import parquet as pq

from hlat.data.formats.line_reading import MAX_LINE_BYTES
from hlat.data.formats.records import SET_TEXT_COLUMN, Row, RowError, convert_file_errors, make_row, missing_column
from hlat.runtime import DataError

_BATCH_ROWS = 64  # small, because a row may be large
_BATCH_BYTES = 1 << 26  # approximate size of a batch of rows
_REPAIR_ROW = "Repair or remove the row."


def read_parquet(file: Path, column: str, start: int) -> Iterator[Row]:
    """Read the documents of a parquet file from row ``start`` on; errors of the library are passed on."""
    size = file.stat().st_size
    with pq.ParquetFile(file) as parquet:
        _check_column(file, parquet.schema_arrow, column)
        total = max(parquet.metadata.num_rows, 1)
        first = 0
        for group in range(parquet.num_row_groups):
            rows, row_bytes = _row_group_size(parquet, column, group)
            if first + rows > start:
                batch_rows = min(max(_BATCH_BYTES // row_bytes, 1), _BATCH_ROWS)
                batches = parquet.iter_batches(batch_rows, row_groups=[group], columns=[column], use_threads=False)
                yield from _rows((b.column(0) for b in batches), first, start, lambda row: size * row // total)
            first += rows


def _row_group_size(parquet: pq.ParquetFile, column: str, group: int) -> tuple[int, int]:
    """Return the number of rows of a row group, and the average decompressed bytes of a row in the column."""
    metadata = parquet.metadata.row_group(group)
    chunks = [metadata.column(index) for index in range(metadata.num_columns)]
    total = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == column)
    return metadata.num_rows, max(total // max(metadata.num_rows, 1), 1)


def row_group_sizes(file: Path) -> list[int]:
    """Return the number of rows of each row group of a parquet file.

    Raises:
        DataError: see ``read_documents``.
    """
    with convert_file_errors(file), pq.ParquetFile(file) as parquet:
        return [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]


def read_row_group(file: Path, column: str, group: int) -> Any:
    """Read the text column of a row group of a parquet file into memory, as a pyarrow array.

    Raises:
        DataError: see ``read_documents``.
    """
    with convert_file_errors(file), pq.ParquetFile(file) as parquet:
        _check_column(file, parquet.schema_arrow, column)
        return parquet.read_row_group(group, columns=[column], use_threads=False).column(0)


def rows_of_column(file: Path, values: Any, first: int) -> Iterator[Row]:
    """Yield the rows of a column from ``read_row_group``, or of a slice of it; the first has the index ``first``.

    Raises:
        DataError: see ``read_documents``.
    """
    with convert_file_errors(file):
        yield from _rows(iter([values]), first, first, lambda _: 0)


def read_arrow(file: Path, column: str, start: int) -> Iterator[Row]:
    """Read the documents of an arrow file or stream from row ``start`` on; errors of the library are passed on."""
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
    column_type = schema.field(column).type
    value = column_type.value_type if pa.types.is_dictionary(column_type) else column_type
    if not (pa.types.is_string(value) or pa.types.is_large_string(value) or pa.types.is_string_view(value)):
        texts = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
        raise DataError(
            f"{file}: column {column!r} holds {column_type}, not text. Set data.text_column to a column of strings"
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
    """Convert a column chunk to texts: all at once if it is small and valid UTF-8, otherwise one by one."""
    max_bytes = _BATCH_BYTES // _BATCH_ROWS if pa.types.is_dictionary(values.type) else _BATCH_BYTES
    if values.nbytes > max_bytes:  # in a dictionary column, every row of the batch can refer to the largest value
        return map(_text, values)
    try:
        return list(values.to_pylist())
    except UnicodeDecodeError:
        return map(_text, values)


def _text(value: Any) -> str | RowError | None:
    """Convert one value to text; return an error for a too long one or one that is not UTF-8."""
    plain = value.value if isinstance(value, pa.DictionaryScalar) else value
    buffer = plain.as_buffer() if plain is not None and plain.is_valid else None
    if buffer is not None and buffer.size > MAX_LINE_BYTES:
        reason = f"a text of {buffer.size:,} bytes; a document may have {MAX_LINE_BYTES:,}"
        return RowError(None, reason, "Cut it into several rows.")
    try:
        text: str | None = value.as_py()
    except UnicodeDecodeError as error:
        return RowError(None, f"invalid UTF-8 at byte {error.start} of the text ({error.reason})", _REPAIR_ROW)
    return text
