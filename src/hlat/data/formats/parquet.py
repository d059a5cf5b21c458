"""Parquet files: rows from any row on, with memory bounded by one batch; ranges of rows, decoded by row group.

    .parquet, .pq --row groups--> batches of rows --> documents
                  --row groups, divided--> ranges of rows

A row group can only be decoded completely, and many ranges may be cut from one. So the decoded groups that were used
last are kept, up to a limit.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from itertools import accumulate
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import parquet as pq

from hlat.data.formats.base import WHOLE_FILE, FileFormat, FileRange, RangeReader, cut_rows, group_ranges
from hlat.data.formats.rows import BATCH_BYTES, BATCH_ROWS, TEXT_COLUMN, ColumnKind, InputFile, Row, convert_file_errors
from hlat.data.stores.local_files import FileStamp, file_stamp
from hlat.runtime.errors import DataError

_MAGIC = b"PAR1"  # at both ends
_ENCRYPTED = b"PARE"  # instead of PAR1, if the footer is encrypted
_SIGNATURE_BYTES = 28  # after a footer that is not encrypted in a file with columns that are
_GROUP_CACHE_BYTES = 1 << 28  # maximum bytes of decoded row groups


class ParquetFormat(FileFormat):
    """Parquet files, with a column of any kind."""

    kind = "parquet"
    endings = (".parquet", ".parq", ".pq")

    def __init__(self, column: ColumnKind = TEXT_COLUMN) -> None:
        self.column: ColumnKind = column

    def is_own_content(self, head: bytes) -> bool:
        # An encrypted file is parquet too: ``_open`` says what is wrong with it.
        return head.startswith((_MAGIC, _ENCRYPTED))

    def _read(self, file: InputFile, start: int) -> Iterator[Row]:
        size = file.path.stat().st_size
        with _open(file.path) as parquet:
            self.column.check(file, parquet.schema_arrow)
            total = max(parquet.metadata.num_rows, 1)
            first = 0
            for number, (rows, chunks) in enumerate(_row_groups(parquet, file.column)):
                if first + rows > start:
                    # By the average row of the group, so that a batch of large documents is small.
                    row_bytes = max(sum(chunk.total_uncompressed_size for chunk in chunks) // max(rows, 1), 1)
                    batch_rows = min(max(BATCH_BYTES // row_bytes, 1), BATCH_ROWS)
                    batches = parquet.iter_batches(batch_rows, [number], columns=[file.column], use_threads=False)
                    columns = (batch.column(0) for batch in batches)
                    yield from self.column.rows(columns, file, first, start, lambda row: size * row // total)
                first += rows

    def ranges(self, file: InputFile, size: int) -> Iterator[FileRange]:
        with _open(file.path) as parquet:
            # A missing column is reported when the text is read.
            groups = [
                (rows, int((chunks or [parquet.metadata.row_group(number).column(0)])[0].total_uncompressed_size))
                for number, (rows, chunks) in enumerate(_row_groups(parquet, file.column))
            ]
        yield from group_ranges(groups, size)

    def range_reader(self) -> RangeReader:
        return _GroupReader(self.column, self.kind).rows

    def bytes_of(self, file: InputFile, part: FileRange) -> tuple[int, int | None] | None:
        """Return the bytes of the column in the row group that has the rows."""
        if part == WHOLE_FILE:
            return None
        with convert_file_errors(file.path, self.kind):
            groups = _groups(file)
        return groups.parts[bisect_right(groups.starts, part.start) - 1] if part.start < groups.starts[-1] else None


class _Groups(NamedTuple):
    """The row groups of a file, and a column's place in them."""

    starts: list[int]  # first row of each group, and the end
    parts: list[tuple[int, int] | None]  # bytes of the column in each; None if there is no such column


def _groups(file: InputFile) -> _Groups:
    # The stamp is a part of the cache's key: a file that has been written since is read again.
    return _read_groups(file.path, file.column, file_stamp(file.path))


@lru_cache(maxsize=1 << 14)  # files: streams read blocks from all over the corpus
def _read_groups(path: Path, column: str, stamp: FileStamp) -> _Groups:
    with _open(path) as parquet:
        groups = list(_row_groups(parquet, column))
        starts = list(accumulate((rows for rows, _ in groups), initial=0))
        return _Groups(starts, [_bytes_of(chunks) for _, chunks in groups])


def _bytes_of(chunks: list[Any]) -> tuple[int, int] | None:
    # The dictionary, where there is one, precedes the data pages.
    begins = [chunk.dictionary_page_offset or chunk.data_page_offset for chunk in chunks]
    ends = [at + chunk.total_compressed_size for at, chunk in zip(begins, chunks, strict=True)]
    return (min(begins), max(ends)) if chunks else None


