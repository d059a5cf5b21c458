"""JSON lines, plain or compressed: one object per line, one key of which holds the document.

    .jsonl, .ndjson, .json and the like (.gz, .zst) --lines--> documents
                                                    --bytes--> ranges, with the lines that begin in them; plain only

A file that is one list, or objects of several lines, is told as such.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hlat.data.documents import Content
from hlat.data.formats.base import WHOLE_FILE, FileRange, RecordsFormat, byte_ranges
from hlat.data.formats.rows import TEXT_COLUMN, ColumnKind, InputFile, RowError, missing_column
from hlat.data.formats.streams import BOM, Record, Stream, is_compressed, iter_lines
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


class JsonLinesFormat(RecordsFormat):
    """JSON lines, of which one key holds the document."""

    kind = "jsonl"
    endings = (".jsonl", ".ndjson", ".json", ".jsonlines", ".jl", ".ldjson")
    row_word = record_word = "line"

    def __init__(self, column: ColumnKind = TEXT_COLUMN) -> None:
        self.column: ColumnKind = column

    def check_head(self, path: Path, head: bytes) -> None:
        super().check_head(path, head)
        # All lines of such a file would be bad rows: say once what it is.
        if begins := _NO_LINES.match(head.removeprefix(BOM)):
            is_list = begins[0].lstrip().startswith(b"[")
            what = "one JSON list, not lines of objects" if is_list else "JSON objects of several lines each"
            raise DataError(f"{path}: {what}. {_CUT if _is_cut(path) else _LIST}")

    def records(self, stream: Stream, offset: int = 0) -> Iterator[Record]:
        return iter_lines(stream, offset)

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

    def content(self, record: Record, file: InputFile, begun: None, line: int | None) -> Content | RowError | None:
        del begun
        try:
            found = _parse(record.content.decode())
        except UnicodeDecodeError as error:
            reason = f"invalid UTF-8 at byte {record.offset + error.start} ({error.reason})"
            return RowError(line, reason, "Repair or remove the line.")
        except (ValueError, RecursionError) as error:
            return _no_json(record.content, line, error)
        if not isinstance(found, dict):
            remedy = f"Each line must be an object with the key {file.column!r}."
            return RowError(line, f"a JSON {type(found).__name__}, not an object", remedy)
        if file.column not in found:
            return RowError(line, missing_column(file.column, list(found)), self.column.remedy)
        # A writer that repeats keys does so from its first row; to look at all would slow reading down by a fifth.
        if record.offset < _LOOKED_AT and (count := _count_key(record.content, file.column)) > 1:
            return RowError(line, f"the key {file.column!r} is there {count} times", "Keep one of them.")
        content = self.column.from_json(found[file.column], file, line)
        no_text = self.column is TEXT_COLUMN and not isinstance(found[file.column], str)
        return _naming_texts(content, found) if no_text and isinstance(content, RowError) else content


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
