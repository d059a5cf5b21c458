"""JSON lines, plain or compressed: one object per line, one key of which holds the document.

    .jsonl, .ndjson, .json and the like (.gz, .zst) --lines--> documents
                                                    --bytes--> ranges, with the lines that begin in them; plain only

Memory is bounded: a line longer than ``MAX_LINE_BYTES`` is a bad row.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hlat.data.documents import Content
from hlat.data.formats.base import WHOLE_FILE, FileFormat, FileRange, RangeReader, byte_ranges
from hlat.data.formats.rows import (
    TEXT_COLUMN,
    ColumnKind,
    InputFile,
    Row,
    RowError,
    convert_file_errors,
    make_row,
    missing_column,
)
from hlat.data.formats.streams import (
    BOM,
    MAX_LINE_BYTES,
    describe_expansion,
    is_compressed,
    iter_lines,
    open_decompressed,
    skip_line,
)
from hlat.runtime.errors import DataError
from hlat.runtime.terminal import escape_name

_NAMED = 20  # keys that a message lists
_LIST = (
    "Each line must be one JSON object: jq -c '.[]' FILE > NEW.jsonl writes the elements of a list so, '.FIELD[]' "
    "those of a list in a field, and '.' objects of several lines."
)
_CUT = "It has no end, so it was cut: fetch or write it again, best with one JSON object per line."
_NO_LINES = re.compile(rb"\s*(?:\[\s*\{|[\[{]\s*\n)")
_LOOKED_AT = 1 << 16  # bytes at the beginning of a file in which keys are counted
_END_BYTES = 1 << 10  # at the end of a file, more than the blank lines there
_LONG_INTEGER = 1 << 64  # stands for one that Python does not convert: neither a text nor a token id
_LENIENT = json.JSONDecoder(parse_int=lambda digits: int(digits) if len(digits) < 4000 else _LONG_INTEGER)
# Keeps keys that are there twice.
_PAIRS = json.JSONDecoder(object_pairs_hook=lambda pairs: pairs, parse_int=lambda _: 0)


class JsonLinesFormat(FileFormat):
    """JSON lines, of which one key holds the document."""

    kind = "jsonl"
    endings = (".jsonl", ".ndjson", ".json", ".jsonlines", ".jl", ".ldjson")
    compressible = True

    def __init__(self, column: ColumnKind = TEXT_COLUMN) -> None:
        self.column: ColumnKind = column

    def check_head(self, path: Path, head: bytes) -> None:
        super().check_head(path, head)
        # All lines of such a file would be bad rows: say once what it is.
        if begins := _NO_LINES.match(head.removeprefix(BOM)):
            is_list = begins[0].lstrip().startswith(b"[")
            what = "one JSON list, not lines of objects" if is_list else "JSON objects of several lines each"
            raise DataError(f"{path}: {what}. {_CUT if _is_cut(path) else _LIST}")

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
        if is_compressed(file.path):
            yield WHOLE_FILE
        else:
            yield from byte_ranges(file.path.stat().st_size, size)

    def remote_ranges(self, path: Path, total: int, size: int) -> Iterator[FileRange]:
        # A plain file: its ranges are found without a look at the content.
        if path.suffix.lower() in self.endings:
            yield from byte_ranges(total, size)
        else:
            yield WHOLE_FILE

    def range_reader(self) -> RangeReader:
        return _LineRangeReader(self)

    def bytes_of(self, file: InputFile, part: FileRange) -> tuple[int, int | None] | None:
        del file
        return None if part == WHOLE_FILE else part

    def address(self, row: int, line: int | None, position: int) -> str:
        del row
        return f", the line that ends at byte {position:,}" if line is None else f", line {line}"

    def lines_in(self, file: InputFile, part: FileRange) -> Iterator[Row]:
        """Yield the lines that begin in ``start <= byte < stop`` of a plain file, numbered from 0."""
        with convert_file_errors(file.path, self.kind), file.path.open("rb") as raw:
            if part.start == 0:
                self.check(file.path)  # a file of a store is first seen here
            if part.start > 0:  # the line that contains byte ``start - 1`` begins before ``start``
                raw.seek(part.start - 1)
                skip_line(raw)
            # So each line is in exactly one range: that of its first byte.
            for row, line in enumerate(iter_lines(raw, offset=raw.tell())):
                if line.offset >= part.stop:
                    return
                long = line.is_too_long
                content = _too_long(None, "") if long else self._content(line.content, file, None, line.offset)
                yield make_row(row, content, raw.tell())

    # number: from 1, None if unknown; offset: byte of the file at which the line begins
    def _content(self, line: bytes, file: InputFile, number: int | None, offset: int) -> Content | RowError | None:
        """Return the document of a line, or why it is a bad row."""
        try:
            record = _parse(line.decode())
        except UnicodeDecodeError as error:
            reason = f"invalid UTF-8 at byte {offset + error.start} ({error.reason})"
            return RowError(number, reason, "Repair or remove the line.")
        except (ValueError, RecursionError) as error:
            return _no_json(line, number, error)
        if not isinstance(record, dict):
            remedy = f"Each line must be an object with the key {file.column!r}."
            return RowError(number, f"a JSON {type(record).__name__}, not an object", remedy)
        if file.column not in record:
            return RowError(number, missing_column(file.column, list(record)), self.column.remedy)
        # A writer that repeats keys does so from its first row; to look at all would slow reading down by a fifth.
        if offset < _LOOKED_AT and (count := _count_key(line, file.column)) > 1:
            return RowError(number, f"the key {file.column!r} is there {count} times", "Keep one of them.")
        content = self.column.from_json(record[file.column], file, number)
        no_text = self.column is TEXT_COLUMN and not isinstance(record[file.column], str)
        return _naming_texts(content, record) if no_text and isinstance(content, RowError) else content


class _LineRangeReader:
    """Reads a range of bytes: the lines that begin in it, also one that goes on after it."""

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


def _parse(text: str) -> Any:
    try:
        # json.loads refuses very long integers, and the byte order marks inside joined files.
        return json.loads(text)
    except ValueError:
        return _LENIENT.decode(text.removeprefix("\ufeff"))


def _is_cut(path: Path) -> bool:
    """Return True if a plain file does not end as JSON that begins with a bracket does."""
    with path.open("rb") as raw:
        raw.seek(max(path.stat().st_size - _END_BYTES, 0))
        return not is_compressed(path) and not raw.read().rstrip().endswith((b"]", b"}"))


def _count_key(line: bytes, key: str) -> int:
    """Count how often an object has a key at its top: JSON does not say which of several values counts."""
    spellings = {json.dumps(key).encode(), json.dumps(key, ensure_ascii=False).encode(errors="surrogatepass")}
    if sum(map(line.count, spellings)) < 2:  # a search for bytes, so that nearly no line is parsed twice
        return 1
    return sum(name == key for name, _ in _PAIRS.decode(line.decode().removeprefix("\ufeff")))


def _no_json(line: bytes, number: int | None, error: Exception) -> RowError:
    if isinstance(error, RecursionError):
        return RowError(number, "JSON that is nested too deeply to be read", "Remove the row, or its nested fields.")
    if b"\0" in line:
        reason = "zero bytes, as a crash leaves where a file was growing"
        return RowError(number, reason, "Remove them, or write the file again.")
    if b"\r" in line.strip():
        remedy = "End lines with a line feed: tr '\\r' '\\n' < FILE > NEW.jsonl."
        return RowError(number, "invalid JSON: lines that end with a carriage return only", remedy)
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
