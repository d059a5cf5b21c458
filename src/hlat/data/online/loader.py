"""The training process's side of online data: the plan of its workers, their rows in order, the cursors of the streams.

recipe and prepared data --build_worker_plan--> WorkerPlan: everything the tokenizing processes of a rank need
workers, each with some of the streams --frames--> rows of the step, in order --> Batch, and the cursors after it
OnlineData: notes for the user, initial cursors, and a loader per rank, for the other rooms
"""

import math
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from hlat.config import BatchSchedule, DataConfig
from hlat.data.corpus_files import cache_location
from hlat.data.online.streams import Int64s, RowSettings, StreamAssignment, assign_streams
from hlat.data.online.worker_protocol import Frame, SourcePlan, WorkerPlan, unpack_rows
from hlat.data.prepared.manifest import SourceRecord
from hlat.data.prepared.prepared_folder import PreparedData
from hlat.data.samples.order import PhaseWeights, is_weighted, phase_weights
from hlat.data.samples.packing import NO_LABEL
from hlat.data.samples.training_data import Batch
from hlat.data.stores.local_files import file_stamp
from hlat.model import IGNORED
from hlat.runtime.distributed.sendable_types import sendable
from hlat.runtime.errors import DataError
from hlat.runtime.helper_process import SINGLE_THREAD, HelperProcess, PeerEnded, start_program
from hlat.runtime.random_keys import stream_key
from hlat.runtime.terminal import first_of, listed, plural
from hlat.runtime.urls import is_url


def build_worker_plan(
    prepared: PreparedData, config: DataConfig, seed: int, assignment: StreamAssignment
) -> WorkerPlan:
    """Return the plan for a rank's workers: everything that decides which tokens form which sample.

    DataError if a file is missing or has changed, or a phase has no sample of its own.
    """
    manifest = prepared.manifest
    assert manifest.blocks is not None, "prepared for mode online"
    sources, phases = _sources_and_phases(config, manifest.blocks.counts, seed)
    folder, limit = cache_location(config, prepared.dir)
    return WorkerPlan(
        block_file=str(prepared.dir / manifest.blocks.file),
        files=[_as_now(source) for source in manifest.sources],
        cache=(str(folder), limit),
        tokenizer=str(prepared.tokenizer_dir),
        vocab_size=manifest.vocab_size,
        settings=RowSettings(config.sequence_length, config.packing, config.isolate, manifest.eos_id),
        shuffle=config.shuffle,
        validation_below=manifest.blocks.below,
        unreadable_share=config.unreadable_rows,
        sources=sources,
        phases=phases,
        assignment=assignment,
        streams=[],
        first=0,
        records=[str(folder) for folder in prepared.record_folders or [prepared.dir]],
        fingerprint=prepared.fingerprint,
    )


def _as_now(source: SourceRecord) -> SourceRecord:
    """Return the record of a file as the file system reports it now."""
    index = None if source.index is None else _as_now(source.index)
    if is_url(source.path):
        return source
    size, mtime_ns, *_ = file_stamp(Path(source.path))
    if size != source.bytes:
        raise DataError(
            f"{source.path}: has {size:,} bytes, had {source.bytes:,} when this data was prepared. Restore the "
            "file, or start a new run with another run.dir."
        )
    # The time of now: a file may be moved or touched between runs, but must not change during training.
    return source.model_copy(update={"mtime_ns": mtime_ns, "index": index})


def _sources_and_phases(
    config: DataConfig, counts: list[int], seed: int
) -> tuple[list[SourcePlan], list[PhaseWeights]]:
    """Plan the sources, given by their numbers of blocks; without weights they are one, all joined."""
    if not is_weighted(config):
        repeats = [source.repeat for source in config.sources] or [1.0]
        return [SourcePlan("the corpus", 0, counts, repeats, seed)], [PhaseWeights((1,))]
    plans = [
        SourcePlan(source.label, sum(counts[:index]), [count], [1.0], stream_key(seed, "source", index))
        for index, (source, count) in enumerate(zip(config.sources, counts, strict=True))
    ]
    return plans, phase_weights(config)


@sendable
class StreamProgress(NamedTuple):
    """Positions of the streams after a batch."""

    streams: Int64s  # index of each stream that moved, int64, shape (n,)
    sources: Int64s  # index of its source, int64, shape (n,)
    cursors: Int64s  # its new cursor, int64, shape (n, 3)


class CursorTable:
    """The cursor of every stream of every source: the complete state of online data."""

    def __init__(self, streams: int, sources: int) -> None:
        self.values = np.zeros((streams, sources, 3), dtype=np.int64)  # block, row, offset of each StreamCursor

    def advance(self, progress: StreamProgress) -> None:
        self.values[progress.streams, progress.sources] = progress.cursors


def _messages(worker: HelperProcess) -> Iterator[Frame | str]:
    """Yield the rows and notes of a worker; its error, or DataError if it was killed."""
    try:
        while True:
            yield from worker.receive()
    except PeerEnded as end:
        reason = (
            # SIGBUS: a memory-mapped page is no longer in the file.
            "because a file was cut off while it was read" if end.code == -signal.SIGBUS else "because memory ran out"
        )
        error = DataError(f"{end}, perhaps {reason}. Run again to resume.")
        error.retryable = True  # killed from outside: the same run may well succeed
        raise error from None


