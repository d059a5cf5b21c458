"""A file -> its documents, one at a time, in order: parquet, arrow, jsonl (plain, .gz, .zst) and text.

Memory is bounded by one document and one record batch. Whatever is wrong with a file is a DataError that names
the file, the place and the remedy. What is wrong with one row comes out as a row without text that says so, since the
rows after it can be read; nothing is skipped silently (null texts come out as None, to be counted).
"""

import errno
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import zstandard
from pyarrow import ipc
from pyarrow import parquet as pq

from hlat.data.content import Content
from hlat.data.decompression import decompressed
from hlat.runtime import DataError

_BATCH_ROWS = 64  # small, since a row may be large

PARQUET, ARROW, JSON, TEXT, MEGATRON = "parquet", "arrow", "jsonl", "text", "megatron"
_ENDINGS = {
    ".parquet": PARQUET,
    ".pq": PARQUET,
    ".arrow": ARROW,
    ".feather": ARROW,
    ".ipc": ARROW,
    ".jsonl": JSON,
    ".ndjson": JSON,
    ".json": JSON,
    ".bin": MEGATRON,
    ".idx": MEGATRON,
}
_COMPRESSED = {".gz", ".zst"}
_REFUSED = {
    ".csv": "Convert it to parquet or jsonl, with the text in a column of its own.",
    ".tsv": "Convert it to parquet or jsonl, with the text in a column of its own.",
    ".xls": "Convert it to parquet or jsonl, with the text in a column of its own.",
    ".xlsx": "Convert it to parquet or jsonl, with the text in a column of its own.",
    ".avro": "Convert it to parquet or jsonl, with the text in a column of its own.",
    ".orc": "Convert it to parquet or jsonl, with the text in a column of its own.",
    ".sqlite": "Convert it to parquet or jsonl, with the text in a column of its own.",
    ".npy": "Of binary files of tokens those of Megatron-LM are read (.bin with its .idx); else give the text.",
    ".npz": "Of binary files of tokens those of Megatron-LM are read (.bin with its .idx); else give the text.",
    ".pt": "Of binary files of tokens those of Megatron-LM are read (.bin with its .idx); else give the text.",
    ".pkl": "Of binary files of tokens those of Megatron-LM are read (.bin with its .idx); else give the text.",
    ".safetensors": "Of binary files of tokens those of Megatron-LM are read (.bin with its .idx); else give the text.",
    ".h5": "Of binary files of tokens those of Megatron-LM are read (.bin with its .idx); else give the text.",
    ".tar": "Unpack it first.",
    ".zip": "Unpack it first.",
    ".7z": "Unpack it first.",
    ".rar": "Unpack it first.",
    ".tgz": "Unpack it first.",
    ".xz": "Unpack it first, or compress with gzip or zstd.",
    ".bz2": "Unpack it first, or compress with gzip or zstd.",
    ".lz4": "Unpack it first, or compress with gzip or zstd.",
    ".pdf": "Extract its text first.",
    ".docx": "Extract its text first.",
    ".epub": "Extract its text first.",
}


class Fault(NamedTuple):
    """Why a row cannot be read.

    Attributes:
        line: line of the file that the row is, from 1; None where rows are not lines.
        reason: what is wrong.
        remedy: what would put it right, a sentence.
    """

    line: int | None
    reason: str
    remedy: str


class Row(NamedTuple):
    """One document of a file.

    Attributes:
        row: its index in the file, from 0.
        content: the text, or tokens of a file of tokens; None where the column holds null, or where the row cannot be
            read.
        position: bytes of the file read so far, about, for progress.
        fault: why the row cannot be read; None where it can.
    """

    row: int
    content: Content | None
    position: int
    fault: Fault | None = None


