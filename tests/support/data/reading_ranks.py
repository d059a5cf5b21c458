"""Data-parallel ranks that read online data, simulated in one process without worker processes."""

from dataclasses import replace

import numpy as np

from hlat.data.online.loader import CursorTable
from hlat.data.online.streams import assign_streams
from hlat.data.online.worker import RowProducer
from hlat.data.online.worker_protocol import WorkerPlan, unpack_rows


class Rank:
    """One simulated data-parallel rank, with its workers' producers."""

    def __init__(self, plan: WorkerPlan, cursors: np.ndarray, first: int, workers: int) -> None:
        self.plan, owned = plan, plan.assignment.owned
        plans = [replace(plan, streams=owned[n::workers].tolist(), first=first) for n in range(workers)]
        self._frames = [RowProducer(worker_plan, cursors).frames() for worker_plan in plans]
        self._serves = {int(s): n for n in range(workers) for s in owned[n::workers]}

    def step(self, first: int, cursors: CursorTable) -> dict[int, list[list[int]]]:
        """Read one step; return the columns of each of its samples, and advance the cursors."""
        assignment, found = self.plan.assignment, {}
        for sample in assignment.batches.batch_at(first):
            stream = int(assign_streams(assignment.seed, assignment.streams, [sample])[0])
            if stream in self._serves:
                frame = next(self._frames[self._serves[stream]])
                assert (frame.sample, frame.stream) == (sample, stream)
                cursors.values[frame.stream, frame.source] = frame.cursor
                if frame.content:
                    columns = unpack_rows([frame.content], self.plan.settings.length, self.plan.settings.isolate)
                    found[sample] = [column[0].tolist() for column in columns]
        return found


def run(
    plan: WorkerPlan, ranks: int, workers: int, cursors: CursorTable, first: int, steps: int
) -> dict[int, list[list[int]]]:
    """Read some steps on all ranks; return the columns of each sample."""
    plans = [replace(plan, assignment=replace(plan.assignment, index=r, ranks=ranks)) for r in range(ranks)]
    own = [CursorTable(*cursors.values.shape[:2]) for _ in plans]
    for rank_cursors in own:
        rank_cursors.values[:] = cursors.values
    readers = [Rank(rank_plan, cursors.values.copy(), first, workers) for rank_plan in plans]
    found: dict[int, list[list[int]]] = {}
    batches = plan.assignment.batches
    for number in range(batches.number_of(first), batches.number_of(first) + steps):
        batch = batches.batch(number)
        for reader, own_cursors in zip(readers, own, strict=True):
            rows = reader.step(batch.start, own_cursors)
            assert len(rows) == len(batch) // ranks and not rows.keys() & found.keys()
            found |= rows
    for rank_plan, own_cursors in zip(plans, own, strict=True):
        cursors.values[rank_plan.assignment.owned] = own_cursors.values[rank_plan.assignment.owned]
    return found
