"""The block index: files -> blocks, ranges of a file that can be read without what precedes them.

Each format divides its files as it can: into rows, documents or bytes, or not at all. Blocks are assigned to streams,
so they are small if the corpus is small: every stream should get some.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hlat.data.formats.ranges import FileRange
from hlat.data.formats.records import convert_file_errors
from hlat.data.sources.source_file import SourceFile

_MIN_BYTES, _MAX_BYTES = 1 << 12, 1 << 22  # size of a block
_BLOCKS_PER_STREAM = 2

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FileBlock:
    """A range of a file.

    Attributes:
        file: index of the file.
        start: first row, document or byte, as the file's format counts.
        stop: end of the range, exclusive; ``WHOLE`` (-1) for the complete file.
    """

    file: int
    start: int
    stop: int

    @property
    def part(self) -> FileRange:
        """The range."""
        return FileRange(self.start, self.stop)


def choose_block_bytes(total: int, streams: int) -> int:
    """Return the block size for a corpus of ``total`` bytes and ``streams`` streams."""
    return min(max(total // (_BLOCKS_PER_STREAM * streams), _MIN_BYTES), _MAX_BYTES)


def split_file(index: int, file: SourceFile, size: int) -> list[FileBlock]:
    """Return the blocks of a file, in order; a remote file is not fetched.

    Args:
        index: index of the file.
        file: the file.
        size: approximate bytes per block.

    Raises:
        DataError: the file cannot be read, or is damaged.
    """
    with convert_file_errors(Path(file.path), file.format.kind):
        return [FileBlock(index, part.start, part.stop) for part in _ranges(file, size)]


def _ranges(file: SourceFile, size: int) -> Iterator[FileRange]:
    if file.cached_store is not None:
        yield from file.format.remote_ranges(Path(file.path), file.size, size)
        return
    with file.open_local() as local, file.as_input(local, None) as opened:
        yield from file.format.ranges(opened, size)


def blocks_to_array(blocks: list[FileBlock]) -> Int64s:
    """Return blocks as an int64 array of shape (blocks, 3)."""
    return np.array([(block.file, block.start, block.stop) for block in blocks], dtype=np.int64).reshape(-1, 3)
