"""Data-parallel ranks that read online data, in one process: producers instead of processes."""

from dataclasses import replace

import numpy as np

from hlat.data.online.loader import CursorTable
from hlat.data.online.stream_assignment import assign_streams
from hlat.data.online.worker import RowProducer
from hlat.data.online.worker_protocol import ROW, WorkerPlan, unpack_rows


class Rank:
    """What a rank of several reads, by producers in this process instead of processes."""

    def __init__(self, plan: WorkerPlan, cursors: np.ndarray, first: int, workers: int) -> None:
        self.plan, owned = plan, plan.assignment.owned
        plans = [replace(plan, streams=owned[n::workers].tolist(), first=first) for n in range(workers)]
        self._frames = [RowProducer(one, cursors).frames() for one in plans]
        self._serves = {int(s): n for n in range(workers) for s in owned[n::workers]}

    def step(self, first: int, cursors: CursorTable) -> dict[int, list[list[int]]]:
        """Sample -> its columns, of one step; cursors move on."""
        share, found = self.plan.assignment, {}
        for sample in range(first, first + share.batch):
            stream = int(assign_streams(share.seed, share.streams, [sample])[0])
            if stream in self._serves:
                frame = next(self._frames[self._serves[stream]])
                assert (frame.sample, frame.stream) == (sample, stream)
                cursors.values[frame.stream, frame.source] = frame.cursor
                if frame.kind == ROW:
                    columns = unpack_rows([frame.content], self.plan.settings.length, self.plan.settings.isolate)
                    found[sample] = [column[0].tolist() for column in columns]
        return found


def run(
    plan: WorkerPlan, ranks: int, workers: int, cursors: CursorTable, first: int, steps: int
) -> dict[int, list[list[int]]]:
    """Some steps of all ranks; what each sample was."""
    plans = [replace(plan, assignment=replace(plan.assignment, index=r, ranks=ranks)) for r in range(ranks)]
    own = [CursorTable(*cursors.values.shape[:2]) for _ in plans]
    for one in own:
        one.values[:] = cursors.values
    readers = [Rank(one, cursors.values.copy(), first, workers) for one in plans]
    found: dict[int, list[list[int]]] = {}
    for step in range(steps):
        for reader, mine in zip(readers, own, strict=True):
            rows = reader.step(first + step * plan.assignment.batch, mine)
            assert len(rows) == plan.assignment.batch // ranks and not rows.keys() & found.keys()
            found |= rows
    for one, mine in zip(plans, own, strict=True):
        cursors.values[one.assignment.owned] = mine.values[one.assignment.owned]
    return found
