"""JSON lines, plain or compressed: one object per line, one key of which holds the document.

    .jsonl, .ndjson, .json (.gz, .zst) --lines--> documents
                                       --bytes--> ranges, with the lines that begin in them; plain files only

Memory is bounded: a line longer than ``MAX_LINE_BYTES`` is a bad row.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hlat.data.formats.base import FileFormat
from hlat.data.formats.columns import TEXT_COLUMN, ColumnKind
from hlat.data.formats.document import Content
from hlat.data.formats.ranges import WHOLE_FILE, FileRange, RangeReader, byte_ranges
from hlat.data.formats.records import InputFile, Row, RowError, convert_file_errors, make_row, missing_column
from hlat.data.formats.streams import (
    MAX_LINE_BYTES,
    describe_expansion,
    is_compressed,
    iter_lines,
    open_decompressed,
    skip_line,
)
from hlat.runtime import escape_name

_NAMED = 20  # keys that a message lists
_LIST = (
    "Each line must be one JSON object. If the file is one JSON list, write each element on a line of its own: "
    "jq -c '.[]' FILE > NEW.jsonl."
)


class JsonLinesFormat(FileFormat):
    """JSON lines.

    Args:
        column: kind of the value that holds the document.
    """

    kind = "jsonl"
    endings = (".jsonl", ".ndjson", ".json")
    compressible = True

    def __init__(self, column: ColumnKind = TEXT_COLUMN) -> None:
        self.column: ColumnKind = column

    def _read(self, file: InputFile, start: int) -> Iterator[Row]:
        with file.path.open("rb") as raw:
            stream = open_decompressed(file.path, raw)
            for row, line in enumerate(iter_lines(stream)):
                if row >= start:
                    if line.is_too_long:
                        expansion = "" if stream is raw else f": {describe_expansion(raw, line.end)}"
                        yield make_row(row, _too_long(line.number, expansion), raw.tell())
                    else:
                        yield make_row(row, self._content(line.content, file, line.number, line.offset), raw.tell())

    def ranges(self, file: InputFile, size: int) -> Iterator[FileRange]:
        """Yield ranges of bytes; a compressed file is one range."""
        if is_compressed(file.path):
            yield WHOLE_FILE
        else:
            yield from byte_ranges(file.path.stat().st_size, size)

    def remote_ranges(self, path: Path, total: int, size: int) -> Iterator[FileRange]:
        """Yield ranges of bytes, which need not be read for this; a compressed file is one range."""
        if path.suffix.lower() in self.endings:
            yield from byte_ranges(total, size)
        else:
            yield WHOLE_FILE

    def range_reader(self) -> RangeReader:
        """Return a reader of the lines that begin in a range."""
        return _LineRangeReader(self)

    def bytes_of(self, file: InputFile, part: FileRange) -> tuple[int, int | None] | None:
        """Return the range: it is one of bytes."""
        return super().bytes_of(file, part) or part

    def address(self, row: int, line: int | None, position: int) -> str:
        """Return the line of a bad row, or the byte at which it ends."""
        del row
        return f", the line that ends at byte {position:,}" if line is None else f", line {line}"

    def lines_in(self, file: InputFile, part: FileRange) -> Iterator[Row]:
        """Yield the rows of the lines that begin in the bytes ``start <= byte < stop`` of a plain file.

        Rows are numbered from 0, beginning with the first of these lines.

        Raises:
            DataError: see ``documents``.
        """
        with convert_file_errors(file.path, self.kind), file.path.open("rb") as raw:
            if part.start > 0:  # the line that contains byte ``start - 1`` begins before ``start``
                raw.seek(part.start - 1)
                skip_line(raw)
            for row, line in enumerate(iter_lines(raw, offset=raw.tell())):
                if line.offset >= part.stop:
                    return
                long = line.is_too_long
                content = _too_long(None, "") if long else self._content(line.content, file, None, line.offset)
                yield make_row(row, content, raw.tell())

    def _content(self, line: bytes, file: InputFile, number: int | None, offset: int) -> Content | RowError | None:
        """Return the document of a line, or why it is a bad row.

        Args:
            line: the bytes of the line.
            file: its file.
            number: line number in the file, from 1; None if unknown.
            offset: byte of the file at which the line begins.
        """
        try:
            record = json.loads(line.decode())
        except UnicodeDecodeError as error:
            reason = f"invalid UTF-8 at byte {offset + error.start} ({error.reason})"
            return RowError(number, reason, "Repair or remove the line.")
        except (ValueError, RecursionError) as error:
            return _no_json(line, number, offset, error)
        if not isinstance(record, dict):
            remedy = f"Each line must be an object with the key {file.column!r}."
            if offset == 0 and isinstance(record, list):
                remedy = _LIST
            return RowError(number, f"a JSON {type(record).__name__}, not an object", remedy)
        if file.column not in record:
            return RowError(number, missing_column(file.column, list(record)), self.column.remedy)
        content = self.column.from_json(record[file.column], file, number)
        no_text = self.column is TEXT_COLUMN and not isinstance(record[file.column], str)
        return _naming_texts(content, record) if no_text and isinstance(content, RowError) else content


class _LineRangeReader:
    """Reader of ranges of bytes.

    Args:
        lines: the format.
    """

    def __init__(self, lines: JsonLinesFormat) -> None:
        self._lines = lines

    def rows(self, file: InputFile, part: FileRange, row: int) -> Iterator[Row]:
        return (found for found in self._lines.lines_in(file, part) if found.row >= row)


def _naming_texts(error: RowError, record: dict[str, Any]) -> RowError:
    """Add the keys that hold text to the error of a key that does not."""
    keys = [escape_name(key) for key, value in record.items() if isinstance(value, str)][:_NAMED]
    if keys:
        return error._replace(remedy=f"{error.remedy} Here that is: {', '.join(keys)}.")
    remedy = "This row has no text: mend or remove it, or leave out a share of such rows with data.unreadable_rows."
    return error._replace(remedy=remedy)


def _no_json(line: bytes, number: int | None, offset: int, error: Exception) -> RowError:
    """Describe a line that is no JSON; the first one may begin a JSON text that is more than a line."""
    if offset == 0 and line.strip() in (b"[", b"{"):
        begins = line.strip().decode()
        return RowError(number, f"a JSON text of several lines, which begins with {begins}", _LIST)
    what = (
        f"{error.msg.removesuffix(' at')} at column {error.colno}"
        if isinstance(error, json.JSONDecodeError)
        else str(error)
    )
    no_end = "" if line.endswith(b"\n") else ". The line does not end with a newline: the file may be truncated"
    return RowError(number, f"invalid JSON: {what}{no_end}", "Each line must be one JSON object.")


def _too_long(number: int | None, expansion: str) -> RowError:
    reason = f"a line of more than {MAX_LINE_BYTES:,} bytes{expansion}"
    return RowError(number, reason, "A document may not be longer: cut it into several, one per line.")
