"""Files -> blocks: stretches of a file that can be opened without what lies before them.

    parquet, arrow   rows of a row group or record batch
    .bin and .idx    documents
    jsonl            bytes; the lines that begin among them
    others           the whole file: compressed lines, text, arrow streams, files that lie elsewhere

Blocks are what is dealt to streams, so they are small where a corpus is small: there should be some for every stream.
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

_LEAST, _MOST = 1 << 12, 1 << 22  # bytes of a block
_PER_STREAM = 2
_TOGETHER = 1 << 20  # documents whose lengths are looked at together
WHOLE = -1
"""The end of a block that is all of its file."""

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FileBlock:
    """A stretch of a file.

    Attributes:
        file: index of the file.
        start, stop: rows, documents of a .bin, or bytes of a jsonl file; stop is -1 for all of it.
    """

    file: int
    start: int
    stop: int


def choose_block_bytes(total: int, streams: int) -> int:
    """How large the blocks of a corpus of so many bytes should be."""
    return min(max(total // (_PER_STREAM * streams), _LEAST), _MOST)


def split_file(index: int, file: Path, column: str, size: int) -> Iterator[FileBlock]:
    """The blocks of a file, in order.

    Args:
        index: of the file.
        file: where it is.
        column: of its text.
        size: bytes that a block should have, about.

    Raises:
        OSError, pyarrow.ArrowException: it cannot be read.
        DataError: as MegatronDataset.
    """
    if file.suffix.lower() in (".gz", ".zst"):
        yield FileBlock(index, 0, WHOLE)
        return
    match file_type(file):
        case "parquet":
            yield from _of_groups(index, _parquet_groups(file, column), size)
        case "arrow":
            yield from _of_groups(index, _arrow_batches(file), size)
        case "jsonl":
            yield from _of_bytes(index, file.stat().st_size, size)
        case kind if kind == MEGATRON:
            yield from _of_documents(index, MegatronDataset(file), size)
        case _:
            yield FileBlock(index, 0, WHOLE)


def split_remote_file(index: int, url: str, total: int, size: int) -> Iterator[FileBlock]:
    """The blocks of a file that is not fetched for this: only lines can be dealt without looking inside."""
    path = Path(url)
    if path.suffix.lower() in (".gz", ".zst") or file_type(path) != JSON:
        yield FileBlock(index, 0, WHOLE)
    else:
        yield from _of_bytes(index, total, size)


def _of_bytes(index: int, total: int, size: int) -> Iterator[FileBlock]:
    parts = max(-(-total // size), 1)
    edges = [total * part // parts for part in range(parts + 1)]
    yield from (FileBlock(index, start, stop) for start, stop in pairwise(edges))


def _of_groups(index: int, groups: list[tuple[int, int]] | None, size: int) -> Iterator[FileBlock]:
    """Groups of (rows, bytes), cut where they are too large; None for a file without an index of its groups."""
    if groups is None:
        yield FileBlock(index, 0, WHOLE)
        return
    first = 0
    for rows, total in groups:
        parts = min(max(-(-total // size), 1), max(rows, 1))
        edges = [first + rows * part // parts for part in range(parts + 1)]
        yield from (FileBlock(index, start, stop) for start, stop in pairwise(edges) if stop > start)
        first += rows


def _of_documents(index: int, dataset: MegatronDataset, size: int) -> Iterator[FileBlock]:
    """Each block begins with the first document after another ``size`` bytes."""
    first = total = last = 0
    for start in range(0, len(dataset), _TOGETHER):
        lengths = dataset.document_lengths(start, min(start + _TOGETHER, len(dataset))) * dataset.dtype.itemsize
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
        place = names.index(column) if column in names else 0  # a missing column is refused when the text is read
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        return [(group.num_rows, group.column(place).total_uncompressed_size) for group in groups]


def _arrow_batches(file: Path) -> list[tuple[int, int]] | None:
    with pa.memory_map(str(file)) as source:
        if source.read(6) != b"ARROW1":
            return None
        reader = ipc.open_file(source)
        rows = [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]
    size = file.stat().st_size
    return [(count, size * count // max(sum(rows), 1)) for count in rows]


def blocks_to_array(blocks: list[FileBlock]) -> Int64s:
    """Blocks as int64, (blocks, 3)."""
    return np.array([(block.file, block.start, block.stop) for block in blocks], dtype=np.int64).reshape(-1, 3)
