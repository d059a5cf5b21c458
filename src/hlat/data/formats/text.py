"""Text files, plain or compressed: a file is one document.

A compressed file longer than ``MAX_TEXT_BYTES`` is a bad row, so that memory is bounded. A plain file has no limit,
because its owner sees its size.
"""

import io
import json
from collections.abc import Iterator
from pathlib import Path

from hlat.data.formats.base import FileFormat
from hlat.data.formats.rows import InputFile, Row, RowError, convert_file_errors, make_row
from hlat.data.formats.streams import BOM, describe_expansion, open_decompressed
from hlat.runtime.storage.local_files import recognize, recognize_escaped

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
        del row, line, position
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
