"""Reading of blocks: a block of the block index -> its rows.

Many blocks may be cut from one row group of a parquet file, which can only be decoded completely, so the most recently
used decoded groups are kept, up to a limit. So are open token datasets, whose index is verified when they are opened.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from hlat.data.formats import (
    ARROW,
    JSON,
    PARQUET,
    Row,
    TokenDocuments,
    Vocabulary,
    file_type,
    read_documents,
    read_lines,
    read_row_group,
    row_group_sizes,
    rows_of_column,
)
from hlat.data.online.block_index import WHOLE, FileBlock
from hlat.data.sources import SourceFile
from hlat.runtime import DataError

_GROUP_CACHE_BYTES = 1 << 28  # maximum bytes of decoded row groups
_MAX_DATASETS = 256  # maximum number of open token datasets: a process can map only so many files


class BlockReader:
    """Reads blocks, and caches what it had to decode for them.

    Args:
        vocabulary: vocabulary of the tokenizer.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._datasets: OrderedDict[Path, TokenDocuments] = OrderedDict()
        self._starts: dict[Path, list[int]] = {}  # first row of each group, and the end
        self._groups: OrderedDict[tuple[Path, int], Any] = OrderedDict()
        self._bytes = 0

    def rows(self, file: SourceFile, block: FileBlock, row: int) -> Iterator[Row]:
        """Yield the rows of a block from its ``row``-th on, counted from the beginning of the block.

        The file is checked for changes at the end of the block, and before a row or the file is reported as damaged.

        Raises:
            DataError: as ``read_documents``; or the file has changed since it was listed.
        """
        with file.open_local() as local:
            file.check_unchanged()
            with file.relabel_errors(local):
                try:
                    for found_row in self._read_rows(local, file, block, row):
                        if found_row.error is not None:
                            file.check_unchanged()
                        yield found_row
                except DataError:
                    file.check_unchanged()
                    raise
            file.check_unchanged()

    def _read_rows(self, local: Path, file: SourceFile, block: FileBlock, row: int) -> Iterator[Row]:
        if file.index is not None:
            return self._token_rows(local, file, file.index, block, row)
        return self._text_rows(local, file.column, block, row)

    def _token_rows(
        self, local: Path, file: SourceFile, index: SourceFile, block: FileBlock, row: int
    ) -> Iterator[Row]:
        """Yield the rows of a block of a token dataset."""
        with index.open_local() as local_index, index.relabel_errors(local_index):
            dataset = self._datasets.pop(local, None) or TokenDocuments(local, local_index, self._vocabulary)
            if file.cached_store is None:  # not for fetched files: the cache must be able to delete them
                self._datasets[local] = dataset
                while len(self._datasets) > _MAX_DATASETS:
                    self._datasets.popitem(last=False)
            if block.stop == WHOLE:
                yield from dataset.rows(row)
            else:
                yield from _cut(dataset.rows(block.start + row, block.stop), block)

    def _text_rows(self, file: Path, column: str, block: FileBlock, row: int) -> Iterator[Row]:
        """Yield the rows of a block of a text file."""
        if block.stop == WHOLE:
            yield from read_documents(file, column, row)
            return
        match file_type(file):
            case kind if kind == JSON:
                lines = read_lines(file, column, block.start, block.stop)
                yield from (line for line in lines if line.row >= row)
            case kind if kind == PARQUET:
                yield from self._group_rows(file, column, block, row)
            case kind:
                assert kind == ARROW, "files of other types are single blocks"
                yield from _cut(read_documents(file, column, block.start + row), block)

    def _group_rows(self, file: Path, column: str, block: FileBlock, row: int) -> Iterator[Row]:
        """Yield the rows of a block of a parquet file."""
        if file not in self._starts:
            self._starts[file] = list(accumulate(row_group_sizes(file), initial=0))
        group = bisect_right(self._starts[file], block.start) - 1
        first = block.start + row
        values = self._group(file, column, group).slice(first - self._starts[file][group], block.stop - first)
        yield from _cut(rows_of_column(file, values, first), block)

    def _group(self, file: Path, column: str, group: int) -> Any:
        """Return a decoded row group, from the cache if it is there."""
        key = (file, group)
        if key not in self._groups:
            self._groups[key] = read_row_group(file, column, group)
            self._bytes += self._groups[key].nbytes
            while self._bytes > _GROUP_CACHE_BYTES and len(self._groups) > 1:
                self._bytes -= self._groups.popitem(last=False)[1].nbytes
        self._groups.move_to_end(key)
        return self._groups[key]


def _cut(rows: Iterator[Row], block: FileBlock) -> Iterator[Row]:
    """Yield the rows up to the end of the block, numbered from its beginning."""
    for row in rows:
        if row.row >= block.stop:
            return
        yield row._replace(row=row.row - block.start)
