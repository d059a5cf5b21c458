"""Online, too, what global sample g is depends on the data section and the seed alone."""

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

from hlat.config.sections import DataConfig
from hlat.data.online import OnlineLoader, prepare_online
from hlat.data.online.build_plan import build_worker_plan
from hlat.data.online.documents import DocumentReader
from hlat.data.online.loader import CursorTable
from hlat.data.online.stream_assignment import StreamAssignment, assign_streams, partition_count
from hlat.data.prepared import PreparedData
from hlat.data.sources import SplitRule
from tests.support.data.corpora import documents, write_jsonl
from tests.support.data.reading_ranks import run

_fixture = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
_RANKS = (1, 2, 3, 4, 8)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two sources: lines, and parquet with row groups of 7; with null, empty and repeated documents."""
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


_made: dict[str, PreparedData] = {}


def _prepared(config: DataConfig, folder: Path) -> PreparedData:
    key = config.model_dump_json(include={"sources", "streams"})
    if key not in _made:
        _made[key] = prepare_online(config, folder / f"out{len(_made)}", 500)
    return _made[key]


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
            more["sources"] = [{**one, field: value} for one, value in zip(corpus, values, strict=True)]
    return more | ({"phases": mix["phases"]} if "phases" in mix else {})


@given(
    section=_sections,
    mix=_mixes,
    seed=st.integers(0, 2**40),
    batch=st.sampled_from([24, 48]),
    parts=st.lists(st.tuples(st.sampled_from(_RANKS), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3),
)
@_fixture
def test_samples_are_the_same_for_any_ranks_workers_stops_and_changes_of_ranks(
    corpus: list[dict[str, Any]],
    folder: Path,
    section: dict[str, Any],
    mix: dict[str, Any],
    seed: int,
    batch: int,
    parts: list[tuple[int, int, int]],
) -> None:
    """Each part of the run has other ranks and workers, and begins with the cursors that the one before left."""
    config = _config(corpus, **section, **_mixed(corpus, mix))
    prepared = _prepared(config, folder)
    plan = build_worker_plan(prepared, config, seed, StreamAssignment(0, 1, batch, config.streams, seed))
    sources = len(plan.sources)
    steps = sum(steps for _, _, steps in parts)
    expected = run(plan, 1, 1, CursorTable(config.streams, sources), 0, steps)
    cursors, found, first = CursorTable(config.streams, sources), {}, 0
    for ranks, workers, count in parts:
        found |= run(plan, ranks, workers, cursors, first, count)
        first += count * batch
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
    plan = build_worker_plan(prepared, config, seed, StreamAssignment(0, 1, 24, config.streams, seed))
    reader = DocumentReader(plan)
    kept = Counter(text for file in plan.files for text in _training_texts(prepared, file))
    seen: Counter[str] = Counter()
    for number, source in enumerate(plan.sources):
        parts, n = source.partition_count(config.streams), source.epoch_order(True).epoch_length
        for part in range(parts):
            for document in _until(reader.documents(number, part, parts)(0, 0), (epoch + 2) * n // parts + 2):
                turn = document.block * parts + (part + document.block) % parts
                if turn // n == epoch:
                    seen[document.content] += 1
    if mix.get("repeats"):
        assert set(seen) <= set(kept)
    else:
        assert seen == kept


def _until(found: Iterator[Any], turn: int) -> Iterator[Any]:
    for document in found:
        if document.block > turn:
            return
        yield document


def _training_texts(prepared: PreparedData, file: tuple[str, str, int, int, str]) -> list[str]:
    """The documents of a file that training may see, read without the code under test."""
    path = Path(file[0])
    if path.suffix == ".parquet":
        texts = pq.read_table(path)["text"].to_pylist()
    else:
        texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    assert prepared.manifest.blocks is not None
    assignment = SplitRule(below=prepared.manifest.blocks.below)
    return [text for text in texts if text and assignment.split_document(text, text.encode(), 0)[0][0] == "train"]


@given(seed=st.integers(0, 2**40), streams=st.sampled_from([1, 4, 8, 24, 64]), length=st.integers(2, 60))
@_fixture
def test_the_streams_of_a_part_share_its_documents_and_lose_nothing(
    corpus: list[dict[str, Any]], folder: Path, seed: int, streams: int, length: int
) -> None:
    """Where there are fewer blocks than streams, too: then each keeps every (streams / parts)-th row of its part."""
    config = _config(corpus, streams=streams, sequence_length=length)
    prepared = _prepared(config, folder)
    plan = build_worker_plan(prepared, config, seed, StreamAssignment(0, 1, 8, streams, seed))
    parts = plan.sources[0].partition_count(streams)
    assert (parts < streams) == (streams >= 24)  # both cases are looked at
    rows: dict[int, dict[int, list[list[int]]]] = {}
    for sample, columns in sorted(run(plan, 1, 1, CursorTable(streams, 1), 0, 18).items()):
        stream = int(assign_streams(seed, streams, [sample])[0])
        mine = rows.setdefault(stream % parts, {})
        turn = sum(place % (streams // parts) == stream // parts for place in mine)
        mine[turn * (streams // parts) + stream // parts] = columns
    for part, found in rows.items():
        expected: list[int] = []
        for document in DocumentReader(plan).documents(0, part, parts)(0, 0):
            expected += [*prepared.tokenizer.encode(document.content), prepared.manifest.eos_id]
            if len(expected) > (max(found) + 1) * length:
                break
        for number, (inputs, labels) in found.items():
            assert inputs == expected[number * length : (number + 1) * length]
            assert labels == expected[number * length + 1 : (number + 1) * length + 1]


@given(streams=st.integers(1, 64), blocks=st.integers(0, 200))
def test_no_part_is_empty_and_parts_divide_the_streams(streams: int, blocks: int) -> None:
    parts = partition_count(streams, blocks)
    assert streams % parts == 0 and 1 <= parts <= max(blocks, 1)


@given(batch=st.integers(1, 64), ranks=st.integers(1, 8), streams=st.integers(1, 64), seed=st.integers(0, 2**40))
def test_ranks_share_a_batch_evenly_and_streams_where_they_can(batch: int, ranks: int, streams: int, seed: int) -> None:
    batch *= ranks
    shares = [StreamAssignment(index, ranks, batch, streams, seed) for index in range(ranks)]
    for first in (0, batch, 7 * batch):
        taken = [share.samples(first).tolist() for share in shares]
        assert sorted(chain.from_iterable(taken)) == list(range(first, first + batch))
        assert {len(one) for one in taken} == {batch // ranks}
        for share, one in zip(shares, taken, strict=True):
            assert set(assign_streams(seed, streams, one).tolist()) <= set(share.owned.tolist())
    if shares[0].is_even:
        assert sorted(np.concatenate([share.owned for share in shares]).tolist()) == list(range(streams))
    better = shares[0].nearest_even_streams()
    assert replace(shares[0], streams=better).is_even


def test_real_processes_send_the_same_and_state_is_small(corpus: list[dict[str, Any]], folder: Path) -> None:
    config = _config(corpus, isolate=True, packing="best-fit")
    prepared = _prepared(config, folder)
    plan = build_worker_plan(prepared, config, 5, StreamAssignment(0, 1, 12, 12, 5))
    expected = run(plan, 1, 1, CursorTable(12, 1), 0, 4)
    cursors, first = CursorTable(12, 1), 0
    for workers in (1, 3):
        feed = OnlineLoader(plan, cursors.values, first, workers, prepared.token_bytes, print)
        try:
            for _ in range(2):
                batch, progress = feed.read(first)
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
            feed.close()
    assert CursorTable(256, 8).values.nbytes < 64 << 10
