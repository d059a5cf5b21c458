"""Messages between a tokenizing worker and its parent: the plan and the initial cursors, then frames.

parent --WorkerPlan, cursors--> worker --lists of Frame, or the text of a note--> parent
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hlat.data.corpus_files import open_cached_store
from hlat.data.online.streams import Int64s, RowSettings, StreamAssignment, StreamCursor, partition_count
from hlat.data.prepared.manifest import SourceRecord
from hlat.data.samples.order import EpochOrder, PhaseWeights
from hlat.data.samples.packing import RowSegment, fill_row
from hlat.data.source_file import SourceFile
from hlat.data.stores.cache import Cache


@dataclass(frozen=True)
class SourcePlan:
    """One source of blocks, or all sources joined if they have no weights."""

    name: str  # name for messages
    first_block: int  # index of its first block in the block index
    blocks: list[int]  # number of blocks of each of its lists
    repeats: list[float]  # occurrences of each list in an epoch
    seed: int  # seed of the order of its blocks

    def epoch_order(self, shuffle: bool) -> EpochOrder:
        """Return the order in which its blocks are read."""
        return EpochOrder(self.blocks, self.repeats, self.seed, shuffle)

    def partition_count(self, streams: int) -> int:
        return partition_count(streams, sum(int(n * times) for n, times in zip(self.blocks, self.repeats, strict=True)))


@dataclass(frozen=True)
class WorkerPlan:
    """Everything a worker needs except the cursors."""

    block_file: str  # path of the block index
    files: list[SourceRecord]  # the source files, as they are now
    cache: tuple[str, int]  # folder and size limit in bytes of the cache for files of URLs
    tokenizer: str  # folder of the tokenizer
    vocab_size: int  # size of the tokenizer's vocabulary
    settings: RowSettings
    shuffle: bool  # True to read blocks in permuted order
    validation_below: int  # documents whose hash is below this are validation text
    unreadable_share: float  # the largest fraction of rows that may be unreadable
    sources: list[SourcePlan]  # the sources, in the order of the recipe
    phases: list[PhaseWeights]  # one of weight 1 if the sources have none
    assignment: StreamAssignment  # samples and streams of this rank
    streams: list[int]  # the streams of this worker
    first: int  # the first global sample
    records: list[str]  # folders with a record of the content of the files
    fingerprint: str  # that of the prepared data
    # Number of this worker, and number of workers of all ranks: each records other files completely.
    share: tuple[int, int] = (0, 1)

    def source_files(self) -> list[SourceFile]:
        """Return the files, ready to be opened, with their companions."""
        cache = Cache(Path(self.cache[0]), self.cache[1])

        def ready(file: SourceFile) -> SourceFile:
            index = None if file.index is None else ready(file.index)
            # Without the hash, which is that of a sample.
            return replace(file, sha256="", index=index, cached_store=open_cached_store(file.path, cache))

        return [ready(record.to_file()) for record in self.files]


class Frame(NamedTuple):
    """One message of a worker: a row. Notes for the user are texts."""

    sample: int  # global sample
    stream: int  # index of the stream
    source: int  # index of the source
    cursor: StreamCursor  # position of the stream after this row
    content: bytes  # the row (see ``pack_row``); empty if another rank takes it, and the stream has only passed it


def pack_row(segments: list[RowSegment], settings: RowSettings) -> bytes:
    """Encode a row as int32 columns: inputs, labels and, if documents are isolated, positions."""
    columns = np.empty((3 if settings.isolate else 2, settings.length), dtype=np.int64)
    fill_row(segments, *columns)
    return columns.astype("<i4").tobytes()  # token ids are below 2^31: half of what int64 would send


def unpack_rows(contents: list[bytes], length: int, isolate: bool) -> Iterator[Int64s]:
    """Yield inputs, labels and, if isolated, positions of several rows: int64, shape (rows, S) each."""
    columns = 3 if isolate else 2
    packed = np.frombuffer(b"".join(contents), dtype="<i4").reshape(len(contents), columns, length)
    yield from (packed[:, column].astype(np.int64) for column in range(columns))