class _GroupReader:
    """Reader of ranges of rows, which keeps decoded row groups up to ``_GROUP_CACHE_BYTES``."""

    def __init__(self, column: ColumnKind, kind: str) -> None:
        self._column, self._kind = column, kind
        self._groups: OrderedDict[tuple[Path, str, int], Any] = OrderedDict()
        self._bytes = 0

    def rows(self, file: InputFile, part: FileRange, row: int) -> Iterator[Row]:
        with convert_file_errors(file.path, self._kind):
            starts = _groups(file).starts
            group = bisect_right(starts, part.start) - 1
            first = part.start + row
            values = self._group(file, group).slice(first - starts[group], part.stop - first)
            yield from cut_rows(self._column.rows([values], file, first, first, lambda _: 0), part)

    def _group(self, file: InputFile, group: int) -> Any:
        key = (file.path, file.column, group)
        if key not in self._groups:
            self._groups[key] = self._decode(file, group)
            self._bytes += self._groups[key].nbytes
            # The newest group stays, however large: it is about to be read.
            while self._bytes > _GROUP_CACHE_BYTES and len(self._groups) > 1:
                self._bytes -= self._groups.popitem(last=False)[1].nbytes
        self._groups.move_to_end(key)
        return self._groups[key]

    def _decode(self, file: InputFile, group: int) -> Any:
        with _open(file.path) as parquet:
            self._column.check(file, parquet.schema_arrow)
            return parquet.read_row_group(group, columns=[file.column], use_threads=False).column(0)


@contextmanager
def _open(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a file; DataError if its footer is encrypted or signed, or if it is several files that were joined."""
    with path.open("rb") as raw:
        # Checked first: the library ends the process when it is asked for the size of an encrypted column.
        is_encrypted = raw.read(4) == _ENCRYPTED
        raw.seek(max(path.stat().st_size - 8, 0))  # the length of the footer, and PAR1
        footer_bytes = int.from_bytes(raw.read()[:4], "little")
    if not is_encrypted:
        with pq.ParquetFile(path, page_checksum_verification=True) as parquet:  # of the writers that give checksums
            is_encrypted = footer_bytes == parquet.metadata.serialized_size + _SIGNATURE_BYTES
            if not is_encrypted:
                _check_not_joined(path, parquet.metadata, footer_bytes)
                yield parquet
    if is_encrypted:
        raise DataError(
            f"{path}: the parquet file is encrypted, which hlat does not read. Write it without encryption."
        )


def _check_not_joined(path: Path, metadata: Any, footer_bytes: int) -> None:
    """Check that a file does not begin with another one.

    Of files that were joined only the last footer is read, at the places of the first file: its rows, or damage. The
    first one then is part of what the footer leaves between its last row group and itself, where usually only indexes
    are, so that its end is found in as many bytes at the beginning.

    Raises:
        DataError: it does.
    """
    _, end = _last_columns(metadata) or (0, len(_MAGIC))
    left = path.stat().st_size - len(_MAGIC) - 4 - footer_bytes - end
    if left <= 0:
        return
    with path.open("rb") as raw, ExitStack() as stack:
        try:
            content = stack.enter_context(mmap(raw.fileno(), 0, access=ACCESS_READ))
        except OSError:  # some network file systems cannot map files: what cannot be looked at is no mistake
            return
        place = 0
        while (place := content.find(_MAGIC * 2, place + 1, left + len(_MAGIC))) > 0:
            begin = place - 4 - int.from_bytes(content[place - 4 : place], "little")
            if begin > 0 and _is_footer(content[begin : place + len(_MAGIC)], begin):  # not a text with these words
                raise DataError(f"{path}: several parquet files that were joined. Make each a file of its own.")


def _is_footer(tail: bytes, begin: int) -> bool:
    """Return True if the end of a file is that of parquet, whose columns end before its footer begins."""
    try:
        metadata = pq.read_metadata(pa.BufferReader(_MAGIC + tail))
    except (pa.ArrowException, OSError):
        return False
    return (_last_columns(metadata) or (0, begin))[1] <= begin


def _last_columns(metadata: Any) -> tuple[int, int] | None:
    """Return the bytes of the last row group; None if there is none, or it has no columns."""
    last = metadata.row_group(metadata.num_row_groups - 1) if metadata.num_row_groups else None
    return _bytes_of([last.column(index) for index in range(last.num_columns)]) if last else None


def _row_groups(parquet: pq.ParquetFile, column: str) -> Iterator[tuple[int, list[Any]]]:
    """Yield the rows of each row group, and its chunks of a column: of its name, or else those nested in it."""
    for group in map(parquet.metadata.row_group, range(parquet.num_row_groups)):
        chunks = [group.column(index) for index in range(group.num_columns)]
        named = [chunk for chunk in chunks if chunk.path_in_schema == column]
        nested = (chunk for chunk in chunks if chunk.path_in_schema.startswith(f"{column}."))  # as in lists
        yield group.num_rows, named or list(nested)
