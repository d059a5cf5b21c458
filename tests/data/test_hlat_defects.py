"""Defects of HLAT's data loader, each excluded by a test; the docstring of the test begins with the defect."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hlat.config import BatchSchedule
from hlat.config.sections.data import DataConfig
from hlat.data.online.blocks import DocumentReader
from hlat.data.online.loader import CursorTable, OnlineData, build_worker_plan
from hlat.data.online.prepare import prepare_online
from hlat.data.online.streams import StreamAssignment, assign_streams
from hlat.data.online.worker_protocol import WorkerPlan
from hlat.data.prepare.preparation import prepare
from hlat.data.prepared.prepared_folder import PreparedData
from hlat.data.samples.order import EpochOrder, Mixture, PhaseWeights, permute
from tests.support.data.corpora import documents, prose, write_jsonl
from tests.support.data.preparing import training_data
from tests.support.data.reading_ranks import run

LENGTH, STREAMS, BATCH = 32, 8, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("defects")


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    """60 documents, one of 600,000 characters: more than the 500,000 at which HLAT cut."""
    texts = documents(60, 300)
    texts[20] = prose(7, 600_000)
    return write_jsonl(folder / "corpus.jsonl", texts)


def _config(file: Path, mode: str, **more: Any) -> DataConfig:
    section = {"mode": mode, "path": str(file), "tokenizer": {"vocab_size": 400}, "validation": {"fraction": 0}}
    return DataConfig.model_validate({**section, "sequence_length": LENGTH, "streams": STREAMS, **more})


@pytest.fixture(scope="module")
def prepared(file: Path, folder: Path) -> PreparedData:
    return prepare(_config(file, "prepared"), folder / "prepared", workers=1)


@pytest.fixture(scope="module")
def online(file: Path, folder: Path) -> PreparedData:
    return prepare_online(_config(file, "online"), folder / "online", None)


def _plan(online: PreparedData, file: Path, ranks: int = 1, batch: int = BATCH) -> WorkerPlan:
    return build_worker_plan(
        online, _config(file, "online"), 3, StreamAssignment(0, ranks, BatchSchedule(batch), STREAMS, 3)
    )


def test_a_long_document_stays_complete_with_one_end_token(
    prepared: PreparedData, online: PreparedData, file: Path
) -> None:
    """Documents over 500,000 characters became pieces in reverse order, cut inside words, each with an end token."""
    starts = prepared.document_boundaries("train").astype(np.int64)
    longest = int(np.diff(starts).argmax())
    ids = prepared.tokens("train").read(int(starts[longest]), int(starts[longest + 1]))
    assert (ids == prepared.manifest.eos_id).sum() == 1 and ids[-1] == prepared.manifest.eos_id
    assert prepared.tokenizer.decode(ids[:-1].tolist()) == prose(7, 600_000)
    # Online, a stream gets the complete document too; test_online tests that streams lose nothing of it.
    plan = _plan(online, file)
    partitions, blocks = plan.sources[0].partition_count(STREAMS), plan.sources[0].epoch_order(True).epoch_length
    contents = []
    for partition in range(partitions):
        for document in DocumentReader(plan).documents(0, partition, partitions)(0, 0):
            position = document.block * partitions + (partition + document.block) % partitions
            contents += [document.content] if position < blocks else []
            if document.block * partitions >= blocks:
                break
    assert [len(text) for text in contents if len(text) > 1000] == [600_000] and prose(7, 600_000) in contents


@pytest.mark.parametrize("epoch", [0, 1, 2, 3])
def test_a_resumed_run_reads_the_same_data_in_every_epoch(
    prepared: PreparedData, online: PreparedData, file: Path, epoch: int
) -> None:
    """Resuming shuffled the file order, training the already shuffled one: the orders differed from epoch 2 on."""
    data = training_data(prepared, LENGTH, 3)
    first = epoch * data.samples_per_epoch + 5
    again = training_data(prepared, LENGTH, 3)
    assert np.array_equal(again.sample_ids(np.arange(first, first + 90)), data.sample_ids(np.arange(first, first + 90)))
    plan = _plan(online, file)
    steps = (epoch + 1) * 4
    cursors = CursorTable(STREAMS, 1)
    run(plan, 1, 1, cursors, 0, steps)
    whole = run(plan, 1, 1, CursorTable(STREAMS, 1), 0, steps + 3)
    resumed = run(plan, 1, 1, cursors, steps * BATCH, 3)
    assert resumed == {sample: row for sample, row in whole.items() if sample >= steps * BATCH}


def test_the_order_of_an_epoch_is_a_formula(online: PreparedData, file: Path) -> None:
    """The order of epoch 2 depended on whether the run had been resumed; here it is a formula of (seed, epoch)."""
    plan = _plan(online, file)
    epoch_order = plan.sources[0].epoch_order(True)
    blocks = epoch_order.epoch_length
    for epoch in range(4):
        order = epoch_order.items(epoch * blocks + np.arange(blocks))
        assert sorted(order.tolist()) == list(range(blocks))
        assert np.array_equal(order, plan.sources[0].epoch_order(True).items(epoch * blocks + np.arange(blocks)))


def test_no_token_is_dropped_on_resume(online: PreparedData, file: Path) -> None:
    """Left-over tokens were restored only with a flag that was off by default: a resume lost up to a batch per rank."""
    plan = _plan(online, file)
    cursors, joined = CursorTable(STREAMS, 1), {}
    for step in range(6):  # stop and resume after every step
        joined |= run(plan, 1, 1, cursors, step * BATCH, 1)
    assert joined == run(plan, 1, 1, CursorTable(STREAMS, 1), 0, 6)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 8), (8, 2), (3, 1), (4, 2), (2, 4), (4, 3)])
def test_a_run_continues_with_any_other_number_of_ranks(
    online: PreparedData, file: Path, before: int, after: int
) -> None:
    """Only doubling the number of ranks was supported, once; indices were computed with /, which gave floats."""
    plan, cursors = _plan(online, file, batch=24), CursorTable(STREAMS, 1)
    found = run(plan, before, 2, cursors, 0, 2)
    found |= run(plan, after, 1, cursors, 2 * 24, 2)
    found |= run(plan, before, 1, cursors, 4 * 24, 2)
    assert found == run(plan, 1, 1, CursorTable(STREAMS, 1), 0, 6)


def test_each_stream_is_tokenized_by_one_rank_only(online: PreparedData, file: Path) -> None:
    """Every tensor- and pipeline-parallel rank tokenized the same text; here one rank does so for its group."""
    assignments = [StreamAssignment(index, 4, BatchSchedule(BATCH), STREAMS, 3) for index in range(4)]
    owned = [set(assignment.owned.tolist()) for assignment in assignments]
    assert set.union(*owned) == set(range(STREAMS)) and sum(map(len, owned)) == STREAMS
    data = OnlineData(online, _config(file, "online"), 3, BatchSchedule(BATCH), 4)
    assert data.is_evenly_assigned and len(data.notes) == 1


def test_the_sequence_length_is_that_of_the_recipe(prepared: PreparedData, online: PreparedData, file: Path) -> None:
    """A sequence length of 4096 was hard-coded in the data, whatever --seq_len was."""
    for length in (7, 64, 333):
        assert training_data(prepared, length, 0).batch(0, 2).inputs_BS.shape == (2, length)
        plan = build_worker_plan(
            online,
            _config(file, "online", sequence_length=length),
            3,
            StreamAssignment(0, 1, BatchSchedule(BATCH), STREAMS, 3),
        )
        rows = run(plan, 1, 1, CursorTable(STREAMS, 1), 0, 1)
        assert {len(column) for columns in rows.values() for column in columns} == {length}


def test_cursors_do_not_advance_with_prefetched_batches(online: PreparedData, file: Path) -> None:
    """The loader saved its state in a prefetching thread, before the step had trained on the batch.

    Here the cursors after a batch are returned with it, and are stored when the step that consumed it is done.
    """
    expected = CursorTable(STREAMS, 1)
    run(_plan(online, file), 1, 1, expected, 0, 1)
    data = OnlineData(online, _config(file, "online"), 3, BatchSchedule(BATCH), 1)
    cursors = data.cursors()
    loader = data.loader(0, cursors, 0, print)
    try:
        _, progress = loader.read(0)
        loader.read(BATCH)
        loader.read(2 * BATCH)
    finally:
        loader.close()
    assert not cursors.values.any()
    cursors.advance(progress)
    assert np.array_equal(cursors.values, expected.values)


def test_the_order_does_not_depend_on_library_versions() -> None:
    """The order of the data changed when shard() of Datasets changed from strided to contiguous between versions.

    A change of these formulas changes the data of every run that is resumed.
    """
    assert permute(3, 2, np.arange(6), 1000).tolist() == [904, 955, 850, 520, 293, 915]
    assert EpochOrder([1000, 10], [1.0, 2.0], 3, True).items(np.arange(6)).tolist() == [666, 418, 587, 842, 921, 114]
    assert assign_streams(3, 8, np.arange(12)).tolist() == [2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5]
    assert Mixture([PhaseWeights((5, 3, 2))]).locate(np.arange(10))[0].tolist() == [0, 1, 0, 2, 0, 1, 0, 2, 0, 1]
