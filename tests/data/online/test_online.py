"""Online data: the tokens of global sample g depend only on the data section and the seed."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet as pq

from hlat.config import BatchSchedule
from hlat.config.sections.data import DataConfig
from hlat.data.documents import SplitRule
from hlat.data.online.blocks import DocumentReader
from hlat.data.online.loader import CursorTable, OnlineData, OnlineLoader, build_worker_plan
from hlat.data.online.prepare import prepare_online
from hlat.data.online.streams import StreamAssignment, assign_streams, partition_count
from hlat.data.prepared.manifest import SourceRecord
from hlat.data.prepared.prepared_folder import PreparedData
from hlat.data.tokenizers.load import load_saved
from hlat.runtime.errors import DataError
from tests.support.data.corpora import documents, write_jsonl
from tests.support.data.reading_ranks import run

_fixture = settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
_RANKS = (1, 2, 3, 4, 8)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two sources, lines and parquet with row groups of 7 rows; with null, empty and duplicate documents."""
    folder = tmp_path_factory.mktemp("online")
    lines = [*documents(60, 300), "", *documents(3, 300)]
    rows = [None, "", *documents(45, 200)]
    pq.write_table(pa.table({"text": pa.array(rows, pa.string())}), folder / "b.parquet", row_group_size=7)
    return [
        {"path": str(write_jsonl(folder / "a.jsonl", lines)), "name": "lines"},
        {"path": str(folder / "b.parquet"), "name": "rows"},
    ]


def _config(corpus: list[dict[str, Any]], **more: Any) -> DataConfig:
    section = {"mode": "online", "sources": corpus, "tokenizer": {"vocab_size": 300}, "sequence_length": 24}
    return DataConfig.model_validate({**section, "validation": {"fraction": 0.1}, "streams": 12, **more})


_prepared_cache: dict[str, PreparedData] = {}


def _prepared(config: DataConfig, folder: Path) -> PreparedData:
    key = config.model_dump_json(include={"sources", "streams"})
    if key not in _prepared_cache:
        _prepared_cache[key] = prepare_online(config, folder / f"out{len(_prepared_cache)}", 500)
    return _prepared_cache[key]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prepared")


_sections = st.fixed_dictionaries(
    {
        "streams": st.sampled_from([1, 4, 8, 12, 24]),
        "packing": st.sampled_from(["concat", "best-fit"]),
        "isolate": st.booleans(),
        "shuffle": st.booleans(),
    }
)
_mixes = st.sampled_from(
    [
        {},
        {"weights": (1.0, 3.0)},
        {"repeats": (2.0, 0.5)},
        {"phases": [{"until_tokens": 1000, "weights": {"rows": 1}}, {"weights": {"lines": 2, "rows": 1}}]},
    ]
)


def _mixed(corpus: list[dict[str, Any]], mix: dict[str, Any]) -> dict[str, Any]:
    more: dict[str, Any] = {"sources": corpus}
    for field, values in (("weight", mix.get("weights")), ("repeat", mix.get("repeats"))):
        if values:
            more["sources"] = [{**source, field: value} for source, value in zip(corpus, values, strict=True)]
    return more | ({"phases": mix["phases"]} if "phases" in mix else {})


