"""Tables as text: comma- and tab-separated values, plain or compressed, with the names of the columns in the first row.

    .csv, .tsv (.gz, .zst) --lines--> --quotes followed--> records, of one or more lines --> fields --> documents
                           --records--> ranges of bytes, each from the beginning of a record; plain files only

A record ends at a line feed outside of quotes, which is only known from all quotes before it (RFC 4180). So ranges are
found by reading the file once, and are not found for files that are not fetched.

A field is quoted if it begins with a quote; a quote inside it is written twice. In other fields quotes are ordinary
characters, as for Python's csv module and for pyarrow. Fields are text: an empty one is an empty document, and none is
null.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

from hlat.data.formats.base import FileRange, RecordsFormat
from hlat.data.formats.rows import TEXT_COLUMN, InputFile, RowError, check_names
from hlat.data.formats.streams import BOM, MAX_LINE_BYTES, Record, Stream, skip_blank
from hlat.runtime.errors import DataError
from hlat.runtime.storage.local_files import recognize_escaped

_QUOTE = b'"'
_READ_BYTES = 1 << 16
_EMPTY_LINES = (b"", b"\n", b"\r\n")
_FIELD_START, _PLAIN, _QUOTED, _QUOTE_IN_QUOTED = range(4)


def iter_records(stream: Stream, delimiter: bytes, offset: int = 0) -> Iterator[Record]:
    """Yield the records from the stream's position on, header included; ``offset`` bytes precede it."""
    line, position = 1, offset
    while (record := _next_record(stream, delimiter, line, position)) is not None:
        found, lines = record
        line, position = line + lines, found.end
        if found.content in _EMPTY_LINES:
            lines, skipped = skip_blank(stream, b"\n")  # many at a time: a file may end with gigabytes of empty lines
            line, position = line + lines, position + skipped
        else:
            yield found


def _next_record(stream: Stream, delimiter: bytes, line: int, offset: int) -> tuple[Record, int] | None:
    """Return one record and its number of lines; None at the end of the stream."""
    state, pieces = _FIELD_START, list[bytes]()
    kept = lines = 0
    end = offset
    # Once enough is kept of a record that is too long, the rest is read in small pieces and dropped.
    while piece := stream.readline(max(MAX_LINE_BYTES + 1 - kept, _READ_BYTES)):
        end += len(piece)
        if not pieces:  # also where files were joined
            piece = piece.removeprefix(BOM)
        lines += piece.endswith(b"\n")
        state = _follow_quotes(piece, delimiter, state)
        pieces.append(piece[: MAX_LINE_BYTES + 1 - kept])
        kept += len(pieces[-1])
        if piece.endswith(b"\n") and state != _QUOTED:
            break
    if end == offset:
        return None
    return Record(line, offset, end, b"".join(pieces), state != _QUOTED), lines


def _follow_quotes(piece: bytes, delimiter: bytes, state: int) -> int:
    """Follow the quotes of a record, in pieces that are cut anywhere; return the state after a piece."""
    if state != _QUOTED and _QUOTE not in piece:  # the common case, without a loop over fields
        return _FIELD_START if piece.endswith(delimiter) else _PLAIN
    position = 0
    while position < len(piece):
        if state in (_QUOTED, _PLAIN):
            position = piece.find(_QUOTE if state == _QUOTED else delimiter, position) + 1
            if not position:
                return state
            state = _QUOTE_IN_QUOTED if state == _QUOTED else _FIELD_START
        elif piece[position : position + 1] == _QUOTE:  # the first of a field, or the second of a pair
            state, position = _QUOTED, position + 1
        elif piece[position : position + 1] == delimiter:
            state, position = _FIELD_START, position + 1
        else:
            state = _PLAIN
    return state


def split_fields(record: bytes, delimiter: bytes) -> list[bytes]:
    """Return the fields without quotes and line end; ValueError if a quote or carriage return is misplaced."""
    # Bytes are enough: in UTF-8 no part of another character looks like a delimiter, a quote or a line feed.
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
    """Return the quoted field whose content begins at ``start``, and the position after its closing quote."""
    parts, position = list[bytes](), start
    while True:
        quote = body.find(_QUOTE, position)
        assert quote >= 0, "records that are not closed are refused"
        if body[quote + 1 : quote + 2] != _QUOTE:
            return b"".join([*parts, body[position:quote]]), quote + 1
        parts.append(body[position : quote + 1])
        position = quote + 2


_REPAIR = "Repair or remove the row."
_TEXT_UTF8 = "Write the file as UTF-8 with a header row."
_LINE_ENDS = "End lines with a line feed: tr '\\r' '\\n' < FILE > NEW, unless line ends in quotes are to stay."
_JOINED = "the names of the columns again, as where files were joined"
_REMOVE_HEADERS = "Keep these files apart, or remove such rows."
_DIVIDE = "They are in another order, as are the rows that follow: make each of these files a file of its own."
_TWO_NAMES = "Remove the row. If the rows that follow are in this order too, make them a file of their own."


