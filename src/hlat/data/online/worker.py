"""A process that tokenizes some streams and sends their rows in the order in which they are wanted.

It is started as a program of its own (``python -m hlat.data.online.worker``), brings no torch along, works ahead until
the pipe and a short queue are full, and ends as soon as its stdin does, however the parent died.
"""

import logging
import os
import queue
import resource
import sys
import threading
import traceback
from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from hlat.data.formats import Content, tokenize_contents
from hlat.data.online.documents import DocumentReader
from hlat.data.online.stream import RowStream, StreamCursor
from hlat.data.online.stream_assignment import assign_streams, row_stride
from hlat.data.online.worker_protocol import (
    DATA_ERROR,
    INTERNAL_ERROR,
    NOTE,
    ROW,
    SKIPPED,
    STORAGE_ERROR,
    Frame,
    Int64s,
    WorkerPlan,
    pack_row,
)
from hlat.data.samples import Mixture, PhaseWeights, fill_row
from hlat.data.tokenizers import Tokenizer, load_saved
from hlat.runtime import HlatError, StorageError

_TOGETHER = 64  # rows for which text is tokenized in one go
_AHEAD = 256  # finished rows that wait for the parent


class _SampleRequest(NamedTuple):
    sample: int
    stream: int
    source: int
    taken: bool  # by this rank; else the stream only has to pass it


class RowProducer:
    """The rows of some streams, in the order of their samples.

    Args:
        plan: which, of what.
        cursors: where all streams begin, int64, (streams, sources, 3).
    """

    def __init__(self, plan: WorkerPlan, cursors: Int64s) -> None:
        self._plan, self._cursors = plan, cursors
        self._tokenizer: Tokenizer = load_saved(Path(plan.tokenizer))
        self._mixture = Mixture([PhaseWeights(tuple(weights), stop) for weights, stop in plan.phases])
        self._parts = [source.partition_count(plan.assignment.streams) for source in plan.sources]
        self._reader = DocumentReader(plan)
        self._streams: dict[tuple[int, int], RowStream] = {}
        self._characters, self._tokens = 4.0, 1.0

    def frames(self) -> Iterator[Frame]:
        """Rows, for ever.

        Raises:
            DataError: text that cannot be read.
        """
        wanted = self._wanted()
        while True:
            together = list(islice(wanted, _TOGETHER))
            self._fill(together)
            for note in self._reader.notes():
                yield _message_frame(NOTE, note)
            yield from (self._frame(one) for one in together)

    def _wanted(self) -> Iterator[_SampleRequest]:
        plan, share = self._plan, self._plan.assignment
        mine = np.zeros(share.streams, dtype=bool)
        mine[plan.streams] = True
        first = plan.first - plan.first % share.batch
        while True:
            step = np.arange(first, first + share.batch, dtype=np.int64)
            streams = assign_streams(share.seed, share.streams, step)
            taken = np.isin(step, share.samples(first))
            sources, _ = self._mixture.locate(step)
            here = mine[streams] & (step >= plan.first)
            columns = (step[here], streams[here], sources[here], taken[here])
            yield from map(_SampleRequest._make, zip(*(column.tolist() for column in columns), strict=True))
            first += share.batch

    def _fill(self, wanted: list[_SampleRequest]) -> None:
        """Tokenize as much as these rows take."""
        counts = Counter((one.stream, one.source) for one in wanted)
        rows = {self._stream(*key): self._rows_for(key, count) for key, count in counts.items()}
        while True:
            asking: deque[tuple[RowStream, int]] = deque()
            contents: list[Content] = []
            for stream, count in rows.items():
                if lacking := stream.missing_tokens(count):
                    found = stream.next_pieces(lacking, self._characters / self._tokens)
                    asking.append((stream, len(found)))
                    contents += found
            if not asking:
                return
            tokens = tokenize_contents(contents, self._tokenizer)
            for content, ids in zip(contents, tokens, strict=True):
                if isinstance(content, str):
                    self._characters += len(content)
                    self._tokens += len(ids)
            for stream, count in asking:
                stream.add_tokens(tokens[:count])
                del tokens[:count]

    def _stream(self, number: int, source: int) -> RowStream:
        key = (number, source)
        if key not in self._streams:
            part, cursor = number % self._parts[source], StreamCursor(*self._cursors[number, source].tolist())
            documents = self._reader.documents(source, part, self._parts[source])
            self._streams[key] = RowStream(self._plan.settings, documents, cursor, self._tokenizer.chunks)
        return self._streams[key]

    def _skipped(self, key: tuple[int, int]) -> int:
        """Rows of its part that other streams keep, before the next one that this stream does."""
        number, source = key
        if self._stream(*key).cursor == StreamCursor():
            return number // self._parts[source]
        return row_stride(self._plan.assignment.streams, self._parts[source]) - 1

    def _rows_for(self, key: tuple[int, int], count: int) -> int:
        between = row_stride(self._plan.assignment.streams, self._parts[key[1]])
        return self._skipped(key) + 1 + (count - 1) * between

    def _frame(self, one: _SampleRequest) -> Frame:
        stream = self._stream(one.stream, one.source)
        for _ in range(self._skipped((one.stream, one.source))):
            stream.next_row()
        parts, length = stream.next_row(), self._plan.settings.length
        if not one.taken:
            return Frame(SKIPPED, one.sample, one.stream, one.source, stream.cursor, b"")
        inputs_S, labels_S = np.empty(length, dtype=np.int64), np.empty(length, dtype=np.int64)
        positions_S = np.empty(length, dtype=np.int64) if self._plan.settings.isolate else None
        fill_row(parts, inputs_S, labels_S, positions_S)
        content = pack_row(inputs_S, labels_S, positions_S)
        return Frame(ROW, one.sample, one.stream, one.source, stream.cursor, content)


