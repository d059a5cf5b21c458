"""The defects of HLAT's loader, each as a test: what it did is in the first line of each docstring."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hlat.config.sections import DataConfig
from hlat.data.online import OnlineData, prepare_online
from hlat.data.online.build_plan import build_worker_plan
from hlat.data.online.documents import DocumentReader
from hlat.data.online.loader import CursorTable
from hlat.data.online.stream_assignment import StreamAssignment, assign_streams
from hlat.data.online.worker_protocol import WorkerPlan
from hlat.data.prepare import prepare
from hlat.data.prepared import PreparedData
from hlat.data.samples import EpochOrder, Mixture, PhaseWeights, permute
from tests.support.data.corpora import documents, prose, write_jsonl
from tests.support.data.preparing import training_data
from tests.support.data.reading_ranks import run

LENGTH, STREAMS, BATCH = 32, 8, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("defects")


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    """60 documents, one of them of 600,000 characters: more than the 500,000 at which HLAT cut."""
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
    return build_worker_plan(online, _config(file, "online"), 3, StreamAssignment(0, ranks, batch, STREAMS, 3))


def test_a_long_document_keeps_its_order_and_has_one_end(
    prepared: PreparedData, online: PreparedData, file: Path
) -> None:
    """Documents over 500,000 characters came out in pieces, later ones first, cut inside of words, each with an EOS."""
    starts = prepared.document_boundaries("train").astype(np.int64)
    longest = int(np.diff(starts).argmax())
    ids = prepared.tokens("train").read(int(starts[longest]), int(starts[longest + 1]))
    assert (ids == prepared.manifest.eos_id).sum() == 1 and ids[-1] == prepared.manifest.eos_id
    assert prepared.tokenizer.decode(ids[:-1].tolist()) == prose(7, 600_000)
    # Online a stream gets it whole, too; that streams join what they get without loss is test_online's.
    plan = _plan(online, file)
    parts, blocks = plan.sources[0].partition_count(STREAMS), plan.sources[0].epoch_order(True).epoch_length
    found = []
    for part in range(parts):
        for document in DocumentReader(plan).documents(0, part, parts)(0, 0):
            turn = document.block * parts + (part + document.block) % parts
            found += [document.content] if turn < blocks else []
            if document.block * parts >= blocks:
                break
    assert [len(text) for text in found if len(text) > 1000] == [600_000] and prose(7, 600_000) in found


@pytest.mark.parametrize("epoch", [0, 1, 2, 3])
def test_resume_is_the_same_in_every_epoch(
    prepared: PreparedData, online: PreparedData, file: Path, epoch: int
) -> None:
    """Restoring shuffled the order of the files, training the already shuffled one: another order from epoch 2 on."""
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


def test_streams_come_to_every_epoch_the_same_way(online: PreparedData, file: Path) -> None:
    """The order of epoch 2 depended on whether the run had been resumed; here it is a formula of (seed, epoch)."""
    plan = _plan(online, file)
    turns = plan.sources[0].epoch_order(True)
    blocks = turns.epoch_length
    for epoch in range(4):
        order = turns.items(epoch * blocks + np.arange(blocks))
        assert sorted(order.tolist()) == list(range(blocks))
        assert np.array_equal(order, plan.sources[0].epoch_order(True).items(epoch * blocks + np.arange(blocks)))


def test_no_token_is_dropped_on_resume(online: PreparedData, file: Path) -> None:
    """Left-over tokens were restored only if a flag said so, off by default: a resume lost up to a batch per rank."""
    plan = _plan(online, file)
    cursors, joined = CursorTable(STREAMS, 1), {}
    for step in range(6):  # a stop after every step
        joined |= run(plan, 1, 1, cursors, step * BATCH, 1)
    assert joined == run(plan, 1, 1, CursorTable(STREAMS, 1), 0, 6)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 8), (8, 2), (3, 1), (4, 2), (2, 4), (4, 3)])
def test_any_number_of_ranks_takes_over_from_any_other(
    online: PreparedData, file: Path, before: int, after: int
) -> None:
    """Only doubling the ranks was supported, once; indices were computed with /, which gave floats."""
    plan, cursors = _plan(online, file, batch=24), CursorTable(STREAMS, 1)
    found = run(plan, before, 2, cursors, 0, 2)
    found |= run(plan, after, 1, cursors, 2 * 24, 2)
    found |= run(plan, before, 1, cursors, 4 * 24, 2)
    assert found == run(plan, 1, 1, CursorTable(STREAMS, 1), 0, 6)


def test_each_stream_is_tokenized_by_one_rank_only(online: PreparedData, file: Path) -> None:
    """Every tensor- and pipeline-parallel rank tokenized the same text; here one does it for all that share samples."""
    shares = [StreamAssignment(index, 4, BATCH, STREAMS, 3) for index in range(4)]
    owned = [set(share.owned.tolist()) for share in shares]
    assert set.union(*owned) == set(range(STREAMS)) and sum(map(len, owned)) == STREAMS
    data = OnlineData(online, _config(file, "online"), 3, BATCH, 4)
    assert data.is_evenly_assigned and len(data.notes) == 1


def test_the_sequence_length_is_the_recipes(prepared: PreparedData, online: PreparedData, file: Path) -> None:
    """4096 was hard-coded in the data, whatever --seq_len said."""
    for length in (7, 64, 333):
        assert training_data(prepared, length, 0).batch(0, 2).inputs_BS.shape == (2, length)
        plan = build_worker_plan(
            online, _config(file, "online", sequence_length=length), 3, StreamAssignment(0, 1, BATCH, STREAMS, 3)
        )
        rows = run(plan, 1, 1, CursorTable(STREAMS, 1), 0, 1)
        assert {len(column) for columns in rows.values() for column in columns} == {length}


def test_state_is_that_of_the_step_not_of_what_was_read_ahead(online: PreparedData, file: Path) -> None:
    """The loader saved its state while it fetched, in a prefetching thread, before the step had trained.

    Here the cursors after a batch travel with it, and move when the step that consumed it is done.
    """
    expected = CursorTable(STREAMS, 1)
    run(_plan(online, file), 1, 1, expected, 0, 1)
    data = OnlineData(online, _config(file, "online"), 3, BATCH, 1)
    cursors = data.cursors()
    feed = data.loader(0, cursors, 0, print)
    try:
        _, progress = feed.read(0)
        feed.read(BATCH)
        feed.read(2 * BATCH)
    finally:
        feed.close()
    assert not cursors.values.any()
    cursors.advance(progress)
    assert np.array_equal(cursors.values, expected.values)


def test_the_library_of_the_day_does_not_decide_the_order() -> None:
    """Datasets' shard() changed from strided to contiguous between versions, and with it the order of the data.

    Whoever changes these formulas changes the data of every run that is to go on.
    """
    assert permute(3, 2, np.arange(6), 1000).tolist() == [904, 955, 850, 520, 293, 915]
    assert EpochOrder([1000, 10], [1.0, 2.0], 3, True).items(np.arange(6)).tolist() == [666, 418, 587, 842, 921, 114]
    assert assign_streams(3, 8, np.arange(12)).tolist() == [2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5]
    assert Mixture([PhaseWeights((5, 3, 2))]).locate(np.arange(10))[0].tolist() == [0, 1, 0, 2, 0, 1, 0, 2, 0, 1]
