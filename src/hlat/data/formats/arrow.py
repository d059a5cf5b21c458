"""Arrow files and streams: rows from any row on; ranges of rows of the record batches of a file.

    .arrow, .feather, .ipc --record batches--> rows --> documents
                           --record batches, divided--> ranges of rows

A stream has no list of its batches, so it is one range.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
from pyarrow import ipc

from hlat.data.formats.base import WHOLE_FILE, FileFormat, FileRange, group_ranges
from hlat.data.formats.rows import TEXT_COLUMN, ColumnKind, InputFile, Row
from hlat.runtime.errors import DataError

_MAGIC = b"ARROW1"
_TAIL = struct.Struct("<i6s")  # length of the footer, and the magic word again
_BLOCK = struct.Struct("<qi4xq")  # offset, length of its metadata, length of its body
_BATCHES = 4 + 2 * 3  # place of the field in the table of fields
_PADDING = 256  # more than an end marker and what aligns it, less than any file
_CONTINUES = b"\xff\xff\xff\xff"  # first bytes of each message of a stream, since Arrow 0.15


class ArrowFormat(FileFormat):
    """Arrow files and streams, with a column of any kind."""

    kind = "arrow"
    endings: ClassVar[tuple[str, ...]] = (".arrow", ".arrows", ".feather", ".ipc")

    def __init__(self, column: ColumnKind = TEXT_COLUMN) -> None:
        self.column: ColumnKind = column

    def is_own_content(self, head: bytes) -> bool:
        # A stream of before 2019 begins with a length of a few kilobytes, which has zero bytes.
        return head.startswith((_MAGIC, _CONTINUES)) or (b"\0" in head[:4] and super().is_own_content(head))

    def _read(self, file: InputFile, start: int) -> Iterator[Row]:
        size = file.path.stat().st_size
        with pa.memory_map(str(file.path)) as source:
            if source.read(len(_MAGIC)) == _MAGIC:
                reader = ipc.open_file(source)
                _check_not_joined(source, file.path)
                batches: Iterator[Any] = (reader.get_batch(i) for i in range(reader.num_record_batches))
            else:
                source.seek(0)
                reader = ipc.open_stream(source)
                batches = stream_batches(reader, source, file.path)
            self.column.check(file, reader.schema)
            columns = (batch.column(reader.schema.get_field_index(file.column)) for batch in batches)
            yield from self.column.rows(columns, file, 0, start, lambda _: min(source.tell(), size))

    def ranges(self, file: InputFile, size: int) -> Iterator[FileRange]:
        rows = self._batch_rows(file.path)
        if rows is None:
            yield WHOLE_FILE
            return
        # A batch has no recorded size here: bytes are shared out by rows.
        total = file.path.stat().st_size
        yield from group_ranges(((count, total * count // max(sum(rows), 1)) for count in rows), size)

    def _batch_rows(self, path: Path) -> list[int] | None:
        """Return the rows of each record batch; None for a stream, which has no list of them."""
        with pa.memory_map(str(path)) as source:
            if source.read(len(_MAGIC)) != _MAGIC:
                return None
            reader = ipc.open_file(source)
            return [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]


def stream_batches(reader: Any, source: Any, path: Path) -> Iterator[Any]:
    """Yield the record batches; DataError without an end marker, or with bytes after it."""
    read = source.tell()
    # A stream that was cut between two batches looks complete but for its end marker.
    for batch in reader:
        read = source.tell()
        yield batch
    if source.tell() == read:  # the end marker would have been read
        raise DataError(
            f"{path}: the arrow stream has no end marker: it was cut off between two batches, or its writer was not "
            "closed. Fetch or write the file again."
        )
    if rest := source.size() - source.tell():
        raise DataError(
            f"{path}: {rest:,} bytes follow the end of the arrow stream: several streams that were joined, "
            "which are not read as one, or an incomplete copy. Make each stream a file of its own, or fetch it again."
        )


def _check_not_joined(source: Any, path: Path) -> None:
    """Raise DataError if the record batches that the footer lists do not end where it begins."""
    # Of files that were joined only the last footer is read, at the places of the first file: half of the rows.
    tail = source.size() - _TAIL.size
    source.seek(tail)
    begin = tail - _TAIL.unpack(source.read(_TAIL.size))[0]
    source.seek(begin)
    footer = source.read(tail - begin)
    table = struct.unpack_from("<I", footer)[0]  # Footer of File.fbs: its field 3 is the vector of record batches
    fields = table - struct.unpack_from("<i", footer, table)[0]
    is_there = struct.unpack_from("<H", footer, fields)[0] > _BATCHES
    field = table + (is_there and struct.unpack_from("<H", footer, fields + _BATCHES)[0])
    vector = field + struct.unpack_from("<I", footer, field)[0] if field > table else 0
    count = struct.unpack_from("<I", footer, vector)[0] if vector else 0
    blocks = [_BLOCK.unpack_from(footer, vector + 4 + number * _BLOCK.size) for number in range(count)]
    source.seek(0)
    if begin - max(map(sum, blocks), default=begin) > _PADDING or (not blocks and _MAGIC * 2 in source.read(begin)):
        raise DataError(f"{path}: several arrow files that were joined. Make each a file of its own.")
