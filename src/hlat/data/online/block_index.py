"""The block index: files -> blocks, ranges of a file that can be read without what precedes them.

    parquet, arrow   rows of a row group or record batch
    .bin and .idx    documents
    jsonl            a range of bytes; the lines that begin in it
    others           the complete file: compressed lines, text, arrow streams, remote files

Blocks are assigned to streams, so they are small if the corpus is small: every stream should get some.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import ipc
from pyarrow import parquet as pq

from hlat.data.formats import JSON, MEGATRON, MegatronDataset, file_type

_MIN_BYTES, _MAX_BYTES = 1 << 12, 1 << 22  # size of a block
_BLOCKS_PER_STREAM = 2
_DOCUMENTS_PER_READ = 1 << 20  # document lengths read at a time
WHOLE = -1
"""Value of ``stop`` for a block that is a complete file."""

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FileBlock:
    """A range of a file.

    Attributes:
        file: index of the file.
        start: first row, document of a .bin file, or byte of a jsonl file.
        stop: end of the range, exclusive; ``WHOLE`` (-1) for the complete file.
    """

    file: int
    start: int
    stop: int


def choose_block_bytes(total: int, streams: int) -> int:
    """Return the block size for a corpus of ``total`` bytes and ``streams`` streams."""
    return min(max(total // (_BLOCKS_PER_STREAM * streams), _MIN_BYTES), _MAX_BYTES)


def split_file(index: int, file: Path, column: str, size: int) -> Iterator[FileBlock]:
    """Yield the blocks of a file, in order.

    Args:
        index: index of the file.
        file: its local path.
        column: its text column.
        size: approximate bytes per block.

    Raises:
        OSError: the file cannot be read.
        pyarrow.ArrowException: the file is damaged.
        DataError: as MegatronDataset.
    """
    if file.suffix.lower() in (".gz", ".zst"):
        yield FileBlock(index, 0, WHOLE)
        return
    match file_type(file):
        case "parquet":
            yield from _group_blocks(index, _parquet_groups(file, column), size)
        case "arrow":
            yield from _group_blocks(index, _arrow_batches(file), size)
        case "jsonl":
            yield from _byte_blocks(index, file.stat().st_size, size)
        case kind if kind == MEGATRON:
            yield from _document_blocks(index, MegatronDataset(file), size)
        case _:
            yield FileBlock(index, 0, WHOLE)


def split_remote_file(index: int, url: str, total: int, size: int) -> Iterator[FileBlock]:
    """Yield the blocks of a file without fetching it: only lines can be divided without reading the file.

    Args:
        index: index of the file.
        url: its URL.
        total: its size in bytes.
        size: approximate bytes per block.
    """
    path = Path(url)
    if path.suffix.lower() in (".gz", ".zst") or file_type(path) != JSON:
        yield FileBlock(index, 0, WHOLE)
    else:
        yield from _byte_blocks(index, total, size)


def _byte_blocks(index: int, total: int, size: int) -> Iterator[FileBlock]:
    count = max(-(-total // size), 1)
    edges = [total * number // count for number in range(count + 1)]
    yield from (FileBlock(index, start, stop) for start, stop in pairwise(edges))


def _group_blocks(index: int, groups: list[tuple[int, int]] | None, size: int) -> Iterator[FileBlock]:
    """Yield blocks of groups of (rows, bytes), dividing groups that are too large.

    If ``groups`` is None, the file has no list of its groups and is a single block.
    """
    if groups is None:
        yield FileBlock(index, 0, WHOLE)
        return
    first = 0
    for rows, total in groups:
        count = min(max(-(-total // size), 1), max(rows, 1))
        edges = [first + rows * number // count for number in range(count + 1)]
        yield from (FileBlock(index, start, stop) for start, stop in pairwise(edges) if stop > start)
        first += rows


def _document_blocks(index: int, dataset: MegatronDataset, size: int) -> Iterator[FileBlock]:
    """Yield blocks of documents; each begins with the first document after another ``size`` bytes."""
    first = total = last = 0
    for start in range(0, len(dataset), _DOCUMENTS_PER_READ):
        lengths = (
            dataset.document_lengths(start, min(start + _DOCUMENTS_PER_READ, len(dataset))) * dataset.dtype.itemsize
        )
        ends = total + np.cumsum(lengths)
        numbers = (ends - lengths) // size
        for edge in (start + np.flatnonzero(np.diff(numbers, prepend=last))).tolist():
            yield FileBlock(index, first, edge)
            first = edge
        total, last = int(ends[-1]), int(numbers[-1])
    if first < len(dataset):
        yield FileBlock(index, first, len(dataset))


def _parquet_groups(file: Path, column: str) -> list[tuple[int, int]]:
    with pq.ParquetFile(file) as parquet:
        metadata = parquet.metadata
        names = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
        position = names.index(column) if column in names else 0  # a missing column is reported when the text is read
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        return [(group.num_rows, group.column(position).total_uncompressed_size) for group in groups]


def _arrow_batches(file: Path) -> list[tuple[int, int]] | None:
    with pa.memory_map(str(file)) as source:
        if source.read(6) != b"ARROW1":
            return None
        reader = ipc.open_file(source)
        rows = [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]
    size = file.stat().st_size
    return [(count, size * count // max(sum(rows), 1)) for count in rows]


def blocks_to_array(blocks: list[FileBlock]) -> Int64s:
    """Return blocks as an int64 array of shape (blocks, 3)."""
    return np.array([(block.file, block.start, block.stop) for block in blocks], dtype=np.int64).reshape(-1, 3)
