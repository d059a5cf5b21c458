"""Blocks of the catalogue -> their rows.

Many blocks may be cut from one row group of a parquet file, which can only be decoded as a whole: groups that were
decoded are kept, the last ones used, up to a limit. So are datasets of tokens, whose index is checked as it is opened.
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

_KEPT = 1 << 28  # bytes of decoded row groups
_OPEN = 256  # datasets of tokens: a process may map so many files only


class BlockReader:
    """Opens blocks, and remembers what it had to decode for them.

    Args:
        vocabulary: of the tokenizer.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._datasets: OrderedDict[Path, TokenDocuments] = OrderedDict()
        self._starts: dict[Path, list[int]] = {}  # first row of each group, and the end
        self._groups: OrderedDict[tuple[Path, int], Any] = OrderedDict()
        self._bytes = 0

    def rows(self, file: SourceFile, block: FileBlock, row: int) -> Iterator[Row]:
        """The rows of a block from its ``row``-th on, counted from the beginning of the block.

        A file that changes is noticed before a row, or itself, is called damaged, and at the end of the block.

        Raises:
            DataError: as ``read_documents``; or the file is not the one that was listed.
        """
        with file.open_local() as local:
            file.check_unchanged()
            with file.relabel_errors(local):
                try:
                    for found in self._found(local, file, block, row):
                        if found.error is not None:
                            file.check_unchanged()
                        yield found
                except DataError:
                    file.check_unchanged()
                    raise
            file.check_unchanged()

    def _found(self, local: Path, file: SourceFile, block: FileBlock, row: int) -> Iterator[Row]:
        if file.index is not None:
            return self._of_tokens(local, file, file.index, block, row)
        return self._rows(local, file.column, block, row)

    def _of_tokens(self, local: Path, file: SourceFile, index: SourceFile, block: FileBlock, row: int) -> Iterator[Row]:
        with index.open_local() as beside, index.relabel_errors(beside):
            dataset = self._datasets.pop(local, None) or TokenDocuments(local, beside, self._vocabulary)
            if file.cached_store is None:  # a fetched one has to go when the cache wants its room
                self._datasets[local] = dataset
                while len(self._datasets) > _OPEN:
                    self._datasets.popitem(last=False)
            if block.stop == WHOLE:
                yield from dataset.rows(row)
            else:
                yield from _cut(dataset.rows(block.start + row, block.stop), block)

    def _rows(self, file: Path, column: str, block: FileBlock, row: int) -> Iterator[Row]:
        if block.stop == WHOLE:
            yield from read_documents(file, column, row)
            return
        match file_type(file):
            case kind if kind == JSON:
                found = read_lines(file, column, block.start, block.stop)
                yield from (one for one in found if one.row >= row)
            case kind if kind == PARQUET:
                yield from self._of_group(file, column, block, row)
            case kind:
                assert kind == ARROW, "other files are blocks as a whole"
                yield from _cut(read_documents(file, column, block.start + row), block)

    def _of_group(self, file: Path, column: str, block: FileBlock, row: int) -> Iterator[Row]:
        if file not in self._starts:
            self._starts[file] = list(accumulate(row_group_sizes(file), initial=0))
        group = bisect_right(self._starts[file], block.start) - 1
        first = block.start + row
        values = self._group(file, column, group).slice(first - self._starts[file][group], block.stop - first)
        yield from _cut(rows_of_column(file, values, first), block)

    def _group(self, file: Path, column: str, group: int) -> Any:
        key = (file, group)
        if key not in self._groups:
            self._groups[key] = read_row_group(file, column, group)
            self._bytes += self._groups[key].nbytes
            while self._bytes > _KEPT and len(self._groups) > 1:
                self._bytes -= self._groups.popitem(last=False)[1].nbytes
        self._groups.move_to_end(key)
        return self._groups[key]


def _cut(rows: Iterator[Row], block: FileBlock) -> Iterator[Row]:
    for found in rows:
        if found.row >= block.stop:
            return
        yield found._replace(row=found.row - block.start)
