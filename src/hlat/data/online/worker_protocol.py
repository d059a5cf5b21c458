"""What a tokenizing process is told: a line of JSON, and where its streams begin.

parent --(line of JSON, cursors)--> worker --(frames)--> parent
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import numpy.typing as npt

from hlat.data.formats import Vocabulary
from hlat.data.online.stream import RowSettings, StreamCursor
from hlat.data.online.stream_assignment import StreamAssignment, partition_count
from hlat.data.samples import EpochOrder
from hlat.data.sources import SourceFile, open_cached_store
from hlat.data.stores import Cache

Int64s = npt.NDArray[np.int64]

_HEAD = np.dtype(
    [(name, "<i8") for name in ("kind", "sample", "stream", "source", "turn", "row", "place", "bytes")],
)
ROW, SKIPPED, NOTE, DATA_ERROR, STORAGE_ERROR, INTERNAL_ERROR = range(6)


FileIdentity = tuple[str, str, int, int, str]
"""Path or URL, column, size, time of modification and ETag of a file."""


@dataclass(frozen=True)
class SourcePlan:
    """One source, or all of them where they have no weights.

    Attributes:
        name: what it is called.
        first: its first block in the catalogue.
        blocks: blocks of each list that it is made of.
        counted: how often each list counts in an epoch.
        seed: of their order.
    """

    name: str
    first_block: int
    blocks: list[int]
    repeats: list[float]
    seed: int

    def epoch_order(self, shuffle: bool) -> EpochOrder:
        """Its blocks, in the order in which they are read."""
        return EpochOrder(self.blocks, self.repeats, self.seed, shuffle)

    def partition_count(self, streams: int) -> int:
        """Into how many parts its blocks are dealt."""
        return partition_count(streams, sum(int(n * times) for n, times in zip(self.blocks, self.repeats, strict=True)))


@dataclass(frozen=True)
class WorkerPlan:
    """Everything a worker needs but its cursors.

    Attributes:
        catalogue: file of the blocks.
        files: what each file is known by.
        indexes: the same of the .idx of each file, None for text.
        cache: folder and bytes of the cache for files of URLs.
        tokenizer: folder of the tokenizer.
        vocab_size: of the tokenizer.
        settings: how rows are made.
        shuffle: whether blocks are read in a drawn order.
        below: documents whose hash lies below this are validation text.
        unreadable: share of the rows that may be unreadable.
        sources: in the order of the recipe.
        phases: weights, and where each phase ends; one of ([1], None) where there are no weights.
        share: what this rank takes.
        streams: those of this worker.
        first: the first sample.
    """

    block_file: str
    files: list[FileIdentity]
    indexes: list[FileIdentity | None]
    cache: tuple[str, int]
    tokenizer: str
    vocab_size: int
    settings: RowSettings
    shuffle: bool
    validation_below: int
    unreadable_share: float
    sources: list[SourcePlan]
    phases: list[tuple[list[int], int | None]]
    assignment: StreamAssignment
    streams: list[int]
    first: int

    def source_files(self) -> list[SourceFile]:
        """The files, ready to be opened."""
        cache = Cache(Path(self.cache[0]), self.cache[1])

        def file(known: FileIdentity) -> SourceFile:
            path, column, size, mtime_ns, etag = known
            return SourceFile(path, column, 0, size, mtime_ns, etag=etag, cached_store=open_cached_store(path, cache))

        return [
            replace(file(known), index=None if index is None else file(index))
            for known, index in zip(self.files, self.indexes, strict=True)
        ]

    @property
    def vocabulary(self) -> Vocabulary:
        """What documents that are tokens may hold."""
        return Vocabulary(self.vocab_size, self.settings.end)

    def send(self, stream: IO[bytes], cursors: Int64s) -> None:
        """Tell a worker; ``cursors`` is int64, (streams, sources, 3), of all streams."""
        stream.write(json.dumps(asdict(self)).encode() + b"\n")
        stream.write(cursors.astype("<i8").tobytes())
        stream.flush()

    @classmethod
    def receive(cls, stream: IO[bytes]) -> "tuple[WorkerPlan, Int64s]":
        """What the parent sent."""
        told = json.loads(stream.readline())
        told["settings"] = RowSettings(**told["settings"])
        told["assignment"] = StreamAssignment(**told["assignment"])
        told["sources"] = [SourcePlan(**source) for source in told["sources"]]
        plan = cls(**told)
        shape = (plan.assignment.streams, len(plan.sources), 3)
        cursors = np.frombuffer(stream.read(8 * int(np.prod(shape))), dtype="<i8")
        return plan, cursors.reshape(shape)


class Frame(NamedTuple):
    """One message of a worker.

    Attributes:
        kind: a row; that a stream passed one that another rank takes; a sentence for the user; or an error, and no
            more after it: of the data, of the disk, or our own.
        sample, stream, source: which sample.
        cursor: where the stream goes on after it.
        content: the row (see ``pack_row``), or the message.
    """

    kind: int
    sample: int
    stream: int
    source: int
    cursor: StreamCursor
    content: bytes

    def send(self, stream: IO[bytes]) -> None:
        """Write it."""
        numbers = (self.kind, self.sample, self.stream, self.source, *self.cursor, len(self.content))
        stream.write(np.array([numbers], dtype=_HEAD).tobytes())
        stream.write(self.content)

    @classmethod
    def receive(cls, stream: IO[bytes]) -> "Frame | None":
        """The next one; None where the worker has ended."""
        head = stream.read(_HEAD.itemsize)
        if len(head) < _HEAD.itemsize:
            return None
        kind, sample, number, source, turn, row, place, size = np.frombuffer(head, dtype=_HEAD)[0].item()
        content = stream.read(size)
        if len(content) < size:
            return None
        return cls(kind, sample, number, source, StreamCursor(turn, row, place), content)


def pack_row(inputs_S: Int64s, labels_S: Int64s, positions_S: Int64s | None) -> bytes:
    """A row as bytes: int32 each, positions where documents are isolated. Token ids are below 2^31."""
    columns = [inputs_S, labels_S] if positions_S is None else [inputs_S, labels_S, positions_S]
    return np.stack(columns).astype("<i4").tobytes()


def unpack_rows(contents: list[bytes], length: int, isolate: bool) -> Iterator[Int64s]:
    """Inputs, labels and, where documents are isolated, positions of several rows: int64, (rows, S) each."""
    columns = 3 if isolate else 2
    packed = np.frombuffer(b"".join(contents), dtype="<i4").reshape(len(contents), columns, length)
    yield from (packed[:, column].astype(np.int64) for column in range(columns))
