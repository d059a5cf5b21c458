"""Split a stream of CSV into records, and a record into fields (RFC 4180), with bounded memory.

    lines --quotes followed--> records, of one or more lines --> fields

A record ends at a line feed outside of quotes, so where it ends depends on all quotes before it. A field is quoted if
it begins with a quote; a quote inside it is written twice. In a field that does not begin with a quote, quotes are
ordinary characters, as for Python's csv module and for pyarrow. Bytes are not decoded: in UTF-8 no part of another
character looks like a delimiter, a quote or a line feed.
"""

from collections.abc import Iterator
from typing import NamedTuple

from hlat.data.formats.streams.decompression import Stream
from hlat.data.formats.streams.line_reading import BOM, MAX_LINE_BYTES, skip_blank

_QUOTE = b'"'
_READ_BYTES = 1 << 16
_EMPTY_LINES = (b"", b"\n", b"\r\n")
_FIELD_START, _PLAIN, _QUOTED, _QUOTE_IN_QUOTED = range(4)


class CsvRecord(NamedTuple):
    """A record that is not an empty line.

    Attributes:
        line: number of its first line, from 1.
        offset: byte of the stream at which it begins.
        end: byte of the stream after it.
        content: its bytes with its line end; of a longer record the first ``MAX_LINE_BYTES`` + 1 bytes.
        is_closed: False if the stream ends within a quoted field of it.
    """

    line: int
    offset: int
    end: int
    content: bytes
    is_closed: bool

    @property
    def is_too_long(self) -> bool:
        """True if the record is longer than ``MAX_LINE_BYTES``; ``content`` is then only its beginning."""
        return len(self.content) > MAX_LINE_BYTES


def iter_records(stream: Stream, delimiter: bytes, offset: int = 0) -> Iterator[CsvRecord]:
    """Yield the records of a stream, the header too; a byte order mark at the beginning of one is left out.

    Args:
        stream: the stream, read from its current position, at which a record begins.
        delimiter: the byte between fields.
        offset: bytes before this position.
    """
    line, position = 1, offset
    while True:
        record = _next_record(stream, delimiter, line, position)
        if record is None:
            return
        found, lines = record
        line, position = line + lines, found.end
        if found.content in _EMPTY_LINES:
            lines, skipped = skip_blank(stream, b"\n")
            line, position = line + lines, position + skipped
        else:
            yield found


def _next_record(stream: Stream, delimiter: bytes, line: int, offset: int) -> tuple[CsvRecord, int] | None:
    """Read one record; return it and its number of lines, or None at the end of the stream."""
    quotes, pieces = _QuoteScanner(delimiter), list[bytes]()
    kept = lines = 0
    end = offset
    while piece := stream.readline(max(MAX_LINE_BYTES + 1 - kept, _READ_BYTES)):
        end += len(piece)
        if not pieces:  # also where files were joined
            piece = piece.removeprefix(BOM)
        lines += piece.endswith(b"\n")
        quotes.scan(piece)
        pieces.append(piece[: MAX_LINE_BYTES + 1 - kept])
        kept += len(pieces[-1])
        if piece.endswith(b"\n") and not quotes.is_open:
            break
    if end == offset:
        return None
    return CsvRecord(line, offset, end, b"".join(pieces), not quotes.is_open), lines


class _QuoteScanner:
    """Follows the quotes of a record, in pieces cut anywhere.

    Args:
        delimiter: the byte between fields.
    """

    def __init__(self, delimiter: bytes) -> None:
        self._delimiter, self._state = delimiter, _FIELD_START

    @property
    def is_open(self) -> bool:
        """True if the pieces so far end within a quoted field."""
        return self._state == _QUOTED

    def scan(self, piece: bytes) -> None:
        """Go on to the end of a piece."""
        if not self.is_open and _QUOTE not in piece:
            self._state = _FIELD_START if piece.endswith(self._delimiter) else _PLAIN
            return
        position = 0
        while position < len(piece):
            if self._state == _QUOTED:
                position = piece.find(_QUOTE, position) + 1
                if not position:
                    return
                self._state = _QUOTE_IN_QUOTED
            elif self._state == _PLAIN:
                position = piece.find(self._delimiter, position) + 1
                if not position:
                    return
                self._state = _FIELD_START
            elif piece[position : position + 1] == _QUOTE:  # the first of a field, or the second of a pair
                self._state, position = _QUOTED, position + 1
            elif piece[position : position + 1] == self._delimiter:
                self._state, position = _FIELD_START, position + 1
            else:
                self._state = _PLAIN


def split_fields(record: bytes, delimiter: bytes) -> list[bytes]:
    """Split a record into its fields, without quotes and line end.

    Raises:
        ValueError: something follows the closing quote of a field, or a field without quotes has a carriage return.
    """
    body = record.removesuffix(b"\n").removesuffix(b"\r")
    if _QUOTE not in body:
        return _plain_fields(body, delimiter)
    fields = list[bytes]()
    position = 0
    while True:
        if body[position : position + 1] == _QUOTE:
            field, position = _quoted_field(body, position + 1)
            if body[position : position + 1] not in (b"", delimiter):
                raise ValueError(f"field {len(fields) + 1} goes on after its closing quote; a quote in it is doubled")
            fields.append(field)
        else:
            end = body.find(delimiter, position)
            end = len(body) if end < 0 else end
            fields += _plain_fields(body[position:end], delimiter)
            position = end
        if position == len(body):
            return fields
        position += 1


def _plain_fields(body: bytes, delimiter: bytes) -> list[bytes]:
    if b"\r" in body:
        raise ValueError("a carriage return outside of quotes; lines end with a line feed")
    return body.split(delimiter)


def _quoted_field(body: bytes, start: int) -> tuple[bytes, int]:
    """Return a quoted field whose content begins at ``start``, and the position after its closing quote."""
    parts, position = list[bytes](), start
    while True:
        quote = body.find(_QUOTE, position)
        assert quote >= 0, "records that are not closed are refused"
        if body[quote + 1 : quote + 2] != _QUOTE:
            return b"".join([*parts, body[position:quote]]), quote + 1
        parts.append(body[position : quote + 1])
        position = quote + 2
