"""Prefetched batches equal those read one by one, and the reader ends with the run."""

import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hlat.checkpoint.format.tensor_files import replicated_chunks
from hlat.checkpoint.protocol.reader import open_checkpoint
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.config import BatchSchedule
from hlat.config.sections.training import ParallelConfig
from hlat.data.online.loader import CursorTable
from hlat.data.samples.training_data import Batch
from hlat.parallel.layout import Layout
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.errors import CheckpointError, DataError
from hlat.runtime.progress import ProgressRecord, record_progress_in
from hlat.training.batches import BatchPrefetcher, LocalBatch, OnlineBatchSource, PreparedBatchSource
from tests.support.checkpoint.saving_ranks import wait_until


class Numbers:
    """Samples whose tokens are their index; records the order and the thread of reads."""

    def __init__(self, damaged_at: int | None = None) -> None:
        self.read: list[tuple[int, int]] = []
        self.threads: set[str] = set()
        self._damaged_at = damaged_at

    def batch(self, first: int, count: int) -> Batch:
        self.read.append((first, count))
        self.threads.add(threading.current_thread().name)
        if self._damaged_at is not None and first >= self._damaged_at:
            raise DataError("damaged")
        rows = torch.arange(first, first + count).unsqueeze(1)
        return Batch(rows, rows + 1, np.arange(first, first + count))


class Rows:
    """Reader of some rows of each batch."""

    def __init__(self, numbers: Numbers, rows: range) -> None:
        self.numbers, self.rows, self.closed = numbers, rows, False

    def __call__(self, samples: int) -> LocalBatch:
        return LocalBatch(self.numbers.batch(samples + self.rows.start, len(self.rows)))

    def silence(self) -> float:
        return 1e9

    def notes(self) -> list[str]:
        return []

    def close(self) -> None:
        self.closed = True


def test_each_step_gets_its_rows_and_the_next_batch_is_prefetched() -> None:
    numbers = Numbers()
    reader = Rows(numbers, range(2, 4))
    with BatchPrefetcher(reader, BatchSchedule(8), pinned=False, say=print) as feed:
        seen = [feed.next_batch(samples).batch.inputs_BS.flatten().tolist() for samples in (0, 8, 16)]
    assert seen == [[2, 3], [10, 11], [18, 19]]
    assert numbers.read[:3] == [(2, 2), (10, 2), (18, 2)] and len(numbers.threads) == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]
    assert reader.closed