class _Header(NamedTuple):
    """The first row of a file."""

    names: list[bytes]  # of its fields
    text: int  # field of the text


def _no_text(fields: list[bytes], header: _Header, path: Path, line: int | None) -> RowError | None:
    """Return why a row is no row of the table, or its text not meant as it is; None if all is well.

    Raises:
        DataError: the rows that follow have the columns in another order, so that all of their texts would be wrong.
    """
    if len(fields) != len(header.names):
        reason = f"a row of {len(fields)} fields, but the header has {len(header.names)}"
        return RowError(line, reason, "Quote fields that have delimiters, quotes or line ends.")
    text = fields[header.text]
    if text in header.names and len(fields) > 1 and sorted(fields) == sorted(header.names):
        if fields == header.names:
            return RowError(line, _JOINED, _REMOVE_HEADERS)
        if len(fields) == 2:  # so few words may also be the text and the other field of a row
            return RowError(line, f"{_JOINED}, in another order", _TWO_NAMES)
        raise DataError(f"{path}{'' if line is None else f', line {line}'}: {_JOINED}. {_DIVIDE}")
    found = recognize_escaped(text)
    return None if found is None else RowError(line, f"this is {found.what}", found.remedy)


class CsvFormat(RecordsFormat):
    """Comma-separated values, of which one column is text."""

    kind = "csv"
    endings: ClassVar[tuple[str, ...]] = (".csv",)
    row_word, record_word = "row", "record"
    column = TEXT_COLUMN
    delimiter = b","

    def records(self, stream: Stream, offset: int = 0) -> Iterator[Record]:
        return iter_records(stream, self.delimiter, offset)

    def plain_ranges(self, file: InputFile, size: int) -> Iterator[FileRange]:
        with file.path.open("rb") as raw:
            records = self.records(raw)
            header = next(records, None)
            start = end = 0 if header is None else header.end
            for record in records:
                # Every record is read: only so is it known which line feeds are outside of quotes.
                if record.offset - start >= size:
                    yield FileRange(start, record.offset)
                    start = record.offset
                end = record.end
        if end > start:
            yield FileRange(start, end)

    def begin(self, file: InputFile, records: Iterator[Record]) -> _Header:
        """Return the columns; DataError if the first row is no header, or has not exactly one such column."""
        if (record := next(records, None)) is None:
            raise DataError(f"{file.path}: no header: the file has only empty lines. {_TEXT_UTF8}")
        self.check_record(record, file)
        try:
            names = self._names(record)
        except ValueError as error:
            remedy = _LINE_ENDS if b"\r" in record.content.strip() else _TEXT_UTF8
            raise DataError(
                f"{file.path}, line {record.line}: not the header of a {self.kind} file: {error}. {remedy}"
            ) from error
        check_names(file, names, self._remedy(names))
        return _Header([name.encode() for name in names], names.index(file.column))

    def _remedy(self, names: list[str]) -> str:
        if names[0].startswith("sep="):
            return "Leave out this first line, which is for Excel: tail -n +2 FILE > NEW."
        # A single name with another delimiter in it is a table that is divided otherwise.
        other = next((sign for sign in ";\t|," if len(names) == 1 and sign in names[0]), None)
        if other is None:
            return f"{self.column.remedy} The first line of the file names its columns."
        remedy = f"It seems to be divided by {other!r}, and {self.kind} files by {self.delimiter.decode()!r}"
        return f"{remedy}: write it anew, as parquet or jsonl, with a first line that names the columns."

    def _names(self, header: Record) -> list[str]:
        """Return the names of the columns; ValueError if the row is no header."""
        if header.is_too_long:
            raise ValueError(f"more than {MAX_LINE_BYTES:,} bytes")
        try:
            return [field.decode() for field in split_fields(header.content, self.delimiter)]
        except UnicodeDecodeError as error:
            raise ValueError(f"invalid UTF-8 ({error.reason})") from error

    def check_record(self, record: Record, file: InputFile) -> None:
        # Everything after the quote would be one field, and so one document.
        if not record.is_closed:
            raise DataError(
                f"{file.path}: the row that ends the file begins at byte {record.offset:,} (line {record.line} from "
                "the beginning of the file or of its range) and has a quote that is never closed. The file is "
                "truncated, or a quote at the beginning of a field is not doubled."
            )

    def content(self, record: Record, file: InputFile, begun: _Header, line: int | None) -> str | RowError:
        try:
            fields = split_fields(record.content, self.delimiter)
            return _no_text(fields, begun, file.path, line) or fields[begun.text].decode()
        except UnicodeDecodeError as error:
            return RowError(line, f"invalid UTF-8 at byte {error.start} of the text ({error.reason})", _REPAIR)
        except ValueError as error:
            return RowError(line, str(error), _REPAIR)


class TsvFormat(CsvFormat):
    """Tab-separated values, quoted like comma-separated ones."""

    kind = "tsv"
    endings = (".tsv", ".tab")
    delimiter = b"\t"
