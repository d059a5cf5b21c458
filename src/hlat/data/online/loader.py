"""This rank's samples of each step, tokenized by processes of its own, and how far the streams have come.

workers, each some of the streams --frames--> rows of the step, in order --> Batch, with the cursors after it
"""

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
from hlat.data.samples import NO_LABEL, Batch
from hlat.model import IGNORED
from hlat.runtime import DataError, StorageError
from hlat.runtime.distributed import sendable

Int64s = npt.NDArray[np.int64]


@sendable
class StreamProgress(NamedTuple):
    """Where streams go on after a batch.

    Attributes:
        streams, sources: which, int64, (n,).
        cursors: int64, (n, 3).
    """

    streams: Int64s
    sources: Int64s
    cursors: Int64s


class CursorTable:
    """How far every stream of every source has come: the whole state of the data.

    Attributes:
        values: int64, (streams, sources, 3): blocks left behind, row in the block, place. See ``stream.Cursor``.
    """

    def __init__(self, streams: int, sources: int) -> None:
        self.values = np.zeros((streams, sources, 3), dtype=np.int64)

    def advance(self, progress: StreamProgress) -> None:
        """Take note of what a batch has consumed; the last word on a stream counts."""
        self.values[progress.streams, progress.sources] = progress.cursors


class _Worker:
    """A tokenizing process and the frames that it sends."""

    def __init__(self, plan: WorkerPlan, cursors: Int64s) -> None:
        threads = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hlat.data.online.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **threads},
            start_new_session=True,  # Ctrl-C is for the parent, which ends its workers itself
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended: the first frame that is missing says so
            plan.send(self._process.stdin, cursors)

    def frame(self) -> Frame:
        """The next frame.

        Raises:
            DataError: text that cannot be read, or the process has been killed.
            StorageError: the disk of the cache refused.
        """
        assert self._process.stdout is not None
        found = Frame.receive(self._process.stdout)
        if found is None:
            code = self._process.wait()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            why = "because a file was cut off while it was read" if code == -signal.SIGBUS else "because memory ran out"
            error = DataError(f"a tokenizing process {how}, perhaps {why}. Run again to go on.")
            error.retryable = True
            raise error
        if found.kind in (DATA_ERROR, STORAGE_ERROR, INTERNAL_ERROR):
            kind = {DATA_ERROR: DataError, STORAGE_ERROR: StorageError, INTERNAL_ERROR: RuntimeError}[found.kind]
            raise kind(found.content.decode(errors="replace"))
        return found

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
        plan: what to read; ``first`` and ``streams`` are filled in here.
        cursors: where the streams begin; not changed.
        first: the first sample.
        workers: processes to start.
        token_bytes: bytes of text of each token id, (vocabulary,).
        say: takes a sentence for the user, as soon as a process has one: it may be why ``read`` takes its time.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        cursors: Int64s,
        first: int,
        workers: int,
        token_bytes: Int64s,
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._share, self._next, self._token_bytes = plan, plan.assignment, first, token_bytes
        self._say = say
        owned = self._share.owned
        count = min(workers, len(owned))
        self._serves = np.full(self._share.streams, -1, dtype=np.int64)
        self._workers: list[_Worker] = []
        for number in range(count):
            streams = owned[number::count]
            self._serves[streams] = number
            self._workers.append(_Worker(replace(plan, streams=streams.tolist(), first=first), cursors))

    def read(self, first: int) -> tuple[Batch, StreamProgress]:
        """This rank's samples of the step that begins with global sample ``first``, and the cursors after it.

        Steps have to be asked for in order.

        Raises:
            DataError: text that cannot be read, or a process has been killed.
            StorageError: the disk of the cache refused.
        """
        assert first == self._next, "steps are read in order"
        share = self._share
        step = np.arange(first, first + share.batch, dtype=np.int64)
        served = self._serves[assign_streams(share.seed, share.streams, step)]
        frames = [self._frame(self._workers[number]) for number in served.tolist() if number >= 0]
        expected = step[served >= 0].tolist()
        assert [frame.sample for frame in frames] == expected, "workers send rows in the order of samples"
        self._next = first + share.batch
        return self._batch([frame for frame in frames if frame.kind == ROW]), _progress(frames)

    def _frame(self, worker: _Worker) -> Frame:
        while (frame := worker.frame()).kind == NOTE:
            self._say(frame.content.decode())
        return frame

    def _batch(self, frames: list[Frame]) -> Batch:
        settings = self._plan.settings
        inputs, labels, *positions = unpack_rows([frame.content for frame in frames], settings.length, settings.isolate)
        target_bytes = int(self._token_bytes[labels[labels != NO_LABEL]].sum())
        labels[labels == NO_LABEL] = IGNORED
        return Batch(
            torch.from_numpy(inputs),
            torch.from_numpy(labels),
            np.array([frame.sample for frame in frames], dtype=np.int64),
            target_bytes,
            torch.from_numpy(positions[0]) if positions else None,
        )

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()


def _progress(frames: list[Frame]) -> StreamProgress:
    last = {(frame.stream, frame.source): frame.cursor for frame in frames}
    return StreamProgress(
        np.array([stream for stream, _ in last], dtype=np.int64),
        np.array([source for _, source in last], dtype=np.int64),
        np.array(list(last.values()), dtype=np.int64).reshape(-1, 3),
    )
