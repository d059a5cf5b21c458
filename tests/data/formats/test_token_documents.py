"""Sources whose documents are tokens: the same data as from the texts, and errors for bad files."""

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hlat.config import BatchSchedule
from hlat.config.sections.data import DataConfig
from hlat.data.online.blocks import DocumentReader
from hlat.data.online.loader import CursorTable, OnlineLoader, build_worker_plan
from hlat.data.online.prepare import prepare_online
from hlat.data.online.streams import StreamAssignment, assign_streams
from hlat.data.prepare import preparation
from hlat.data.prepare.partitions import merge_partition_folders, prepare_partition, train_tokenizer
from hlat.data.prepare.preparation import prepare
from hlat.data.prepare.work_units import hash_documents
from hlat.data.tokenizers.base import Tokenizer
from hlat.data.tokenizers.training import train_bpe
from hlat.runtime.errors import DataError
from tests.data.formats.test_megatron import DAMAGES
from tests.support.data.corpora import documents, tree, write_jsonl
from tests.support.data.megatron_files import write_megatron
from tests.support.data.preparation_model import tokenize_here
from tests.support.data.reading_ranks import run

TEXTS = [*documents(40, 300), "", *documents(5, 300), *documents(20, 200, seed=1)]
_few = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", autouse=True)
def small_work() -> Iterator[None]:
    """Make work units of a few documents, tokenized in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "_SMALLEST_UNIT", 2000)
        tokenize_here(patch)
        yield


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokenizer]:
    """Train a tokenizer of 300 tokens; return its folder too."""
    folder = tmp_path_factory.mktemp("tokenizer") / "saved"
    trained = train_bpe(TEXTS, 300)
    trained.save(folder)
    return folder, trained


def _tokens(tokenizer: Tokenizer, texts: list[str], end: bool) -> list[list[int]]:
    assert tokenizer.eos_id is not None
    return [tokenizer.encode(text) + [tokenizer.eos_id] * (end and bool(text)) for text in texts]


def _megatron(file: Path, tokenizer: Tokenizer, texts: list[str], end: bool = False, dtype: str = "uint16") -> Path:
    """Write the texts like preprocess_data.py, with or without --append-eod."""
    return write_megatron(file, [[tokens] for tokens in _tokens(tokenizer, texts, end)], dtype)


def _config(paths: list[Path], tokenizer: Path, **more: Any) -> DataConfig:
    sources = [{"path": str(path), "name": f"source {number}"} for number, path in enumerate(paths)]
    section = {"sources": sources, "tokenizer": {"path": str(tokenizer)}, "shard_tokens": 1000, "sequence_length": 24}
    return DataConfig.model_validate(section | {"validation": {"fraction": 0}} | more)


def _shards(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in tree(folder).items() if name.endswith(".bin")}


# --- prepared ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("end", "duplicates"), [(False, "keep"), (True, "drop")])
def test_shards_are_the_same_as_from_the_texts(
    tokenizer: tuple[Path, Tokenizer], tmp_path: Path, end: bool, duplicates: str
) -> None:
    held_out = documents(6, 200, seed=9)
    text = write_jsonl(tmp_path / "a.jsonl", TEXTS[:30]), write_jsonl(tmp_path / "b.jsonl", TEXTS[30:])
    validation = {"path": str(write_jsonl(tmp_path / "v.jsonl", held_out))}
    wanted = prepare(_config([*text], tokenizer[0], validation=validation, duplicates=duplicates), tmp_path / "texts")
    (tmp_path / "corpus").mkdir()
    _megatron(tmp_path / "corpus" / "a.bin", tokenizer[1], TEXTS[:30], end)
    _megatron(tmp_path / "corpus" / "b.bin", tokenizer[1], TEXTS[30:], end, "int32")
    validation = {"path": str(_megatron(tmp_path / "v.bin", tokenizer[1], held_out, end))}
    config = _config([tmp_path / "corpus"], tokenizer[0], validation=validation, duplicates=duplicates)
    found = prepare(config, tmp_path / "tokens")
    assert _shards(found.dir) == _shards(wanted.dir) and len(_shards(found.dir)) > 6
    for split in ("train", "validation"):
        assert found.manifest.splits[split].text_bytes == wanted.manifest.splits[split].text_bytes
    assert (found.manifest.total("copies"), found.manifest.total("empty_documents")) == (5, 1)
    parts = [tmp_path / f"part {number}" for number in (1, 2)]
    for number, out in enumerate(parts, 1):
        prepare_partition(config, out, number, 2)
    assert tree(merge_partition_folders(config, tmp_path / "merged", parts).dir) == tree(found.dir)


@pytest.mark.parametrize("by", ["document", "tail"])
def test_end_tokens_do_not_change_the_split(tokenizer: tuple[Path, Tokenizer], tmp_path: Path, by: str) -> None:
    """--append-eod changes the split of no document and no tail, also next to a text source."""
    text = write_jsonl(tmp_path / "t.jsonl", TEXTS[:9])
    made = []
    for end in (False, True):
        data = _megatron(tmp_path / f"{end}.bin", tokenizer[1], TEXTS[9:], end)
        config = _config([text, data], tokenizer[0], validation={"fraction": 0.3, "by": by})
        made.append(prepare(config, tmp_path / f"out {end}"))
    assert _shards(made[0].dir) == _shards(made[1].dir)
    record = {split: made[0].manifest.splits[split] for split in ("train", "validation")}
    assert all(len(split.sources) == 2 for split in record.values())
    if by == "tail":
        bodies = sum(map(len, _tokens(tokenizer[1], TEXTS[9:], end=False)))
        held_out = record["validation"].sources[1]
        assert held_out.tokens - held_out.documents == bodies - int(bodies * 0.7)


def test_a_text_and_tokens_with_the_same_bytes_are_not_copies() -> None:
    assert (hash_documents([b"abcd"]) != hash_documents([b"abcd"], are_tokens=True)).any()


def test_a_change_of_the_bin_or_the_idx_is_reported(tokenizer: tuple[Path, Tokenizer], tmp_path: Path) -> None:
    data = write_megatron(tmp_path / "a.bin", [[[1, 2, 3]], [[4, 5]], [[6]]])
    config = _config([data], tokenizer[0])
    first = prepare(config, tmp_path / "out")
    assert prepare(config, tmp_path / "out").fingerprint == first.fingerprint
    write_megatron(data, [[[1, 2]], [[3, 4, 5]], [[6]]])
    with pytest.raises(
        DataError, match=r"contains data that was prepared differently:\n  the corpus: .*a\.bin changed since"
    ):
        prepare(config, tmp_path / "out")


@pytest.fixture
def store(tmp_path: Path, tokenizer: tuple[Path, Tokenizer]) -> Iterator[tuple[Path, str]]:
    """Yield a local dataset, and the URL of a copy in a store in memory."""
    data = _megatron(tmp_path / "a.bin", tokenizer[1], TEXTS)
    for file in (data, data.with_suffix(".idx")):
        fsspec.filesystem("memory").pipe(f"/megatron/{file.name}", file.read_bytes())
    yield data, "memory://megatron/a.bin"
    fsspec.filesystem("memory").rm("/megatron", recursive=True)


def test_a_url_gives_the_same_data_as_a_path(
    tokenizer: tuple[Path, Tokenizer], tmp_path: Path, store: tuple[Path, str]
) -> None:
    data, url = store
    here = prepare(_config([data], tokenizer[0]), tmp_path / "here")
    for number, location in enumerate((url, "memory://megatron", "memory://megatron/*.bin")):
        remote = DataConfig.model_validate(
            _config([data], tokenizer[0]).model_dump() | {"sources": [{"path": location}]}
        )
        made = prepare(remote, tmp_path / f"{number}")
        assert made.fingerprint == here.fingerprint
        assert prepare(remote, made.dir).fingerprint == here.fingerprint
    online = remote.model_copy(update={"mode": "online", "streams": 4})
    plan = build_worker_plan(
        prepare_online(online, tmp_path / "online", None), online, 0, StreamAssignment(0, 1, BatchSchedule(4), 4, 0)
    )
    assert len(run(plan, 1, 1, CursorTable(4, 1), 0, 2)) == 8
    fsspec.filesystem("memory").rm("/megatron/a.idx")
    with pytest.raises(DataError, match=r"memory://megatron/a\.idx: nothing there.*two files with the same name"):
        prepare(remote, tmp_path / "other")


def test_errors_name_the_url(tokenizer: tuple[Path, Tokenizer], tmp_path: Path, store: tuple[Path, str]) -> None:
    index = store[0].with_suffix(".idx").read_bytes()
    fsspec.filesystem("memory").pipe("/megatron/a.idx", index[:-1])
    config = DataConfig.model_validate({"path": store[1], "tokenizer": {"path": str(tokenizer[0])}})
    with pytest.raises(DataError, match=r"^memory://megatron/a\.idx: truncated"):
        prepare(config, tmp_path / "out")
    fsspec.filesystem("memory").pipe("/megatron/a.idx", index)
    fsspec.filesystem("memory").pipe("/megatron/a.bin", store[0].read_bytes()[:-2])
    with pytest.raises(DataError, match=r"^memory://megatron/a\.bin: truncated: .* of memory:.*a\.idx ends at"):
        prepare(config, tmp_path / "out")


# --- online --------------------------------------------------------------------------------------------------------


def _online(tokenizer: tuple[Path, Tokenizer], folder: Path, streams: int = 4, **more: Any) -> DataConfig:
    text = write_jsonl(folder / "t.jsonl", TEXTS[:20])
    data = _megatron(folder / "a.bin", tokenizer[1], TEXTS[20:] * 4, end=True)
    validation = {"fraction": 0.2}
    return _config([data, text], tokenizer[0], mode="online", streams=streams, validation=validation, **more)


@_few
@given(
    seed=st.integers(0, 2**40),
    packing=st.sampled_from(["concat", "best-fit"]),
    parts=st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 2), st.integers(1, 3)), min_size=2, max_size=3),
)
def test_online_samples_are_the_same_for_any_ranks_and_stops(
    tokenizer: tuple[Path, Tokenizer],
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    packing: str,
    parts: list[tuple[int, int, int]],
) -> None:
    folder = tmp_path_factory.mktemp("online")
    config = _online(tokenizer, folder, packing=packing)
    plan = build_worker_plan(
        prepare_online(config, folder / "out", 500), config, seed, StreamAssignment(0, 1, BatchSchedule(8), 4, seed)
    )
    expected = run(plan, 1, 1, CursorTable(4, 1), 0, sum(steps for _, _, steps in parts))
    cursors, found, first = CursorTable(4, 1), {}, 0
    for ranks, workers, steps in parts:
        found |= run(plan, ranks, workers, cursors, first, steps)
        first += 8 * steps
    assert found == expected


def test_an_online_stream_has_the_tokens_of_its_documents(tokenizer: tuple[Path, Tokenizer], tmp_path: Path) -> None:
    """Streams are read by worker processes."""
    config = _online(tokenizer, tmp_path)
    prepared = prepare_online(config, tmp_path / "out", None)
    plan = build_worker_plan(prepared, config, 3, StreamAssignment(0, 1, BatchSchedule(8), 4, 3))
    assert sum(plan.sources[0].blocks) > 8 and plan.sources[0].partition_count(4) == 4
    read, end = DocumentReader(plan), prepared.manifest.eos_id
    rows: dict[int, list[list[int]]] = {}
    feed = OnlineLoader(plan, CursorTable(4, 1).values, 0, 2, print)
    try:
        for first in range(0, 32, 8):
            batch, _ = feed.read(first)
            for sample, inputs in zip(batch.sample_ids.tolist(), batch.inputs_BS.tolist(), strict=True):
                rows.setdefault(int(assign_streams(3, 4, [sample])[0]), []).append(inputs)
    finally:
        feed.close()
    for stream, mine in rows.items():
        expected: list[int] = []
        for document in read.documents(0, stream, 4)(0, 0):
            content = document.content
            expected += [*(prepared.tokenizer.encode(content) if isinstance(content, str) else content.tolist()), end]
            if len(expected) > 24 * len(mine):
                break
        assert list(chain(*mine)) == expected[: 24 * len(mine)]


def test_online_each_document_is_in_one_split_once_per_epoch(tokenizer: tuple[Path, Tokenizer], tmp_path: Path) -> None:
    data = _megatron(tmp_path / "a.bin", tokenizer[1], TEXTS * 4)
    config = _config([data], tokenizer[0], mode="online", streams=4, validation={"fraction": 0.2})
    prepared = prepare_online(config, tmp_path / "out", None)
    plan = build_worker_plan(prepared, config, 3, StreamAssignment(0, 1, BatchSchedule(8), 4, 3))
    blocks, parts = sum(plan.sources[0].blocks), plan.sources[0].partition_count(4)
    found = []
    for part in range(parts):
        for document in DocumentReader(plan).documents(0, part, parts)(0, 0):
            if document.block * parts > blocks + parts:
                break
            if document.block * parts + (part + document.block) % parts < blocks:
                found.append(np.asarray(document.content).tolist())
    bounds, tokens = prepared.document_boundaries("validation").tolist(), prepared.tokens("validation")
    found += [tokens.read(a, b - 1).tolist() for a, b in pairwise(bounds)]
    assert len(bounds) > 1 and sorted(found) == sorted(ids for ids in _tokens(tokenizer[1], TEXTS * 4, False) if ids)


# --- errors --------------------------------------------------------------------------------------------------------


def _refusal(config: DataConfig, out: Path) -> str:
    """Return the message of the DataError, which is the same in the modes prepared and online."""
    with pytest.raises(DataError) as caught:
        prepare(config, out / "prepared")
    assert not (out / "prepared" / "manifest.json").exists()
    online = config.model_copy(update={"mode": "online"})
    with pytest.raises(DataError) as again:
        plan = build_worker_plan(
            prepare_online(online, out / "online", None), online, 0, StreamAssignment(0, 1, BatchSchedule(8), 4, 0)
        )
        list(DocumentReader(plan).documents(0, 0, 1)(0, 0))
    assert str(again.value).splitlines()[0] == str(caught.value).splitlines()[0]
    shutil.rmtree(out, ignore_errors=True)
    return str(caught.value)


@pytest.mark.parametrize(("damage", "message"), DAMAGES[2:])
def test_every_damage_of_the_files_is_reported(
    tokenizer: tuple[Path, Tokenizer], tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    data = write_megatron(tmp_path / "corpus_text_document.bin")
    damage(data)
    with pytest.raises(DataError, match=message):
        raise DataError(_refusal(_config([data], tokenizer[0]), tmp_path / "out"))


def test_ids_outside_the_vocabulary_are_named(tokenizer: tuple[Path, Tokenizer], tmp_path: Path) -> None:
    for number, (wrong, dtype) in enumerate([(300, "uint16"), (-1, "int32"), (2**40, "int64")]):
        data = write_megatron(tmp_path / f"{number}.bin", [[[1, 2]], [[3, wrong]], [[1]]], dtype)
        message = _refusal(_config([data], tokenizer[0], unreadable_rows=0.9), tmp_path / "out")
        assert message.startswith(f"{data}, document 1: its token 1 has the id {wrong}, but the ids of ")
        assert "are 0 to 299. Give the tokenizer" in message


def test_a_missing_bin_or_idx_is_named(tokenizer: tuple[Path, Tokenizer], tmp_path: Path) -> None:
    data = write_megatron(tmp_path / "a.bin")
    index = data.with_suffix(".idx")
    both = "two files with the same name, .bin and .idx"
    message = _refusal(_config([index], tokenizer[0]), tmp_path / "out")
    assert f"{index}: its .bin, which contains the tokens, is not in the source" in message and both in message
    index.rename(tmp_path / "b.idx")
    message = _refusal(_config([data], tokenizer[0]), tmp_path / "out")
    assert f"{data}: {index} is missing" in message and both in message


def test_tokens_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    data = write_megatron(tmp_path / "a.bin")
    config = DataConfig.model_validate({"path": str(data)})
    message = _refusal(config, tmp_path / "out")
    assert f"{data}: its documents are tokens, but data.tokenizer.path is not set" in message
    with pytest.raises(DataError, match=r"Set data\.tokenizer\.path to the tokenizer that"):
        train_tokenizer(config, tmp_path / "trained")


def test_tokens_and_text_in_one_source_are_refused(tokenizer: tuple[Path, Tokenizer], tmp_path: Path) -> None:
    data = write_megatron(tmp_path / "corpus" / "a.bin")
    (tmp_path / "corpus" / "b.jsonl").write_text(json.dumps({"text": "text"}) + "\n")
    assert f"tokens ({data}) and jsonl files" in _refusal(_config([data.parent], tokenizer[0]), tmp_path / "out")
    compressed = data.rename(data.with_suffix(".bin.gz"))
    assert "inside .gz is not read. Decompress" in _refusal(_config([compressed], tokenizer[0]), tmp_path / "out")
    other = tmp_path / "a.npy"
    other.touch()
    assert "Tokens are read from lists of ids in parquet, arrow and jsonl files" in _refusal(
        _config([other], tokenizer[0]), tmp_path / "out"
    )
