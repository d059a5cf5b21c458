"""Text that is tokenized while training, as the rooms above see it."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from hlat.config.sections import DataConfig
from hlat.data.online.build_plan import build_worker_plan
from hlat.data.online.loader import CursorTable, OnlineLoader
from hlat.data.online.stream_assignment import StreamAssignment, row_stride
from hlat.data.prepared import PreparedData
from hlat.runtime import DataError, is_url

Int64s = npt.NDArray[np.int64]


class OnlineData:
    """The training samples of a run that tokenizes as it goes.

    Args:
        prepared: what ``prepare_online`` has made ready.
        config: the data section.
        seed: of the order.
        batch: samples of a step, over all ranks.
        ranks: data-parallel ranks.

    Raises:
        DataError: a phase that has no sample of its own, or a cache that cannot hold what the streams read at a time.
    """

    def __init__(self, prepared: PreparedData, config: DataConfig, seed: int, batch: int, ranks: int) -> None:
        self._plan = build_worker_plan(prepared, config, seed, StreamAssignment(0, ranks, batch, config.streams, seed))
        self._prepared, self._workers = prepared, config.workers or 1
        self._refuse_small_cache(config)

    @property
    def is_evenly_assigned(self) -> bool:
        """Whether every stream is tokenized by one rank only."""
        return self._plan.assignment.is_even

    @property
    def notes(self) -> list[str]:
        """How streams and blocks are dealt, and what could be better about it: one sentence each."""
        plan, share = self._plan, self._plan.assignment
        blocks = ", ".join(f"{sum(source.blocks):,} blocks of {source.name}" for source in plan.sources)
        notes = [f"tokenizing while training: {blocks}, dealt to {share.streams} streams"]
        if not share.is_even:
            notes.append(
                f"data.streams = {share.streams} cannot be shared out over {share.ranks} data-parallel ranks with "
                f"batch.global_batch = {share.batch}: each of them tokenizes all of the text. A new run would do "
                f"better with data.streams = {share.better()}."
            )
        for source in plan.sources:
            parts = source.partition_count(share.streams)
            if (times := row_stride(share.streams, parts)) > 1:
                notes.append(
                    f"{source.name} has only {sum(source.blocks):,} blocks for {share.streams} streams: its text is "
                    f"tokenized {times} times. A new run would do better with data.streams = {parts}."
                )
        return notes

    def cursors(self) -> CursorTable:
        """Where the streams begin."""
        return CursorTable(self._plan.assignment.streams, len(self._plan.sources))

    def _refuse_small_cache(self, config: DataConfig) -> None:
        """Each stream holds the file that it reads, so as many of the largest must fit as a rank has streams."""
        plan = self._plan
        sizes = sorted((size for path, _, size, _, _ in plan.files if is_url(path)), reverse=True)
        streams = len(plan.assignment.owned)
        needed, limit = sum(sizes[:streams]), plan.cache[1]
        if needed > limit:
            count, gib = min(streams, len(sizes)), needed / 2**30
            raise DataError(
                f"data.cache_gib = {config.cache_gib:g}: the {streams} streams of a rank may read {count} files of "
                f"URLs at a time, up to {gib:,.2f} GiB. Raise it to {gib + 0.01:,.2f}, on a disk with room for it "
                "(data.cache_dir), begin a new run with fewer data.streams, or use data.mode=prepared."
            )

    def owned(self, index: int) -> Int64s:
        """The streams that a data-parallel rank tokenizes, int64."""
        return replace(self._plan.assignment, index=index).owned

    def loader(self, index: int, cursors: CursorTable, first: int, say: Callable[[str], None]) -> OnlineLoader:
        """Start the processes that tokenize what a data-parallel rank takes, from global sample ``first`` on."""
        plan = replace(self._plan, assignment=replace(self._plan.assignment, index=index))
        return OnlineLoader(plan, cursors.values, first, self._workers, self._prepared.token_bytes, say)
