"""Lines of JSON, plain or compressed, and files that are one text -> rows.

Memory is bounded: a line, or the text of a compressed file, that is longer than a document may be is a row that cannot
be read. A plain text file may be as long as it is, for its owner sees its size.
"""

import io
import json
from collections.abc import Iterator
from pathlib import Path

from hlat.data.formats.decompression import describe_expansion, open_decompressed
from hlat.data.formats.line_reading import MAX_LINE_BYTES, iter_lines, skip_line
from hlat.data.formats.records import SET_TEXT_COLUMN, Row, RowError, convert_file_errors, make_row, missing_column

MAX_TEXT_BYTES = 1 << 30
"""Bytes of a compressed text file, decompressed."""
_STEP = 1 << 20


def read_json(file: Path, column: str, start: int) -> Iterator[Row]:
    """The documents of a jsonl file from row ``start`` on; raises what the libraries do."""
    with file.open("rb") as raw:
        stream = open_decompressed(file, raw)
        for row, line in enumerate(iter_lines(stream)):
            if row >= start:
                if line.is_too_long:
                    packed = "" if stream is raw else f": {describe_expansion(raw, line.end)}"
                    yield make_row(row, _too_long(line.number, packed), raw.tell())
                else:
                    yield make_row(row, _json_text(line.content, column, line.number, line.offset), raw.tell())


def read_lines(file: Path, column: str, start: int, stop: int) -> Iterator[Row]:
    """The documents of a plain jsonl file whose lines begin at a byte ``start <= byte < stop``; rows count from 0.

    Raises:
        DataError: as ``read_documents``.
    """
    with convert_file_errors(file), file.open("rb") as raw:
        if start > 0:  # the line that the byte before ``start`` is of begins before
            raw.seek(start - 1)
            skip_line(raw)
        for row, line in enumerate(iter_lines(raw, offset=raw.tell())):
            if line.offset >= stop:
                return
            text = _too_long(None, "") if line.is_too_long else _json_text(line.content, column, None, line.offset)
            yield make_row(row, text, raw.tell())


def _too_long(number: int | None, packed: str) -> RowError:
    reason = f"a line of more than {MAX_LINE_BYTES:,} bytes{packed}"
    return RowError(number, reason, "A document may not be longer: cut it into several, a line each.")


def _json_text(line: bytes, column: str, number: int | None, offset: int) -> str | RowError | None:
    """The text of a line: the ``number``-th of its file, where that is known; it begins at byte ``offset``."""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return RowError(
            number, f"invalid UTF-8 at byte {offset + error.start} ({error.reason})", "Repair or remove the line."
        )
    except (ValueError, RecursionError) as error:
        cut = "" if line.endswith(b"\n") else ". The line has no end: the file may be truncated"
        return RowError(number, f"invalid JSON: {error}{cut}", "Each line must be one JSON object.")
    if not isinstance(record, dict):
        remedy = f"Each line must be an object with the key {column!r}."
        return RowError(number, f"a JSON {type(record).__name__}, not an object", remedy)
    if column not in record:
        return RowError(number, missing_column(column, list(record)), SET_TEXT_COLUMN)
    text = record[column]
    if text is not None and not isinstance(text, str):
        remedy = "Set data.text_column to a key of strings."
        return RowError(number, f"{column!r} holds {_json_type(text)}, not text", remedy)
    return _half_surrogate(text, number) or text if text else text


def _half_surrogate(text: str, number: int | None) -> RowError | None:
    """JSON can spell half of a surrogate pair, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"character {error.start} is half of a surrogate pair (U+{ord(text[error.start]):04X})"
        return RowError(number, f"{half}, which is not text", "Repair or remove the line.")
    return None


def _json_type(value: object) -> str:
    return {dict: "an object", list: "a list", bool: "a boolean"}.get(type(value), "a number")


def read_text(file: Path, column: str, start: int) -> Iterator[Row]:
    """The one document of a text file, if ``start`` is 0; it has no columns."""
    del column
    if start > 0:
        return
    with file.open("rb") as raw:
        content = _content(file, raw)
    text = content if isinstance(content, RowError) else _decoded(content)
    yield make_row(0, text, file.stat().st_size)


def _content(file: Path, raw: io.BufferedReader) -> bytes | bytearray | RowError:
    """All bytes of a text; of a compressed one no more than a text may have."""
    stream = open_decompressed(file, raw)
    if stream is raw:
        return raw.read()
    content = bytearray()
    while part := stream.read(_STEP):
        content += part
        if len(content) > MAX_TEXT_BYTES:
            reason = f"more than {MAX_TEXT_BYTES:,} bytes of text: {describe_expansion(raw, len(content))}"
            return RowError(
                None, reason, "Cut it into several files, or decompress it first: plain files have no limit."
            )
    return content


def _decoded(content: bytes | bytearray) -> str | RowError:
    glob = "name the text files with a glob such as folder/**/*.txt."
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        reason = f"invalid UTF-8 at byte {error.start} ({error.reason})"
        return RowError(None, reason, f"Convert the file to UTF-8; if it is not text, {glob}")
    if "\0" in text:
        reason = f"a zero byte (NUL) at byte {content.index(0)}: this is not text"
        return RowError(None, reason, f"If it is meant to be, remove the byte; if not, {glob}")
    return text
