"""A worker process: tokenizes some streams, and sends their rows to the parent in the order of the samples.

It is a helper process in a new interpreter, and does not import torch. It works ahead until the channel and a short
queue are full. After an error, which is its last message, it ends.
"""

import contextlib
import logging
import os
import queue
import resource
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from itertools import count as numbers_from
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hlat.data.documents import Content, tokenize_contents
from hlat.data.online.blocks import DocumentReader
from hlat.data.online.streams import Int64s, RowStream, StreamCursor, assign_streams
from hlat.data.online.worker_protocol import Frame, WorkerPlan, pack_row
from hlat.data.samples.order import Mixture
from hlat.data.tokenizers.base import Tokenizer
from hlat.data.tokenizers.load import load_saved
from hlat.runtime.errors import DataError
from hlat.runtime.helper_process import Channel

_TOGETHER = 64  # rows whose text is tokenized in one batch
_LOOK_AGAIN = 60.0  # seconds between two looks at the stamps of the files
_AHEAD = 256  # maximum finished rows waiting for the parent
_SENT_TOGETHER = 16  # rows and notes

Message = Frame | str | Exception
"""A row, a note for the user, or the error that ends the worker."""


class _SampleRequest(NamedTuple):
    """A sample, and the stream and source of its row."""

    sample: int
    stream: int
    source: int
    taken: bool  # whether this rank takes the row; otherwise the stream only skips it


