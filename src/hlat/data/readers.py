"""A file -> its documents, one at a time, in order: parquet, arrow, jsonl (plain, .gz, .zst) and text.

Memory is bounded by one document and one record batch. Whatever is wrong with a file is a DataError that names
the file, the place and the remedy; nothing is skipped silently (null texts come out as None, to be counted).
"""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa
import zstandard
from pyarrow import ipc
from pyarrow import parquet as pq

from hlat.runtime import DataError

_BATCH_ROWS = 64  # small, since a row may be large
_CHUNK = 1 << 18

PARQUET, ARROW, JSON, TEXT = "parquet", "arrow", "jsonl", "text"
_ENDINGS = {
    ".parquet": PARQUET,
    ".pq": PARQUET,
    ".arrow": ARROW,
    ".feather": ARROW,
    ".ipc": ARROW,
    ".jsonl": JSON,
    ".ndjson": JSON,
    ".json": JSON,
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
    ".bin": "Binary token files are not read; give the text.",
    ".npy": "Binary token files are not read; give the text.",
    ".npz": "Binary token files are not read; give the text.",
    ".pt": "Binary token files are not read; give the text.",
    ".pkl": "Binary token files are not read; give the text.",
    ".safetensors": "Binary token files are not read; give the text.",
    ".h5": "Binary token files are not read; give the text.",
    ".idx": "Binary token files are not read; give the text.",
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


class Row(NamedTuple):
    """One document of a file.

    Attributes:
        row: its index in the file, from 0.
        text: the text; None where the column holds null.
        position: bytes of the file read so far, about, for progress.
    """

    row: int
    text: str | None
    position: int


def kind_of(file: Path) -> str:
    """How a file is read, from its ending; an ending that is not known is text.

    Raises:
        DataError: an ending that is known not to be text.
    """
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
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
        file: the file; its ending says how it is read.
        column: column or key of the text; text files have none and are one document each.
        start: the first row wanted.

    Raises:
        DataError: the file is missing, empty, damaged or truncated, has no such column, or holds no text there.
    """
    if file.suffix.lower() in _COMPRESSED and kind_of(file) in (PARQUET, ARROW):
        raise DataError(f"{file}: {kind_of(file)} inside {file.suffix} is not read; decompress the file first")
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
        raise DataError(_no_column(file, column, schema.names))
    kind = schema.field(column).type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(value) or pa.types.is_large_string(value) or pa.types.is_string_view(value)):
        texts = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
        raise DataError(
            f"{file}: column {column!r} holds {kind}, not text. Set data.text_column to a column of strings"
            f" ({', '.join(texts) or 'this file has none'})."
        )


def _no_column(file: Path | str, column: str, names: list[str]) -> str:
    return f"{file}: no column {column!r}; it has {', '.join(names) or 'none'}. Set data.text_column to one of these."


def _texts(file: Path, values: Any, first: int) -> list[str | None]:
    """The values of one column chunk; a text that is not UTF-8 is reported with its row."""
    try:
        return list(values.to_pylist())
    except UnicodeDecodeError:
        for index, value in enumerate(values):
            try:
                value.as_py()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{file}, row {first + index}: invalid UTF-8 at byte {error.start} of the text ({error.reason}). "
                    "Repair or remove the row."
                ) from error
        raise


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
                yield from _rows(file, (b.column(0) for b in batches), first, start, lambda row: size * row // total)
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


def rows_of_group(file: Path, values: Any, first: int, start: int) -> Iterator[Row]:
    """The rows of a column that ``read_group`` gave, whose first row is ``first``, from row ``start`` on.

    Raises:
        DataError: as ``read_documents``.
    """
    with _reading(file):
        yield from _rows(file, iter([values]), first, start, lambda _: 0)


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
        yield from _rows(file, columns, 0, start, lambda _: min(source.tell(), size))


def _rows(file: Path, columns: Iterator[Any], first: int, start: int, position: Callable[[int], int]) -> Iterator[Row]:
    for values in columns:
        skip = min(max(start - first, 0), len(values))
        for begin in range(skip, len(values), _BATCH_ROWS):
            texts = _texts(file, values.slice(begin, _BATCH_ROWS), first + begin)
            for row, text in enumerate(texts, first + begin):
                yield Row(row, text, position(row + 1))
        first += len(values)


# --- lines and text ----------------------------------------------------------------------------------------------


def _json_lines(file: Path, column: str, start: int) -> Iterator[Row]:
    row = 0
    with file.open("rb") as raw:
        stream = _decompressed(file, raw)
        offset = 0
        for number, line in enumerate(stream, 1):
            if line.strip():
                if row >= start:
                    where = f"{file}, line {number}"
                    yield Row(row, _json_text(where, line, column, offset, file), raw.tell())
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
                yield Row(row, _json_text(f"{file}, byte {offset}", line, column, offset, file), raw.tell())
                row += 1


def _json_text(where: str, line: bytes, column: str, offset: int, file: Path) -> str | None:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: invalid UTF-8 at byte {offset + error.start} ({error.reason}). Repair or remove the line."
        ) from error
    except (ValueError, RecursionError) as error:
        cut = "" if line.endswith(b"\n") else " The line has no end: the file may be truncated."
        raise DataError(f"{where}: invalid JSON: {error}.{cut} Each line must be one JSON object.") from error
    if not isinstance(record, dict):
        raise DataError(
            f"{where}: a JSON {type(record).__name__}, not an object. "
            f"Each line must be an object with the key {column!r}."
        )
    if column not in record:
        raise DataError(_no_column(where, column, list(record)))
    text = record[column]
    if text is not None and not isinstance(text, str):
        raise DataError(
            f"{where}: {column!r} holds {_json_type(text)}, not text. Set data.text_column to a key of strings."
        )
    return text


def _json_type(value: object) -> str:
    return {dict: "an object", list: "a list", bool: "a boolean"}.get(type(value), "a number")


def _whole_text(file: Path, column: str, start: int) -> Iterator[Row]:
    del column
    if start > 0:
        return
    with file.open("rb") as raw:
        content = _decompressed(file, raw).read()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file}: invalid UTF-8 at byte {error.start} ({error.reason}). Convert the file to UTF-8; "
            "if it is not text, name the text files with a glob such as folder/**/*.txt."
        ) from error
    if "\0" in text:
        raise DataError(
            f"{file}: a zero byte (NUL) at byte {content.index(0)}: this is not text. If it is meant to be, remove the "
            "byte; if not, name the text files with a glob such as folder/**/*.txt."
        )
    yield Row(0, text, file.stat().st_size)


def _decompressed(file: Path, raw: IO[bytes]) -> IO[bytes]:
    match file.suffix.lower():
        case ".gz":
            return gzip.open(raw)  # type: ignore[return-value]
        case ".zst":
            return io.BufferedReader(_Zstandard(raw), _CHUNK)
    return raw


class _Zstandard(io.RawIOBase):
    """The decompressed bytes of zstd frames; unlike the library's reader, it notices a frame that was cut off."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and self._refill():
            pass
        part = self._ready[: len(buffer)]
        self._ready = self._ready[len(part) :]
        buffer[: len(part)] = part
        return len(part)

    def _refill(self) -> bool:
        """Decompress some more; False at the end of the last frame."""
        compressed = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
        compressed = compressed or self._raw.read(_CHUNK // 8)
        if not compressed:
            if self._frame is not None and not self._frame.eof:
                raise EOFError("the last zstd frame has no end")
            return False
        if self._frame is None or self._frame.eof:
            self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._ready = self._frame.decompress(compressed)
        return True