def main() -> None:
    """Serve one parent: a plan comes in on stdin, frames go to stdout."""
    frames = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not be taken for a frame
    _open_many_files()
    plan, cursors = WorkerPlan.receive(sys.stdin.buffer)
    threading.Thread(target=_wait_for_end, args=(sys.stdin.buffer,), daemon=True).start()
    ready: queue.Queue[Frame] = queue.Queue(maxsize=_AHEAD)
    threading.Thread(target=_send, args=(ready, frames), daemon=True).start()
    logging.getLogger("hlat").addHandler(_ParentLogHandler(ready))
    try:
        for frame in RowProducer(plan, cursors).frames():
            ready.put(frame)
    except Exception as error:
        ready.put(_error_frame(error))
    threading.Event().wait()  # until stdin ends


def _send(ready: "queue.Queue[Frame]", frames: IO[bytes]) -> None:
    try:
        while True:
            ready.get().send(frames)
            if ready.empty():
                frames.flush()
    except BrokenPipeError:
        os._exit(0)


def _wait_for_end(stream: IO[bytes]) -> None:
    stream.read()
    os._exit(0)  # at once, even in the middle of a row: nobody waits for it any more


def _error_frame(error: Exception) -> Frame:
    """What the parent needs to raise the same error."""
    if isinstance(error, HlatError):
        return _message_frame(STORAGE_ERROR if isinstance(error, StorageError) else DATA_ERROR, str(error))
    return _message_frame(INTERNAL_ERROR, "a tokenizing process failed:\n" + "".join(traceback.format_exception(error)))


def _message_frame(kind: int, text: str) -> Frame:
    return Frame(kind, -1, -1, -1, StreamCursor(), text.encode(errors="backslashreplace"))


class _ParentLogHandler(logging.Handler):
    """Sends what is logged to the parent, which knows where its user looks: a store that does not answer, above all."""

    def __init__(self, ready: "queue.Queue[Frame]") -> None:
        super().__init__(logging.WARNING)
        self._ready = ready

    def emit(self, record: logging.LogRecord) -> None:
        self._ready.put(_message_frame(NOTE, record.getMessage()))


def _open_many_files() -> None:
    """As many as the system allows: every stream has a file of each source open, which may be more than 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    main()