class OnlineLoader:
    """Reads this rank's samples, one step after the other.

    Starts up to ``workers`` processes, from global sample ``first`` and ``cursors``, which are not changed; ``first``
    and ``streams`` of the plan are set here. ``notify`` is called with a worker's note as soon as it comes: it may
    explain why ``read`` takes long.
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
        count = min(workers, len(owned))  # a stream is tokenized by one process
        self._worker_of_stream = np.full(self._assignment.streams, -1, dtype=np.int64)
        self._workers: list[HelperProcess] = []
        self._messages: list[Iterator[Frame | str]] = []  # of each worker
        self._waited_for: HelperProcess | None = None
        for number in range(count):
            streams = owned[number::count]
            self._worker_of_stream[streams] = number
            share = (self._assignment.index * count + number, self._assignment.ranks * count)
            own_plan = replace(plan, streams=streams.tolist(), first=first, share=share)
            # One thread each: the workers share the cores.
            worker = start_program(
                "hlat.data.online.worker:serve",
                *(own_plan, cursors),
                name="a tokenizing process",
                environment=SINGLE_THREAD,
            )
            self._workers.append(worker)
            self._messages.append(_messages(worker))

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
        frames = [self._frame(number) for number in workers.tolist() if number >= 0]
        expected = step[workers >= 0].tolist()
        assert [frame.sample for frame in frames] == expected, "workers send rows in the order of samples"
        self._next = batch.stop
        return self._batch([frame for frame in frames if frame.content]), _progress(frames)

    def silence(self) -> float:
        """Return the seconds since the last sign of life of the worker that ``read`` waits for."""
        return math.inf if self._waited_for is None else self._waited_for.silence()  # called from any thread

    def _frame(self, worker: int) -> Frame:
        self._waited_for = self._workers[worker]
        while isinstance(message := next(self._messages[worker]), str):
            self._notify(message)
        return message

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
        """End the worker processes."""
        for worker in self._workers:
            worker.kill()


def _progress(frames: list[Frame]) -> StreamProgress:
    # The last frame of a stream has its newest cursor.
    last = {(frame.stream, frame.source): frame.cursor for frame in frames}
    return StreamProgress(
        np.array([stream for stream, _ in last], dtype=np.int64),
        np.array([source for _, source in last], dtype=np.int64),
        np.array(list(last.values()), dtype=np.int64).reshape(-1, 3),
    )


class OnlineData:
    """The training samples of a run that tokenizes during training.

    DataError if a phase has no sample of its own, or the cache is smaller than the files that the streams read at a
    time.
    """

    def __init__(
        self, prepared: PreparedData, config: DataConfig, seed: int, batches: BatchSchedule, ranks: int
    ) -> None:
        assignment = StreamAssignment(0, ranks, batches, config.streams, seed)
        self._plan = build_worker_plan(prepared, config, seed, assignment)
        self._workers = config.workers or 1
        self._refuse_small_cache(config)

    @property
    def is_evenly_assigned(self) -> bool:
        return self._plan.assignment.is_even

    @property
    def notes(self) -> list[str]:
        """Notes on blocks and streams, and on settings that would waste less tokenization, one sentence each."""
        plan, assignment = self._plan, self._plan.assignment
        blocks = listed(f"{plural(sum(source.blocks), 'block')} of {source.name}" for source in plan.sources)
        notes = [f"tokenizing while training: {blocks}, distributed to {plural(assignment.streams, 'stream')}"]
        if not assignment.is_even:
            notes.append(
                f"data.streams = {assignment.streams} cannot be divided evenly among {assignment.ranks} data-parallel "
                f"ranks with batch.global_batch = {assignment.batches.size}: each rank tokenizes all of the text. For "
                f"a new run, data.streams = {assignment.nearest_even_streams()} avoids this."
            )
        repeated = list[str]()
        for source in plan.sources:
            partitions = source.partition_count(assignment.streams)
            if (repetitions := assignment.streams // partitions) > 1:
                repeated.append(
                    f"{source.name} has only {plural(sum(source.blocks), 'block')} for "
                    f"{plural(assignment.streams, 'stream')}: its text is tokenized "
                    f"{repetitions} times. For a new run, data.streams = {partitions} avoids this."
                )
        shown, more = first_of(repeated)
        return [*notes, *shown, *([f"{more} sources alike."] if more else [])]

    def cursors(self) -> CursorTable:
        return CursorTable(self._plan.assignment.streams, len(self._plan.sources))

    def _refuse_small_cache(self, config: DataConfig) -> None:
        """Raise DataError if the cache cannot hold the largest files, one per stream of a rank."""
        plan = self._plan
        # A stream needs the file that it reads, and at worst those are the largest.
        sizes = sorted((file.bytes for file in plan.files if is_url(file.path)), reverse=True)
        streams = len(plan.assignment.owned)
        needed, limit = sum(sizes[:streams]), plan.cache[1]
        if needed > limit:
            count, gib = min(streams, len(sizes)), needed / 2**30
            raise DataError(
                f"data.cache_gib = {config.cache_gib:g}: the {streams} streams of a rank may read {count} files of "
                f"URLs at a time, up to {gib:,.2f} GiB. Raise it to {gib + 0.01:,.2f}, on a disk with enough space "
                "(data.cache_dir), start a new run with fewer data.streams, or use data.mode=prepared."
            )

    def owned(self, index: int) -> Int64s:
        """Return the streams that a data-parallel rank tokenizes, int64."""
        return replace(self._plan.assignment, index=index).owned

    def loader(self, index: int, cursors: CursorTable, first: int, notify: Callable[[str], None]) -> OnlineLoader:
        """Start the processes of data-parallel rank ``index``, from global sample ``first``."""
        plan = replace(self._plan, assignment=replace(self._plan.assignment, index=index))
        return OnlineLoader(plan, cursors.values, first, self._workers, notify)