def test_during_a_ramp_batches_have_the_size_of_their_stage() -> None:
    numbers, batches = Numbers(), BatchSchedule(8, ((2, 2), (1, 4)))
    model = SimpleNamespace(rows=lambda size: range(size // 2, size))  # the second of two data-parallel ranks
    data = SimpleNamespace(batch=numbers.batch, epochs=lambda total: {}, waste=[], is_part=False)
    reader = PreparedBatchSource(data, batches, 16)
    with BatchPrefetcher(reader.reader(model, 0), batches, pinned=False, say=print) as feed:
        seen = [feed.next_batch(first).batch.inputs_BS.flatten().tolist() for first in (0, 2, 4, 8)]
    assert seen == [[1], [3], [6, 7], [12, 13, 14, 15]]
    assert numbers.read[:4] == [(1, 1), (3, 1), (6, 2), (12, 4)], "each was prefetched, none read twice"


class Waiting:
    """Reader of an unavailable store: it has a note, and waits until it is closed."""

    def __init__(self) -> None:
        self._said, self._closed = ["the store is away"], threading.Event()

    def __call__(self, samples: int) -> LocalBatch:
        self._closed.wait()
        raise DataError("closed")

    def silence(self) -> float:
        return 1e9

    def notes(self) -> list[str]:
        return [self._said.pop()] if self._said else []

    def close(self) -> None:
        self._closed.set()


def test_notes_are_shown_while_a_batch_is_late_and_an_interrupt_does_not_wait() -> None:
    def interrupt(note: str) -> None:
        raise KeyboardInterrupt(note)

    with (
        pytest.raises(KeyboardInterrupt, match="the store is away"),
        BatchPrefetcher(Waiting(), BatchSchedule(8), False, interrupt) as feed,
    ):
        feed.next_batch(0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


class AwayUntilSeen(Rows):
    """Reader whose helper process lives, and whose batch comes once that was recorded as progress."""

    def __init__(self, memory: bytearray) -> None:
        super().__init__(Numbers(), range(1))
        self._memory = memory

    def __call__(self, samples: int) -> LocalBatch:
        wait_until(lambda: any(self._memory))
        return super().__call__(samples)

    def silence(self) -> float:
        return 0.0


def test_a_late_batch_is_progress_while_the_helper_process_that_makes_it_lives() -> None:
    memory = bytearray(ProgressRecord.BYTES)
    record_progress_in(ProgressRecord(memoryview(memory)))
    try:
        with BatchPrefetcher(AwayUntilSeen(memory), BatchSchedule(4), pinned=False, say=print) as feed:
            assert feed.next_batch(0).batch.inputs_BS.item() == 0
    finally:
        record_progress_in(None)


def test_a_jump_to_another_sample_reads_that_sample() -> None:
    with BatchPrefetcher(Rows(Numbers(), range(1)), BatchSchedule(4), pinned=False, say=print) as feed:
        assert [feed.next_batch(samples).batch.inputs_BS.item() for samples in (0, 40, 44)] == [0, 40, 44]


def test_damage_is_an_error_of_the_step_that_reads_it() -> None:
    with BatchPrefetcher(Rows(Numbers(damaged_at=8), range(4)), BatchSchedule(4), pinned=False, say=print) as feed:
        feed.next_batch(0)
        feed.next_batch(4)
        with pytest.raises(DataError, match="damaged"):
            feed.next_batch(8)


def test_after_a_restart_batches_come_from_the_new_reader_only() -> None:
    first, second = Numbers(), Numbers()
    one = Rows(first, range(0, 2))
    with BatchPrefetcher(one, BatchSchedule(8), pinned=False, say=print) as feed:
        feed.next_batch(16)
        feed.discard()
        assert one.closed and first.read == [(16, 2), (24, 2)], "what was read ahead has ended"
        feed.restart(Rows(second, range(2, 4)))
        assert feed.next_batch(24).batch.inputs_BS.flatten().tolist() == [26, 27]
    assert second.read[0] == (26, 2)


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ({"other": torch.zeros(8, 2, 3, dtype=torch.int64)}, r"data\.cursors: not in the checkpoint"),
        ({"data.cursors": torch.ones(4, 2, 3, dtype=torch.int64)}, r"data\.cursors: saved as int64 \(4, 2, 3\)"),
        ({"data.cursors": torch.ones(1, 2, 3, dtype=torch.int64)}, r"data\.cursors: saved as int64 \(1, 2, 3\)"),
    ],
    ids=["none", "fewer streams", "one, which would be taken for all"],
)
def test_cursors_of_another_number_of_streams_are_refused(
    tmp_path: Path, saved: dict[str, torch.Tensor], words: str
) -> None:
    """Eight streams of two sources; cursors that do not fit are refused, and the current ones stay."""
    used = CursorTable(8, 2)
    data = SimpleNamespace(cursors=lambda: used, owned=lambda index: np.arange(8), notes=[])
    samples = OnlineBatchSource(data, HostGroup())
    path = CheckpointStore(tmp_path, 1).save(1, replicated_chunks(saved), {})
    with pytest.raises(CheckpointError, match=words):
        samples.restore(open_checkpoint(path))
    assert not used.values.any()
    fitting = replicated_chunks({"data.cursors": torch.full((8, 2, 3), 7, dtype=torch.int64)})
    samples.restore(open_checkpoint(CheckpointStore(tmp_path / "fitting", 1).save(1, fitting, {})))
    assert (used.values == 7).all()


@pytest.mark.parametrize("is_even", [True, False], ids=["streams shared out", "every rank has all streams"])
def test_the_saved_cursor_of_a_stream_is_that_of_one_rank_whatever_the_layout(is_even: bool) -> None:
    """Values of all ranks are added: over 2 data-parallel and 2 tensor-parallel ranks each counts once."""
    layout = Layout.of(ParallelConfig(tensor=2), 4)
    total = np.zeros((4, 1, 3), dtype=np.int64)
    for rank in range(4):
        index = layout.coordinates(rank).dp
        cursors = CursorTable(4, 1)
        owned = np.arange(4) if not is_even else np.arange(2 * index, 2 * index + 2)
        cursors.values[owned] = 7
        data = SimpleNamespace(cursors=lambda c=cursors: c, owned=lambda _, o=owned: o, notes=[])
        data.is_evenly_assigned, data.loader = is_even, None
        ranks = SimpleNamespace(rank=rank, all_reduce_sum=lambda values: values)
        ranks.subgroup = lambda members, rank=rank: SimpleNamespace(is_first=members[0] == rank)
        samples = OnlineBatchSource(data, ranks)
        samples.reader(SimpleNamespace(layout=layout, data_index=index), 8)
        (chunk,) = samples.state()
        total += chunk.rows[0].numpy()
    assert (total == 7).all()