class RowProducer:
    """The rows of some streams, in the order of their samples.

    ``cursors`` are the initial positions of all streams, int64, shape (streams, sources, 3).
    """

    def __init__(self, plan: WorkerPlan, cursors: Int64s) -> None:
        self._plan, self._cursors = plan, cursors
        self._tokenizer: Tokenizer = load_saved(Path(plan.tokenizer))
        self._mixture = Mixture(plan.phases)
        self._partitions = [source.partition_count(plan.assignment.streams) for source in plan.sources]
        # A stream keeps every so many rows of its partition; the others are those of other streams.
        self._strides = [plan.assignment.streams // count for count in self._partitions]
        self._reader = DocumentReader(plan)
        self.content = self._reader.content
        self._streams: dict[tuple[int, int], RowStream] = {}
        self._characters, self._tokens = 4.0, 1.0  # totals so far, to estimate characters per token

    def frames(self) -> Iterator[Frame | str]:
        """Yield rows and notes, without end; DataError if text cannot be read."""
        requests = self._requests()
        while True:
            batch = list(islice(requests, _TOGETHER))
            self._tokenize_for(batch)
            yield from self._reader.bad_rows.notes()
            yield from (self._frame(request) for request in batch)

    def _requests(self) -> Iterator[_SampleRequest]:
        """Yield the samples of this worker's streams, in order, without end."""
        plan, assignment = self._plan, self._plan.assignment
        is_own = np.zeros(assignment.streams, dtype=bool)
        is_own[plan.streams] = True
        for number in numbers_from(assignment.batches.containing(plan.first)):
            batch = assignment.batches.batch(number)
            step = np.arange(batch.start, batch.stop, dtype=np.int64)
            streams = assign_streams(assignment.seed, assignment.streams, step)
            taken = np.isin(step, assignment.samples(batch.start))
            sources, _ = self._mixture.locate(step)
            selected = is_own[streams] & (step >= plan.first)
            columns = (step[selected], streams[selected], sources[selected], taken[selected])
            yield from map(_SampleRequest._make, zip(*(column.tolist() for column in columns), strict=True))

    def _tokenize_for(self, requests: list[_SampleRequest]) -> None:
        counts = Counter((request.stream, request.source) for request in requests)
        rows = {
            self._stream(*key): self._skipped(*key) + 1 + (count - 1) * self._strides[key[1]]
            for key, count in counts.items()
        }
        # Several rounds: the tokens of a text are only estimated, and best-fit may need more once it has some.
        while True:
            waiting: deque[tuple[RowStream, int]] = deque()
            contents: list[Content] = []
            for stream, count in rows.items():
                if missing := stream.missing_tokens(count):
                    pieces = stream.next_pieces(missing, self._characters / self._tokens)
                    waiting.append((stream, len(pieces)))
                    contents += pieces
            if not waiting:
                return
            tokens = tokenize_contents(contents, self._tokenizer)
            for content, ids in zip(contents, tokens, strict=True):
                if isinstance(content, str):
                    self._characters += len(content)
                    self._tokens += len(ids)
            for stream, count in waiting:
                stream.add_tokens(tokens[:count])
                del tokens[:count]

    def _stream(self, number: int, source: int) -> RowStream:
        key = (number, source)
        if key not in self._streams:
            partition, cursor = number % self._partitions[source], StreamCursor(*self._cursors[number, source].tolist())
            documents = self._reader.documents(source, partition, self._partitions[source])
            self._streams[key] = RowStream(self._plan.settings, documents, cursor, self._tokenizer.chunks)
        return self._streams[key]

    def _skipped(self, number: int, source: int) -> int:
        """Return the partition's rows that other streams keep before this stream's next row."""
        # At the very beginning; later, a whole stride separates its rows.
        if self._stream(number, source).cursor == StreamCursor():
            return number // self._partitions[source]
        return self._strides[source] - 1

    def _frame(self, request: _SampleRequest) -> Frame:
        """Return the frame of a requested sample; its stream must have enough tokens."""
        stream = self._stream(request.stream, request.source)
        for _ in range(self._skipped(request.stream, request.source)):
            stream.next_row()
        segments = stream.next_row()
        # Where another rank takes the row, the stream has still moved on, and the parent keeps its cursor.
        content = pack_row(segments, self._plan.settings) if request.taken else b""
        return Frame(request.sample, request.stream, request.source, stream.cursor, content)


def serve(channel: Channel, plan: WorkerPlan, cursors: Int64s) -> None:
    """Send frames and notes to one parent; the arguments are those of ``RowProducer``."""
    _open_many_files()
    ready: queue.Queue[Message] = queue.Queue(maxsize=_AHEAD)
    logging.getLogger("hlat").addHandler(_ParentLogHandler(ready))
    producing = threading.Thread(target=_produce, args=(plan, cursors, ready), daemon=True)
    producing.start()
    while True:
        messages = [ready.get()]
        # Several at once, if the parent is slower: of short rows, a message of its own would be most of the work.
        while not isinstance(messages[-1], Exception) and len(messages) < _SENT_TOGETHER and not ready.empty():
            messages.append(ready.get())
        *before, last = messages
        channel.send(before if isinstance(last, Exception) else messages)
        if isinstance(last, Exception):
            raise last


def _produce(plan: WorkerPlan, cursors: Int64s, ready: "queue.Queue[Message]") -> None:
    try:
        rows = RowProducer(plan, cursors)
        recording = threading.Thread(target=_record_content, args=(rows, plan.share, ready), daemon=True)
        for number, frame in enumerate(rows.frames()):
            ready.put(frame)
            if number == 0:  # not before: the first batch should not wait for the disk
                recording.start()
    except Exception as error:
        ready.put(error)


def _record_content(rows: "RowProducer", share: tuple[int, int], ready: "queue.Queue[Message]") -> None:
    """Record or compare the content of this worker's share of the files, again whenever one is written."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # training must not become slower by it
    try:
        while True:
            # A difference ends the run. Other workers do not read these files completely, however many of their blocks
            # they read.
            rows.content.complete(*share)
            time.sleep(_LOOK_AGAIN)
    except DataError as error:
        ready.put(error)


class _ParentLogHandler(logging.Handler):
    """Sends log records to the parent, which shows them to the user."""

    def __init__(self, ready: "queue.Queue[Message]") -> None:
        super().__init__(logging.WARNING)  # such as that an object store does not answer: it explains why no row comes
        self._ready = ready

    def emit(self, record: logging.LogRecord) -> None:
        self._ready.put(record.getMessage())


def _open_many_files() -> None:
    # Each stream has a file of each source open, often more than the usual limit of 1024.
    _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS allows fewer than the hard limit says
        resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))