@given(
    section=_sections,
    mix=_mixes,
    seed=st.integers(0, 2**40),
    batches=st.sampled_from(
        [BatchSchedule(24), BatchSchedule(48), BatchSchedule(48, ((2, 24),)), BatchSchedule(96, ((1, 24), (2, 72)))]
    ),
    segments=st.lists(st.tuples(st.sampled_from(_RANKS), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3),
)
@_fixture
def test_samples_are_the_same_for_any_ranks_workers_and_resumes(
    corpus: list[dict[str, Any]],
    folder: Path,
    section: dict[str, Any],
    mix: dict[str, Any],
    seed: int,
    batches: BatchSchedule,
    segments: list[tuple[int, int, int]],
) -> None:
    """Each segment of the run has other ranks and workers, and starts with the cursors left by the one before."""
    config = _config(corpus, **section, **_mixed(corpus, mix))
    prepared = _prepared(config, folder)
    plan = build_worker_plan(prepared, config, seed, StreamAssignment(0, 1, batches, config.streams, seed))
    sources = len(plan.sources)
    steps = sum(steps for _, _, steps in segments)
    expected = run(plan, 1, 1, CursorTable(config.streams, sources), 0, steps)
    cursors, found, first = CursorTable(config.streams, sources), {}, 0
    for ranks, workers, count in segments:
        found |= run(plan, ranks, workers, cursors, first, count)
        first = batches.first_of(batches.number_of(first) + count)
    assert sorted(found) == list(range(first))
    assert found == expected


@given(section=_sections, mix=_mixes, seed=st.integers(0, 2**40), epoch=st.integers(0, 3))
@_fixture
def test_every_document_is_read_once_an_epoch(
    corpus: list[dict[str, Any]],
    folder: Path,
    section: dict[str, Any],
    mix: dict[str, Any],
    seed: int,
    epoch: int,
) -> None:
    config = _config(corpus, **section, **_mixed(corpus, mix))
    prepared = _prepared(config, folder)
    plan = build_worker_plan(prepared, config, seed, StreamAssignment(0, 1, BatchSchedule(24), config.streams, seed))
    reader = DocumentReader(plan)
    expected = Counter(text for file in plan.files for text in _training_texts(prepared, file))
    seen: Counter[str] = Counter()
    for number, source in enumerate(plan.sources):
        partitions, epoch_length = source.partition_count(config.streams), source.epoch_order(True).epoch_length
        for partition in range(partitions):
            for document in _until(
                reader.documents(number, partition, partitions)(0, 0), (epoch + 2) * epoch_length // partitions + 2
            ):
                position = document.block * partitions + (partition + document.block) % partitions
                if position // epoch_length == epoch:
                    seen[document.content] += 1
    if mix.get("repeats"):
        assert set(seen) <= set(expected)
    else:
        assert seen == expected


def _until(found: Iterator[Any], last_block: int) -> Iterator[Any]:
    """Yield documents up to and including those of block ``last_block``."""
    for document in found:
        if document.block > last_block:
            return
        yield document


def _training_texts(prepared: PreparedData, file: SourceRecord) -> list[str]:
    """Return the training documents of a file, read without the code under test."""
    path = Path(file.path)
    if path.suffix == ".parquet":
        texts = pq.read_table(path)["text"].to_pylist()
    else:
        texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    assert prepared.manifest.blocks is not None
    split_rule = SplitRule(below=prepared.manifest.blocks.below)
    return [text for text in texts if text and split_rule.split_document(text, text.encode(), 0)[0][0] == "train"]


@given(seed=st.integers(0, 2**40), streams=st.sampled_from([1, 4, 8, 24, 64]), length=st.integers(2, 60))
@_fixture
def test_the_streams_of_a_block_partition_share_its_documents_without_loss(
    corpus: list[dict[str, Any]], folder: Path, seed: int, streams: int, length: int
) -> None:
    """With fewer blocks than streams, each stream keeps every (streams / partitions)-th row of its block partition."""
    config = _config(corpus, streams=streams, sequence_length=length)
    prepared = _prepared(config, folder)
    plan = build_worker_plan(prepared, config, seed, StreamAssignment(0, 1, BatchSchedule(8), streams, seed))
    partitions = plan.sources[0].partition_count(streams)
    assert (partitions < streams) == (streams >= 24)  # both cases are tested
    rows: dict[int, dict[int, list[list[int]]]] = {}
    for sample, columns in sorted(run(plan, 1, 1, CursorTable(streams, 1), 0, 18).items()):
        stream = int(assign_streams(seed, streams, [sample])[0])
        partition_rows = rows.setdefault(stream % partitions, {})
        index = sum(row % (streams // partitions) == stream // partitions for row in partition_rows)
        partition_rows[index * (streams // partitions) + stream // partitions] = columns
    for partition, numbered_rows in rows.items():
        expected: list[int] = []
        for document in DocumentReader(plan).documents(0, partition, partitions)(0, 0):
            expected += [*prepared.tokenizer.encode(document.content), prepared.manifest.eos_id]
            if len(expected) > (max(numbered_rows) + 1) * length:
                break
        for number, (inputs, labels) in numbered_rows.items():
            assert inputs == expected[number * length : (number + 1) * length]
            assert labels == expected[number * length + 1 : (number + 1) * length + 1]


@given(streams=st.integers(1, 64), blocks=st.integers(0, 200))
def test_block_partitions_are_not_empty_and_divide_the_streams(streams: int, blocks: int) -> None:
    partitions = partition_count(streams, blocks)
    assert streams % partitions == 0 and 1 <= partitions <= max(blocks, 1)


@given(
    sizes=st.lists(st.integers(1, 64), min_size=1, max_size=3),
    count=st.integers(1, 5),
    ranks=st.integers(1, 8),
    streams=st.integers(1, 64),
    seed=st.integers(0, 2**40),
)
def test_ranks_share_a_batch_evenly_and_streams_if_possible(
    sizes: list[int], count: int, ranks: int, streams: int, seed: int
) -> None:
    """Also the batches of a ramp, each of whose stages has ``count`` batches."""
    *ramp, batch = (size * ranks for size in sizes)
    batches = BatchSchedule(batch, tuple((count, size) for size in ramp))
    assignments = [StreamAssignment(index, ranks, batches, streams, seed) for index in range(ranks)]
    for number in (0, 1, count, 7):
        whole = batches.batch(number)
        samples_of_ranks = [assignment.samples(whole.start).tolist() for assignment in assignments]
        assert sorted(chain.from_iterable(samples_of_ranks)) == list(whole)
        assert {len(samples) for samples in samples_of_ranks} == {len(whole) // ranks}
        for assignment, samples in zip(assignments, samples_of_ranks, strict=True):
            assert set(assign_streams(seed, streams, samples).tolist()) <= set(assignment.owned.tolist())
    if assignments[0].is_even:
        assert sorted(np.concatenate([assignment.owned for assignment in assignments]).tolist()) == list(range(streams))
    even_streams = assignments[0].nearest_even_streams()
    assert replace(assignments[0], streams=even_streams).is_even


def test_a_long_document_has_the_tokens_of_its_whole_text_and_one_end(tmp_path: Path) -> None:
    """It is tokenized in pieces. A row has one token more than inputs: the first of the next row."""
    (text,) = documents(1, 60_000)
    config = _config(
        [{"path": str(write_jsonl(tmp_path / "long.jsonl", [text]))}], streams=1, validation={"fraction": 0}
    )
    prepared = prepare_online(config, tmp_path / "out", 0)
    plan = build_worker_plan(prepared, config, 0, StreamAssignment(0, 1, BatchSchedule(1), 1, 0))
    tokenizer = load_saved(tmp_path / "out" / "tokenizer")
    whole = [*tokenizer.encode(text), tokenizer.eos_id]
    assert len(text) > 3 << 14, "the text is not cut"
    rows = run(plan, 1, 1, CursorTable(1, 1), 0, 2 * len(whole) // 24)
    read = [token for number in sorted(rows) for token in rows[number][0]]
    assert read == (whole * 3)[: len(read)]


def test_validation_takes_the_documents_it_needs(tmp_path: Path) -> None:
    """All of them if no number is given, else until there are enough; 32 are tokenized together."""
    for name, count in (("text", 50), ("validation", 200)):
        write_jsonl(tmp_path / f"{name}.jsonl", documents(count, 300))
    validation = {"path": str(tmp_path / "validation.jsonl")}
    config = _config([{"path": str(tmp_path / "text.jsonl")}], validation=validation)
    found = [prepare_online(config, tmp_path / str(n), n).manifest for n in (None, 10**9, 1, 8000)]
    everything, more, little, half = [manifest.splits["validation"].tokens for manifest in found]
    assert little < 8000 <= half < everything == more


def test_a_file_of_another_size_than_prepared_is_refused(tmp_path: Path) -> None:
    config = _config([{"path": str(write_jsonl(tmp_path / "text.jsonl", documents(30, 300)))}])
    prepared = prepare_online(config, tmp_path / "out", 0)
    with (tmp_path / "text.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(DataError, match=r"text\.jsonl: has [\d,]+ bytes, had [\d,]+ when this data was prepared"):
        build_worker_plan(prepared, config, 0, StreamAssignment(0, 1, BatchSchedule(1), 12, 0))


def test_ranks_that_tokenize_more_than_their_rows_are_told(corpus: list[dict[str, Any]], folder: Path) -> None:
    config = _config(corpus, streams=12)
    prepared = _prepared(config, folder)
    notes = {ranks: OnlineData(prepared, config, 0, BatchSchedule(24), ranks).notes for ranks in (1, 4, 8)}
    assert [len(found) for found in notes.values()] == [1, 1, 2]
    assert "each rank tokenizes all of the text" in notes[8][1]


def test_real_workers_send_the_same_rows_and_the_state_is_small(corpus: list[dict[str, Any]], folder: Path) -> None:
    config = _config(corpus, isolate=True, packing="best-fit")
    prepared = _prepared(config, folder)
    plan = build_worker_plan(prepared, config, 5, StreamAssignment(0, 1, BatchSchedule(12), 12, 5))
    expected = run(plan, 1, 1, CursorTable(12, 1), 0, 4)
    cursors, first = CursorTable(12, 1), 0
    for workers in (1, 3):
        loader = OnlineLoader(plan, cursors.values, first, workers, print)
        try:
            for _ in range(2):
                batch, progress = loader.read(first)
                cursors.advance(progress)
                assert batch.positions_BS is not None
                rows = zip(
                    batch.sample_ids.tolist(), batch.inputs_BS.tolist(), batch.positions_BS.tolist(), strict=True
                )
                assert [(n, inputs, positions) for n, inputs, positions in rows] == [
                    (n, expected[n][0], expected[n][2]) for n in range(first, first + 12)
                ]
                first += 12
        finally:
            loader.close()
    assert CursorTable(256, 8).values.nbytes < 64 << 10
