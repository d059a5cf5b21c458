"""This rank's samples of each step, tokenized by worker processes, and the cursors of the streams.

workers, each with some of the streams --frames--> rows of the step, in order --> Batch, and the cursors after it
"""

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hlat.data.online.stream_assignment import assign_streams
from hlat.data.online.worker_protocol import (
    DATA_ERROR,
    INTERNAL_ERROR,
    NOTE,
    ROW,
    STORAGE_ERROR,
    Frame,
    WorkerPlan,
    unpack_rows,
)
from hlat.data.samples.row_filling import NO_LABEL
from hlat.data.samples.training_data import Batch
from hlat.model import IGNORED
from hlat.runtime.distributed.sendable_types import sendable
from hlat.runtime.errors import DataError, StorageError
from hlat.runtime.process.progress import ProgressRecord

Int64s = npt.NDArray[np.int64]


@sendable
class StreamProgress(NamedTuple):
    """Positions of the streams after a batch.

    Attributes:
        streams: index of each stream that moved, int64, shape (n,).
        sources: index of its source, int64, shape (n,).
        cursors: its new cursor, int64, shape (n, 3).
    """

    streams: Int64s
    sources: Int64s
    cursors: Int64s


class CursorTable:
    """The cursor of every stream of every source: the complete state of online data.

    Attributes:
        values: int64, shape (streams, sources, 3): block, row in the block, offset. See ``stream.StreamCursor``.
    """

    def __init__(self, streams: int, sources: int) -> None:
        self.values = np.zeros((streams, sources, 3), dtype=np.int64)

    def advance(self, progress: StreamProgress) -> None:
        """Store the cursors after a batch."""
        self.values[progress.streams, progress.sources] = progress.cursors


class _Worker:
    """A tokenizing process and the frames it sends."""

    def __init__(self, plan: WorkerPlan, cursors: Int64s) -> None:
        threads = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
        with ProgressRecord.open_file() as file:
            self._progress, descriptor = ProgressRecord.starting(file), file.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hlat.data.online.worker", str(descriptor)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **threads},
                pass_fds=[descriptor],
                start_new_session=True,  # Ctrl-C must reach only the parent, which ends its workers itself
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: frame() will raise
            plan.send(self._process.stdin, cursors)

    def frame(self) -> Frame:
        """Return the next frame.

        Raises:
            DataError: text cannot be read, or the process was killed.
            StorageError: the disk of the cache cannot be read or written.
        """
        assert self._process.stdout is not None
        frame = Frame.receive(self._process.stdout)
        if frame is None:
            code = self._process.wait()
            cause = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            reason = (
                "because a file was cut off while it was read" if code == -signal.SIGBUS else "because memory ran out"
            )
            error = DataError(f"a tokenizing process {cause}, perhaps {reason}. Run again to resume.")
            error.retryable = True
            raise error
        if frame.kind in (DATA_ERROR, STORAGE_ERROR, INTERNAL_ERROR):
            error_type = {DATA_ERROR: DataError, STORAGE_ERROR: StorageError, INTERNAL_ERROR: RuntimeError}[frame.kind]
            raise error_type(frame.content.decode(errors="replace"))
        return frame

    def silence(self) -> float:
        """Return the seconds since the last sign of life of the process."""
        return self._progress.silence(0.0, self._process.pid)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self._process.wait()


class OnlineLoader:
    """Reads this rank's samples, one step after the other.

    Args:
        plan: the plan; ``first`` and ``streams`` are set here.
        cursors: initial positions of the streams; not changed.
        first: the first global sample.
        workers: number of processes to start.
        notify: called with a note for the user as soon as a worker sends one: it may explain why ``read`` takes long.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        cursors: Int64s,
        first: int,
        workers: int,
        notify: Callable[[str], None],
    ) -> None:
        self._plan, self._assignment, self._next = plan, plan.assignment, first
        self._notify = notify
        owned = self._assignment.owned
        count = min(workers, len(owned))
        self._worker_of_stream = np.full(self._assignment.streams, -1, dtype=np.int64)
        self._workers: list[_Worker] = []
        self._waited_for: _Worker | None = None
        for number in range(count):
            streams = owned[number::count]
            self._worker_of_stream[streams] = number
            share = (self._assignment.index * count + number, self._assignment.ranks * count)
            own_plan = replace(plan, streams=streams.tolist(), first=first, share=share)
            self._workers.append(_Worker(own_plan, cursors))

    def read(self, first: int) -> tuple[Batch, StreamProgress]:
        """Return this rank's samples of the step that begins with global sample ``first``, and the cursors after it.

        Steps must be read in order.

        Raises:
            DataError: text cannot be read, or a worker was killed.
            StorageError: the disk of the cache cannot be read or written.
        """
        assert first == self._next, "steps are read in order"
        assignment = self._assignment
        batch = assignment.batches.batch_at(first)
        step = np.arange(batch.start, batch.stop, dtype=np.int64)
        workers = self._worker_of_stream[assign_streams(assignment.seed, assignment.streams, step)]
        frames = [self._frame(self._workers[number]) for number in workers.tolist() if number >= 0]
        expected = step[workers >= 0].tolist()
        assert [frame.sample for frame in frames] == expected, "workers send rows in the order of samples"
        self._next = batch.stop
        return self._batch([frame for frame in frames if frame.kind == ROW]), _progress(frames)

    def silence(self) -> float:
        """Return the seconds since the last sign of life of the worker that ``read`` waits for; from any thread."""
        return math.inf if self._waited_for is None else self._waited_for.silence()

    def _frame(self, worker: _Worker) -> Frame:
        self._waited_for = worker
        while (frame := worker.frame()).kind == NOTE:
            self._notify(frame.content.decode())
        return frame

    def _batch(self, frames: list[Frame]) -> Batch:
        settings = self._plan.settings
        inputs, labels, *positions = unpack_rows([frame.content for frame in frames], settings.length, settings.isolate)
        labels[labels == NO_LABEL] = IGNORED
        return Batch(
            torch.from_numpy(inputs),
            torch.from_numpy(labels),
            np.array([frame.sample for frame in frames], dtype=np.int64),
            torch.from_numpy(positions[0]) if positions else None,
        )

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.close()


def _progress(frames: list[Frame]) -> StreamProgress:
    last = {(frame.stream, frame.source): frame.cursor for frame in frames}
    return StreamProgress(
        np.array([stream for stream, _ in last], dtype=np.int64),
        np.array([source for _, source in last], dtype=np.int64),
        np.array(list(last.values()), dtype=np.int64).reshape(-1, 3),
    )
