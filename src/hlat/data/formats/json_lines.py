"""Read JSON lines, plain or compressed, and text files, as rows.

Memory is bounded: a line longer than ``MAX_LINE_BYTES``, or a compressed text file longer than ``MAX_TEXT_BYTES``, is a
bad row. A plain text file has no limit, because its owner sees its size.
"""

import io
import json
from collections.abc import Iterator
from pathlib import Path

from hlat.data.formats.decompression import describe_expansion, open_decompressed
from hlat.data.formats.line_reading import MAX_LINE_BYTES, iter_lines, skip_line
from hlat.data.formats.records import SET_TEXT_COLUMN, Row, RowError, convert_file_errors, make_row, missing_column

MAX_TEXT_BYTES = 1 << 30
"""Maximum size in bytes of a compressed text file after decompression."""
_READ_BYTES = 1 << 20


def read_json(file: Path, column: str, start: int) -> Iterator[Row]:
    """Read the documents of a jsonl file from row ``start`` on; errors of the libraries are passed on."""
    with file.open("rb") as raw:
        stream = open_decompressed(file, raw)
        for row, line in enumerate(iter_lines(stream)):
            if row >= start:
                if line.is_too_long:
                    expansion = "" if stream is raw else f": {describe_expansion(raw, line.end)}"
                    yield make_row(row, _too_long(line.number, expansion), raw.tell())
                else:
                    yield make_row(row, _json_text(line.content, column, line.number, line.offset), raw.tell())


def read_lines(file: Path, column: str, start: int, stop: int) -> Iterator[Row]:
    """Read the documents of a plain jsonl file whose lines begin in the bytes ``start <= byte < stop``.

    Rows are numbered from 0, beginning with the first of these lines.

    Raises:
        DataError: see ``read_documents``.
    """
    with convert_file_errors(file), file.open("rb") as raw:
        if start > 0:  # the line that contains byte ``start - 1`` begins before ``start``
            raw.seek(start - 1)
            skip_line(raw)
        for row, line in enumerate(iter_lines(raw, offset=raw.tell())):
            if line.offset >= stop:
                return
            text = _too_long(None, "") if line.is_too_long else _json_text(line.content, column, None, line.offset)
            yield make_row(row, text, raw.tell())


def _too_long(number: int | None, expansion: str) -> RowError:
    reason = f"a line of more than {MAX_LINE_BYTES:,} bytes{expansion}"
    return RowError(number, reason, "A document may not be longer: cut it into several, one per line.")


def _json_text(line: bytes, column: str, number: int | None, offset: int) -> str | RowError | None:
    """Return the text of a line, or why it is a bad row.

    Args:
        line: the bytes of the line.
        column: key of the text.
        number: line number in the file, from 1; None if unknown.
        offset: byte of the file at which the line begins.
    """
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return RowError(
            number, f"invalid UTF-8 at byte {offset + error.start} ({error.reason})", "Repair or remove the line."
        )
    except (ValueError, RecursionError) as error:
        no_end = "" if line.endswith(b"\n") else ". The line does not end with a newline: the file may be truncated"
        return RowError(number, f"invalid JSON: {error}{no_end}", "Each line must be one JSON object.")
    if not isinstance(record, dict):
        remedy = f"Each line must be an object with the key {column!r}."
        return RowError(number, f"a JSON {type(record).__name__}, not an object", remedy)
    if column not in record:
        return RowError(number, missing_column(column, list(record)), SET_TEXT_COLUMN)
    text = record[column]
    if text is not None and not isinstance(text, str):
        remedy = "Set data.text_column to a key of strings."
        return RowError(number, f"{column!r} holds {_json_type(text)}, not text", remedy)
    return _lone_surrogate(text, number) or text if text else text


def _lone_surrogate(text: str, number: int | None) -> RowError | None:
    """Return an error if a text contains half of a surrogate pair, which JSON can spell but UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"character {error.start} is half of a surrogate pair (U+{ord(text[error.start]):04X})"
        return RowError(number, f"{half}, which is not text", "Repair or remove the line.")
    return None


def _json_type(value: object) -> str:
    return {dict: "an object", list: "a list", bool: "a boolean"}.get(type(value), "a number")


def read_text(file: Path, column: str, start: int) -> Iterator[Row]:
    """Read a text file as one document, row 0; ``column`` is ignored. Nothing is read if ``start`` > 0."""
    del column
    if start > 0:
        return
    with file.open("rb") as raw:
        content = _read_content(file, raw)
    text = content if isinstance(content, RowError) else _decode(content)
    yield make_row(0, text, file.stat().st_size)


def _read_content(file: Path, raw: io.BufferedReader) -> bytes | bytearray | RowError:
    """Read a text file; return an error for a compressed one with more than ``MAX_TEXT_BYTES``."""
    stream = open_decompressed(file, raw)
    if stream is raw:
        return raw.read()
    content = bytearray()
    while chunk := stream.read(_READ_BYTES):
        content += chunk
        if len(content) > MAX_TEXT_BYTES:
            reason = f"more than {MAX_TEXT_BYTES:,} bytes of text: {describe_expansion(raw, len(content))}"
            return RowError(
                None, reason, "Cut it into several files, or decompress it first: plain files have no limit."
            )
    return content


def _decode(content: bytes | bytearray) -> str | RowError:
    """Decode UTF-8; return an error for other bytes and for text with NUL bytes."""
    glob = "name the text files with a glob such as folder/**/*.txt."
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        reason = f"invalid UTF-8 at byte {error.start} ({error.reason})"
        return RowError(None, reason, f"Convert the file to UTF-8; if it is not text, {glob}")
    if "\0" in text:
        reason = f"a zero byte (NUL) at byte {content.index(0)}: this is not text"
        return RowError(None, reason, f"If it is meant to be text, remove the byte; if not, {glob}")
    return text
