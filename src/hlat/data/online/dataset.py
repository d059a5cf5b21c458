"""Online training data as other rooms see it: notes for the user, initial cursors, and a loader per rank."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from hlat.config import BatchSchedule, DataConfig
from hlat.data.online.build_plan import build_worker_plan
from hlat.data.online.loader import CursorTable, OnlineLoader
from hlat.data.online.stream_assignment import StreamAssignment, row_stride
from hlat.data.prepared.prepared_folder import PreparedData
from hlat.runtime.errors import DataError
from hlat.runtime.terminal_text import plural
from hlat.runtime.urls import is_url

Int64s = npt.NDArray[np.int64]


class OnlineData:
    """The training samples of a run that tokenizes during training.

    Args:
        prepared: the result of ``prepare_online``.
        config: the data section.
        seed: seed of the order.
        batches: boundaries of the global batches.
        ranks: number of data-parallel ranks.

    Raises:
        DataError: a phase has no sample of its own, or the cache is smaller than the files that the streams read at a
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
        """True if every stream is tokenized by one rank only."""
        return self._plan.assignment.is_even

    @property
    def notes(self) -> list[str]:
        """Notes on blocks and streams, and on settings that would waste less tokenization, one sentence each."""
        plan, assignment = self._plan, self._plan.assignment
        blocks = ", ".join(f"{plural(sum(source.blocks), 'block')} of {source.name}" for source in plan.sources)
        notes = [f"tokenizing while training: {blocks}, distributed to {plural(assignment.streams, 'stream')}"]
        if not assignment.is_even:
            notes.append(
                f"data.streams = {assignment.streams} cannot be divided evenly among {assignment.ranks} data-parallel "
                f"ranks with batch.global_batch = {assignment.batches.size}: each rank tokenizes all of the text. For "
                f"a new run, data.streams = {assignment.nearest_even_streams()} avoids this."
            )
        for source in plan.sources:
            partitions = source.partition_count(assignment.streams)
            if (repetitions := row_stride(assignment.streams, partitions)) > 1:
                notes.append(
                    f"{source.name} has only {plural(sum(source.blocks), 'block')} for "
                    f"{plural(assignment.streams, 'stream')}: its text is tokenized "
                    f"{repetitions} times. For a new run, data.streams = {partitions} avoids this."
                )
        return notes

    def cursors(self) -> CursorTable:
        """Return the initial cursors of all streams."""
        return CursorTable(self._plan.assignment.streams, len(self._plan.sources))

    def _refuse_small_cache(self, config: DataConfig) -> None:
        """Raise DataError if the cache cannot hold one file per stream of a rank: a stream needs the file it reads."""
        plan = self._plan
        sizes = sorted((size for path, _, _, size, _, _ in plan.files if is_url(path)), reverse=True)
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
        """Start the processes that tokenize one data-parallel rank's samples.

        Args:
            index: the data-parallel rank.
            cursors: positions of the streams.
            first: the first global sample.
            notify: called with notes for the user.
        """
        plan = replace(self._plan, assignment=replace(self._plan.assignment, index=index))
        return OnlineLoader(plan, cursors.values, first, self._workers, notify)