def kind_of(file: Path) -> str:
    """How a file is read, from its ending; an ending that is not known is text.

    Raises:
        DataError: an ending that is known not to be text, or that is not read compressed.
    """
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
        if suffixes and _ENDINGS.get(suffixes[-1]) in (PARQUET, ARROW, MEGATRON):
            kind = _ENDINGS[suffixes[-1]]
            raise DataError(f"{file}: {kind} inside {file.suffix} is not read; decompress the file first")
    if suffixes and suffixes[-1] in _REFUSED:
        remedy = _REFUSED[suffixes[-1]]
        raise DataError(
            f"{file}: {suffixes[-1]} files are not a corpus that hlat reads. {remedy} Where it is not meant, name "
            "the files that are with a glob such as folder/**/*.txt."
        )
    return _ENDINGS.get(suffixes[-1], TEXT) if suffixes else TEXT


def read_documents(file: Path, column: str, start: int = 0) -> Iterator[Row]:
    """The documents of a file from row ``start`` on.

    Args:
        file: the file; its ending says how it is read, and that it is of text.
        column: column or key of the text; text files have none and are one document each.
        start: the first row wanted.

    Raises:
        DataError: the file is missing, empty, damaged or truncated, or has no column of text of this name. What is
            wrong with a single row is said by the row.
    """
    readers: dict[str, Callable[[Path, str, int], Iterator[Row]]]
    readers = {PARQUET: _parquet, ARROW: _arrow, JSON: _json_lines, TEXT: _whole_text}
    kind = kind_of(file)
    with _reading(file):
        if kind != TEXT and file.stat().st_size == 0:
            raise DataError(f"{file}: the file is empty (0 bytes); restore it, or leave it out of the source")
        yield from readers[kind](file, column, start)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """What reading libraries raise about a file, as DataError."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{file}: no such file") from error
    except PermissionError as error:
        raise DataError(f"{file}: permission denied; make the file readable") from error
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise _damaged(file, "the compressed data", error) from error
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise DataError(f"{file}: {error.strerror}. Raise the limit (ulimit -n), and run again.") from error
        raise _damaged(file, f"the {kind_of(file)} file", error) from error


def _damaged(file: Path, what: str, error: object) -> DataError:
    reason = str(error).strip().rstrip(".").splitlines()[0] if str(error).strip() else type(error).__name__
    return DataError(
        f"{file}: {what} cannot be read to its end: {reason}. It is truncated or damaged: "
        "fetch or write the file again."
    )


# --- columns -----------------------------------------------------------------------------------------------------


def _check_column(file: Path, schema: pa.Schema, column: str) -> None:
    if column not in schema.names:
        raise DataError(f"{file}: {_no_column(column, schema.names)}. {_ANOTHER_COLUMN}")
    kind = schema.field(column).type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(value) or pa.types.is_large_string(value) or pa.types.is_string_view(value)):
        texts = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
        raise DataError(
            f"{file}: column {column!r} holds {kind}, not text. Set data.text_column to a column of strings"
            f" ({', '.join(texts) or 'this file has none'})."
        )


_NAMES = 20  # names of columns that a message lists
_ANOTHER_COLUMN = "Set data.text_column to one of these."


def _no_column(column: str, names: list[str]) -> str:
    known = ", ".join(names[:_NAMES]).encode(errors="backslashreplace").decode()  # a key may be half a surrogate pair
    return f"no column {column!r}; it has {known or 'none'}{', ...' if len(names) > _NAMES else ''}"


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


_REPAIR_ROW = "Repair or remove the row."


def _parquet(file: Path, column: str, start: int) -> Iterator[Row]:
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
    with _reading(file), pq.ParquetFile(file) as parquet:
        return [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]


def read_group(file: Path, column: str, group: int) -> Any:
    """The text column of a row group of a parquet file, a pyarrow array, whole in memory.

    Raises:
        DataError: as ``read_documents``.
    """
    with _reading(file), pq.ParquetFile(file) as parquet:
        _check_column(file, parquet.schema_arrow, column)
        return parquet.read_row_group(group, columns=[column], use_threads=False).column(0)


def rows_of_group(file: Path, values: Any, first: int) -> Iterator[Row]:
    """The rows of a column that ``read_group`` gave, or of a slice of it, whose first row is ``first``.

    Raises:
        DataError: as ``read_documents``.
    """
    with _reading(file):
        yield from _rows(iter([values]), first, first, lambda _: 0)


def _arrow(file: Path, column: str, start: int) -> Iterator[Row]:
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


def _rows(columns: Iterator[Any], first: int, start: int, position: Callable[[int], int]) -> Iterator[Row]:
    for values in columns:
        skip = min(max(start - first, 0), len(values))
        for begin in range(skip, len(values), _BATCH_ROWS):
            for row, text in enumerate(_texts(values.slice(begin, _BATCH_ROWS)), first + begin):
                yield _row(row, text, position(row + 1))
        first += len(values)


def _row(row: int, text: str | Fault | None, position: int) -> Row:
    return Row(row, None, position, text) if isinstance(text, Fault) else Row(row, text, position)


# --- lines and text ----------------------------------------------------------------------------------------------


def _json_lines(file: Path, column: str, start: int) -> Iterator[Row]:
    row = 0
    with file.open("rb") as raw:
        stream = decompressed(file, raw)
        offset = 0
        for number, line in enumerate(stream, 1):
            if line.strip():
                if row >= start:
                    yield _row(row, _json_text(line, column, number, offset), raw.tell())
                row += 1
            offset += len(line)


def read_lines(file: Path, column: str, start: int, stop: int) -> Iterator[Row]:
    """The documents of a plain jsonl file whose lines begin at a byte ``start <= byte < stop``; rows count from 0.

    Raises:
        DataError: as ``read_documents``.
    """
    with _reading(file), file.open("rb") as raw:
        if start > 0:  # the line that the byte before ``start`` is of begins before
            raw.seek(start - 1)
            raw.readline()
        row = 0
        while (offset := raw.tell()) < stop and (line := raw.readline()):
            if line.strip():
                yield _row(row, _json_text(line, column, None, offset), raw.tell())
                row += 1


def _json_text(line: bytes, column: str, number: int | None, offset: int) -> str | Fault | None:
    """The text of a line: the ``number``-th of its file, where that is known; it begins at byte ``offset``."""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Fault(
            number, f"invalid UTF-8 at byte {offset + error.start} ({error.reason})", "Repair or remove the line."
        )
    except (ValueError, RecursionError) as error:
        cut = "" if line.endswith(b"\n") else ". The line has no end: the file may be truncated"
        return Fault(number, f"invalid JSON: {error}{cut}", "Each line must be one JSON object.")
    if not isinstance(record, dict):
        remedy = f"Each line must be an object with the key {column!r}."
        return Fault(number, f"a JSON {type(record).__name__}, not an object", remedy)
    if column not in record:
        return Fault(number, _no_column(column, list(record)), _ANOTHER_COLUMN)
    text = record[column]
    if text is not None and not isinstance(text, str):
        remedy = "Set data.text_column to a key of strings."
        return Fault(number, f"{column!r} holds {_json_type(text)}, not text", remedy)
    return _half_surrogate(text, number) or text if text else text


def _half_surrogate(text: str, number: int | None) -> Fault | None:
    """JSON can spell half of a surrogate pair, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"character {error.start} is half of a surrogate pair (U+{ord(text[error.start]):04X})"
        return Fault(number, f"{half}, which is not text", "Repair or remove the line.")
    return None


def _json_type(value: object) -> str:
    return {dict: "an object", list: "a list", bool: "a boolean"}.get(type(value), "a number")


def _whole_text(file: Path, column: str, start: int) -> Iterator[Row]:
    del column
    if start > 0:
        return
    with file.open("rb") as raw:
        content = decompressed(file, raw).read()
    yield _row(0, _decoded(content), file.stat().st_size)


def _decoded(content: bytes) -> str | Fault:
    glob = "name the text files with a glob such as folder/**/*.txt."
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        reason = f"invalid UTF-8 at byte {error.start} ({error.reason})"
        return Fault(None, reason, f"Convert the file to UTF-8; if it is not text, {glob}")
    if "\0" in text:
        reason = f"a zero byte (NUL) at byte {content.index(0)}: this is not text"
        return Fault(None, reason, f"If it is meant to be, remove the byte; if not, {glob}")
    return text
