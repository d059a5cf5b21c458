"""Text files, each of which is one document, and JSON lines, of which one key holds a document; plain or compressed.

    all other files --decoded--> one document, or why it is no text
    .jsonl, .ndjson, .json and the like (.gz, .zst) --lines--> documents
                                                    --bytes--> ranges, with the lines that begin in them; plain only

A compressed file of text longer than ``MAX_TEXT_BYTES`` is a bad row, so that memory is bounded. A plain one has no
limit, because its owner sees its size.
"""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hlat.data.documents import Content
from hlat.data.formats.base import WHOLE_FILE, FileFormat, FileRange, RecordsFormat, byte_ranges
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
    Record,
    Stream,
    describe_expansion,
    is_compressed,
    iter_lines,
    open_decompressed,
)
from hlat.runtime.errors import DataError
from hlat.runtime.storage.local_files import recognize, recognize_escaped
from hlat.runtime.terminal import escape_name

MAX_TEXT_BYTES = 1 << 30  # maximum size in bytes of a compressed text file after decompression
_READ_BYTES = 1 << 20
_CHECKED_BYTES = 1 << 16
_MARK = BOM.decode()
_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes of a character of UTF-8 after its first one


class TextFormat(FileFormat):
    """Text files: all files with an ending that no other format has."""

    kind = "text"
    compressible = True
    is_one_document = True

    def check(self, path: Path) -> None:
        # Only the compression: an empty file is an empty document, other content a bad row.
        self.read_head(path)

    def bad_beginning(self, path: Path) -> RowError | None:
        with convert_file_errors(path, self.kind), path.open("rb") as raw:
            content = self.open_checked(path, raw).read(_CHECKED_BYTES)
        if len(content) == _CHECKED_BYTES:  # the last character may be cut
            content = content.rstrip(_CONTINUATION)[:-1]
        found = _decode(content)
        return found if isinstance(found, RowError) else None

    def _read(self, file: InputFile, start: int) -> Iterator[Row]:
        # The file is row 0, so a restart after it has nothing to read.
        if start > 0:
            return
        with file.path.open("rb") as raw:
            content = _read_content(file.path, raw)
        text = content if isinstance(content, RowError) else _decode(content)
        yield make_row(0, text, file.path.stat().st_size)

    def address(self, row: int, line: int | None, position: int) -> str:
        return ""


_CONVERT = (
    "Convert the file to UTF-8 from the encoding that it has (`file -i FILE` and `uchardet FILE` guess it): "
    "iconv -f ENCODING -t UTF-8 FILE > NEW"
)
_CUT = "The file was cut inside of its last character: fetch or write it again, or remove these bytes."
_PERHAPS_CUT = "Or the file was cut inside of its last character: then fetch or write it again."
_JSON_LINES = "Give it the ending .jsonl. Text that is meant to be such lines goes into a column of jsonl or parquet."


def _read_content(file: Path, raw: io.BufferedReader) -> bytes | bytearray | RowError:
    stream = open_decompressed(file, raw)
    if stream is raw:
        return raw.read()
    content = bytearray()
    # Chunk by chunk, since the size of what a small compressed file expands to is not known before.
    while chunk := stream.read(_READ_BYTES):
        content += chunk
        if len(content) > MAX_TEXT_BYTES:
            reason = f"more than {MAX_TEXT_BYTES:,} bytes of text: {describe_expansion(raw, len(content))}"
            return RowError(
                None, reason, "Cut it into several files, or decompress it first: plain files have no limit."
            )
    return content


def _decode(content: bytes | bytearray) -> str | RowError:
    """Decode UTF-8, without byte order marks; return an error for other content and for text with NUL bytes."""
    glob = "name the text files with a glob such as folder/**/*.txt."
    # Bytes of another kind of file are named before "invalid UTF-8" is said of them. Markup is text.
    found = recognize(content)
    if found is None or found.is_markup:
        found = recognize_escaped(content) or found
    if found is not None and not found.is_markup:
        return RowError(None, f"this is {found.what}", f"{found.remedy} If it is no part of the corpus, {glob}")
    if _is_json_lines(content):
        return RowError(None, "lines of JSON objects, which would be one document of raw JSON", _JSON_LINES)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        reason = f"invalid UTF-8 at byte {error.start} ({error.reason})"
        before, rest = content[: error.start], content[error.start :]
        if error.reason != "unexpected end of data" or before.isascii():
            return RowError(None, reason, f"{_CONVERT}; if it is not text, {glob}")
        # UTF-8 until there. But letters of Latin-1, such as \xe9, are bytes that begin a longer character in UTF-8: one
        # that is alone, after shorter characters only, may be such a letter.
        kind = rest[0] & 0xF0
        is_alike = len(rest) > 1 or any(byte in before for byte in range(kind, kind + 16))
        return RowError(None, reason, _CUT if is_alike else f"{_CONVERT}. {_PERHAPS_CUT}")
    if "\0" in text:
        reason = f"a zero byte (NUL) at byte {content.index(0)}: this is not text"
        return RowError(None, reason, f"If it is meant to be text, remove the byte; if not, {glob}")
    return text.removeprefix(_MARK).replace(f"\n{_MARK}", "\n") if _MARK in text else text


def _is_json_lines(content: bytes | bytearray) -> bool:
    """Return True if the first two lines are JSON objects with the same keys."""
    if content[: len(BOM) + 1].lstrip(BOM)[:1] != b"{":
        return False
    lines = bytes(content[:_CHECKED_BYTES]).removeprefix(BOM).split(b"\n", 2)[:2]
    try:
        first, second = map(json.loads, lines)
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and isinstance(second, dict) and bool(first) and first.keys() == second.keys()


_NAMED = 20  # keys that a message lists
_LIST = (
    "Each line must be one JSON object: jq -c '.[]' FILE > NEW.jsonl writes the elements of a list so, '.FIELD[]' "
    "those of a list in a field, and '.' objects of several lines."
)
_CUT_JSON = "It has no end, so it was cut: fetch or write it again, best with one JSON object per line."
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
            raise DataError(f"{path}: {what}. {_CUT_JSON if _is_cut(path) else _LIST}")

    def records(self, stream: Stream, offset: int = 0) -> Iterator[Record]:
        return iter_lines(stream, offset)

    def plain_ranges(self, file: InputFile, size: int) -> Iterator[FileRange]:
        return byte_ranges(file.path.stat().st_size, size)

    def remote_ranges(self, path: Path, total: int, size: int) -> Iterator[FileRange]:
        # Ranges of a plain file are found without a look at the content.
        return byte_ranges(total, size) if path.suffix.lower() in self.endings else iter((WHOLE_FILE,))

    def content(self, record: Record, file: InputFile, begun: None, line: int | None) -> Content | RowError | None:
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
