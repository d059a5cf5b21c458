"""Columns of token ids: the same data as from the texts, and errors for lists that are not ids of the tokenizer.

The ids are made by the library ``tokenizers`` from the tokenizer.json, not by hlat.
"""

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import ipc

from hlat.config import BatchSchedule
from hlat.config.sections.data import DataConfig
from hlat.data.documents import Vocabulary
from hlat.data.formats import rows as tokens
from hlat.data.formats.rows import TOKENS_COLUMN, Row
from hlat.data.online.blocks import DocumentReader
from hlat.data.online.loader import CursorTable, build_worker_plan
from hlat.data.online.prepare import prepare_online
from hlat.data.online.streams import StreamAssignment
from hlat.data.prepare import preparation
from hlat.data.prepare.partitions import merge_partition_folders, prepare_partition, train_tokenizer
from hlat.data.prepare.preparation import prepare
from hlat.data.prepared.prepared_folder import PreparedData
from hlat.data.tokenizers.base import Tokenizer
from hlat.data.tokenizers.load import load_tokenizer
from hlat.data.tokenizers.training import train_bpe
from hlat.runtime.errors import DataError
from tests.config.test_recipe import problems_of
from tests.support.data.corpora import documents, tree, write_jsonl
from tests.support.data.preparation_model import tokenize_here
from tests.support.data.reading_files import read_documents, read_ranges
from tests.support.data.reading_ranks import run

TEXTS: list[str | None] = [*documents(40, 300), "", None, *documents(5, 300), *documents(20, 200, seed=1)]
Ids = list[list[int] | None]


@pytest.fixture(scope="module", autouse=True)
def small_work() -> Iterator[None]:
    """Make work units of a few documents, tokenized in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "_SMALLEST_UNIT", 2000)
        tokenize_here(patch)
        yield


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a tokenizer of 300 tokens, and save it."""
    folder = tmp_path_factory.mktemp("tokenizer") / "saved"
    train_bpe([text for text in TEXTS if text], 300).save(folder)
    return folder


def _ids(tokenizer: Path, texts: list[str | None] = TEXTS, end: bool = False) -> Ids:
    """Return the ids of each text, from the library, with or without an end token."""
    library = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    ends = [load_tokenizer(tokenizer).eos_id] if end else []
    return [
        None if text is None else library.encode(text, add_special_tokens=False).ids + (ends if text else [])
        for text in texts
    ]


def _table(ids: Ids, item: pa.DataType) -> pa.Table:
    return pa.table({"id": list(range(len(ids))), "input_ids": pa.array(ids, item)})


def _parquet(path: Path, ids: Ids, item: pa.DataType | None = None) -> None:
    pq.write_table(_table(ids, item or pa.list_(pa.int32())), path, row_group_size=7)


def _large(path: Path, ids: Ids) -> None:
    _parquet(path, ids, pa.large_list(pa.uint16()))


def _arrow(path: Path, ids: Ids) -> None:
    table = _table(ids, pa.list_(pa.int64()))
    with ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=9)


def _stream(path: Path, ids: Ids) -> None:
    table = _table(ids, pa.list_(pa.uint32()))
    with ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=9)


def _lines(path: Path, ids: Ids) -> None:
    path.write_text("".join(json.dumps({"id": 1, "input_ids": row}) + "\n" for row in ids))


def _gz(path: Path, ids: Ids) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps({"input_ids": row}) + "\n" for row in ids).encode()))


WRITERS: list[tuple[str, Callable[[Path, Ids], None]]] = [
    ("a.parquet", _parquet),
    ("b.parquet", _large),
    ("a.arrow", _arrow),
    ("b.arrow", _stream),
    ("a.jsonl", _lines),
    ("a.jsonl.gz", _gz),
]
each_format = pytest.mark.parametrize(("name", "write"), WRITERS, ids=[write.__name__[1:] for _, write in WRITERS])


def _config(sources: list[dict[str, Any]], tokenizer: Path | None, **more: Any) -> DataConfig:
    section = {"sources": sources, "tokenizer": {"path": tokenizer and str(tokenizer)}, "shard_tokens": 1000}
    return DataConfig.model_validate(section | {"sequence_length": 24, "validation": {"fraction": 0}} | more)


def _source(path: Path, **more: Any) -> dict[str, Any]:
    return {"path": str(path), "name": "tokens", "tokens_column": "input_ids", **more}


def _shards(prepared: PreparedData) -> dict[str, bytes]:
    return {name: content for name, content in tree(prepared.dir).items() if name.endswith(".bin")}


# --- the same data as from the texts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "write", "end", "duplicates"),
    [*((*each, True, "drop") for each in WRITERS), (*WRITERS[0], False, "drop"), (*WRITERS[0], True, "keep")],
)
def test_shards_are_the_same_as_from_the_texts(
    tokenizer: Path, tmp_path: Path, name: str, write: Callable[[Path, Ids], None], end: bool, duplicates: str
) -> None:
    """An end token at the end of a document changes nothing, since every document gets one."""
    text = write_jsonl(tmp_path / "t.jsonl", TEXTS)
    wanted = prepare(_config([{"path": str(text)}], tokenizer, duplicates=duplicates), tmp_path / "text")
    write(tmp_path / name, _ids(tokenizer, end=end))
    config = _config([_source(tmp_path / name)], tokenizer, duplicates=duplicates)
    found = prepare(config, tmp_path / "tokens")
    assert _shards(found) == _shards(wanted) and len(_shards(found)) > 5
    assert found.manifest.splits["train"].text_bytes == wanted.manifest.splits["train"].text_bytes
    counts = found.manifest.total("copies"), found.manifest.total("empty_documents"), found.manifest.total("null_rows")
    assert counts == (5, 1, 1)


def test_partitions_make_the_same_data_as_one_machine(tokenizer: Path, tmp_path: Path) -> None:
    _parquet(tmp_path / "a.parquet", _ids(tokenizer)[:30])
    _parquet(tmp_path / "b.parquet", _ids(tokenizer)[30:])
    config = _config([_source(tmp_path / "*.parquet")], tokenizer, validation={"fraction": 0.3})
    whole = prepare(config, tmp_path / "whole")
    parts = [tmp_path / f"part {number}" for number in (1, 2)]
    for number, out in enumerate(parts, 1):
        prepare_partition(config, out, number, 2)
    assert tree(merge_partition_folders(config, tmp_path / "merged", parts).dir) == tree(whole.dir)
    again = prepare(config, tmp_path / "whole")
    assert again.fingerprint == whole.fingerprint


def test_validation_and_a_source_of_text_next_to_tokens(tokenizer: Path, tmp_path: Path) -> None:
    """Tokens are the rule of the recipe here, and a source of text is the exception."""
    held_out = documents(6, 200, seed=9)
    text = {"path": str(write_jsonl(tmp_path / "t.jsonl", TEXTS[30:])), "text_column": "text"}
    _lines(tmp_path / "a.jsonl", _ids(tokenizer, TEXTS[:30]))
    _lines(tmp_path / "v.jsonl", _ids(tokenizer, [*held_out]))
    validation = {"path": str(tmp_path / "v.jsonl")}
    mixed = [{"path": str(tmp_path / "a.jsonl")}, text]
    found = prepare(_config(mixed, tokenizer, tokens_column="input_ids", validation=validation), tmp_path / "tokens")
    texts = [{"path": str(write_jsonl(tmp_path / "u.jsonl", TEXTS[:30]))}, text]
    validation = {"path": str(write_jsonl(tmp_path / "w.jsonl", [*held_out]))}
    wanted = prepare(_config(texts, tokenizer, validation=validation), tmp_path / "text")
    assert _shards(found) == _shards(wanted)
    assert found.manifest.settings["data.tokens_column"] == ["input_ids", None]
    assert "data.tokens_column" not in wanted.manifest.settings


def _online(source: dict[str, Any], tokenizer: Path, out: Path, **more: Any) -> dict[int, Any]:
    config = _config([source], tokenizer, mode="online", streams=4, **more)
    plan = build_worker_plan(prepare_online(config, out, 0), config, 3, StreamAssignment(0, 1, BatchSchedule(8), 4, 3))
    return run(plan, 1, 1, CursorTable(4, 1), 0, 6)


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
@pytest.mark.parametrize("isolate", [False, True])
def test_online_samples_are_the_same_as_from_the_texts(
    tokenizer: Path, tmp_path: Path, packing: str, isolate: bool
) -> None:
    """A row group of 7 short documents is one block, of text and of tokens, so both are read in the same order."""
    table = pa.table({"text": pa.array(TEXTS, pa.string()), "input_ids": pa.array(_ids(tokenizer, end=True))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    source = {"path": str(tmp_path / "a.parquet"), "name": "a"}
    more = {"packing": packing, "isolate": isolate}
    wanted = _online({**source, "text_column": "text"}, tokenizer, tmp_path / "text", **more)
    assert _online({**source, "tokens_column": "input_ids"}, tokenizer, tmp_path / "tokens", **more) == wanted
    assert len(wanted) == 48


def test_two_sources_read_two_columns_of_one_file(tokenizer: Path, tmp_path: Path) -> None:
    """A decoded row group of the one must not be given to the other."""
    table = pa.table({"text": pa.array(TEXTS[:7], pa.string()), "input_ids": pa.array([[7, 7, 7]] * 7)})
    pq.write_table(table, tmp_path / "a.parquet")
    sources = [{"path": str(tmp_path / "a.parquet"), "name": "text"}, _source(tmp_path / "a.parquet")]
    config = _config(sources, tokenizer, mode="online", streams=1)
    plan = build_worker_plan(
        prepare_online(config, tmp_path / "out", 0), config, 3, StreamAssignment(0, 1, BatchSchedule(8), 1, 3)
    )
    found = DocumentReader(plan).documents(0, 0, 1)(0, 0)
    contents = [next(found).content for _ in range(28)]
    assert {content for content in contents if isinstance(content, str)} == {text for text in TEXTS[:7] if text}
    assert all(content.tolist() == [7, 7, 7] for content in contents if not isinstance(content, str))


@each_format
def test_rows_are_the_lists_from_any_row_and_in_any_ranges(
    tokenizer: Path, tmp_path: Path, name: str, write: Callable[[Path, Ids], None]
) -> None:
    ids, file = _ids(tokenizer), tmp_path / name
    write(file, ids)
    vocabulary = Vocabulary(300, None)

    def lists(rows: list[Row]) -> Ids:
        return [None if row.content is None else np.asarray(row.content).tolist() for row in rows]

    for start in (0, 1, 6, 7, 8, 63, 64, len(ids) - 1, len(ids)):
        rows = list(read_documents(file, "input_ids", start, TOKENS_COLUMN, vocabulary))
        assert lists(rows) == ids[start:]
        assert all(row.content is None or row.content.dtype == np.uint32 for row in rows)  # type: ignore[union-attr]
    if name not in ("b.arrow", "a.jsonl.gz"):  # these are read whole
        for size in (1, 400, 10**9):
            parts = read_ranges(file, "input_ids", size, TOKENS_COLUMN, vocabulary)
            assert lists([row for part in parts for row in part]) == ids
            assert len(parts) > 3 or (size > 400 and name == "a.jsonl")


def test_a_begin_token_stays_and_an_end_token_within_a_document_too(tokenizer: Path, tmp_path: Path) -> None:
    eos = load_tokenizer(tokenizer).eos_id
    assert eos is not None
    _lines(tmp_path / "a.jsonl", [[eos, 5, eos, 6], [5, 6, eos, eos], [eos]])
    found = prepare(_config([_source(tmp_path / "a.jsonl")], tokenizer), tmp_path / "out")
    stored = found.tokens("train")
    assert stored.read(0, len(stored)).tolist() == [eos, 5, eos, 6, eos, 5, 6, eos, eos]
    assert found.manifest.total("empty_documents") == 1


# --- bad rows and files --------------------------------------------------------------------------------------------

BAD_LINES = [
    ('{"input_ids": [1, 300]}', "'input_ids': its token 1 has the id 300, but the ids of data.tokenizer.path are 0 to"),
    ('{"input_ids": [-1]}', "'input_ids': its token 0 has the id -1, but"),
    ('{"input_ids": [1, 1e3]}', "'input_ids': its entry 1 is a fraction, not a token id"),
    ('{"input_ids": [2.0]}', "'input_ids': its entry 0 is a fraction, not a token id"),
    ('{"input_ids": [1, true]}', "'input_ids': its entry 1 is a boolean, not a token id"),
    ('{"input_ids": [1, null]}', "'input_ids': its entry 1 is null, not a token id"),
    ('{"input_ids": [[1, 2]]}', "'input_ids': its entry 0 is a list, not a token id"),
    ('{"input_ids": ["1"]}', "'input_ids': its entry 0 is a text, not a token id"),
    ('{"input_ids": "1 2"}', "'input_ids' holds a text, not a list of token ids"),
    ('{"input_ids": 7}', "'input_ids' holds a number, not a list of token ids"),
    ('{"input_ids": {"a": 1}}', "'input_ids' holds an object, not a list of token ids"),
    ('{"text": "a"}', "no column 'input_ids'; it has text. Set data.tokens_column to one of these."),
    (f'{{"input_ids": [{"9" * 4000}]}}', "'input_ids': its token 0 has the id far outside, but"),
    ('{"input_ids": [1, 2', "invalid JSON"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_a_bad_line_is_named(tokenizer: Path, tmp_path: Path, line: str, reason: str) -> None:
    """In both modes; left out and listed if the recipe allows it."""
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"input_ids": [1]}}\n{line}\n{{"input_ids": [2, 3]}}\n')
    config = _config([_source(file)], tokenizer)
    with pytest.raises(DataError) as caught:
        prepare(config, tmp_path / "out")
    assert str(caught.value).startswith(f"{file}, line 2: ") and reason in str(caught.value)
    with pytest.raises(DataError) as caught:
        _online(_source(file), tokenizer, tmp_path / "online")
    assert f"{file}, the line that ends at byte {19 + len(line) + 1:,}: " in str(caught.value)
    assert reason in str(caught.value)
    allowed = prepare(config.model_copy(update={"unreadable_rows": 0.5}), tmp_path / "allowed")
    (listed,) = (allowed.dir / "quarantine.jsonl").read_text().splitlines()
    assert json.loads(listed)["line"] == 2 and allowed.manifest.total("documents") == 2


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "b.arrow"])
@pytest.mark.parametrize(("bad", "reason"), [([1, None], "its entry 1 is null"), ([1, 300], "token 1 has the id 300")])
def test_a_bad_row_of_a_table_is_named(tokenizer: Path, tmp_path: Path, name: str, bad: list[Any], reason: str) -> None:
    file = tmp_path / name
    dict(WRITERS)[name](file, [[1], *[[2, 3]] * 70, bad, [4]])
    for folder, read in (("out", prepare), ("online", None)):
        with pytest.raises(DataError) as caught:
            if read is not None:
                read(_config([_source(file)], tokenizer), tmp_path / folder)
            else:
                _online(_source(file), tokenizer, tmp_path / folder)
        assert str(caught.value).startswith(f"{file}, row 71: 'input_ids': ") and reason in str(caught.value)
    allowed = prepare(_config([_source(file)], tokenizer, unreadable_rows=0.05), tmp_path / "allowed")
    assert (allowed.manifest.total("documents"), allowed.manifest.total("unreadable_rows")) == (72, 1)


NOT_IDS = [
    (pa.array([["a"]]), "list<item: string>"),
    (pa.array([[[1]]]), "list<item: list<item: int64>>"),
    (pa.array([[1.5]]), "list<item: double>"),
    (pa.array([1]), "int64"),
    (pa.array(["1 2"]), "string"),
]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize(("values", "found"), NOT_IDS)
def test_a_column_of_another_type_is_refused(
    tokenizer: Path, tmp_path: Path, name: str, values: pa.Array, found: str
) -> None:
    file, table = tmp_path / name, pa.table({"input_ids": values, "ids": pa.array([[1]])})
    if name == "a.parquet":
        pq.write_table(table, file)
    else:
        with ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(DataError) as caught:
        prepare(_config([_source(file)], tokenizer, unreadable_rows=0.9), tmp_path / "out")
    message = str(caught.value).replace("element", "item")
    assert message.startswith(f"{file}: column 'input_ids' holds {found}, not lists of token ids.")
    assert message.endswith("Set data.tokens_column to a column of lists of integers (ids).")


def test_a_list_that_is_too_long_is_a_bad_row(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MAX_LINE_BYTES", 4000)
    _parquet(tmp_path / "a.parquet", [[1], [2] * 1000, [2] * 1001])
    first, second, third = read_documents(tmp_path / "a.parquet", "input_ids", 0, TOKENS_COLUMN, Vocabulary(300, None))
    assert first.content is not None and second.content is not None and third.error is not None
    assert third.error.reason == "'input_ids' holds 1,001 token ids; a document may have 1,000"


@given(
    rows=st.lists(st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(-3, 40)), max_size=5)), max_size=9),
    item=st.sampled_from([pa.int8(), pa.int16(), pa.int32(), pa.int64()]),
)
def test_rows_are_bad_exactly_if_an_entry_is_no_id(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[int | None] | None], item: pa.DataType
) -> None:
    """The same rows as parquet and as lines; the model is one sentence of Python."""
    folder = tmp_path_factory.mktemp("rows")
    pq.write_table(pa.table({"input_ids": pa.array(rows, pa.list_(item))}), folder / "a.parquet")
    _lines(folder / "a.jsonl", rows or [None])  # type: ignore[arg-type]
    for name in ("a.parquet", "a.jsonl"):
        found = list(read_documents(folder / name, "input_ids", 0, TOKENS_COLUMN, Vocabulary(33, 32)))
        for row, wanted in zip(found, rows, strict=name == "a.parquet"):
            bad = wanted is not None and any(number is None or not 0 <= number < 33 for number in wanted)
            assert (row.error is not None) == bad
            if wanted is not None and not bad:
                assert np.asarray(row.content).tolist() == wanted[: len(wanted) - (wanted[-1:] == [32])]


# --- recipes that cannot work --------------------------------------------------------------------------------------


def test_without_a_tokenizer_nothing_is_trained(tmp_path: Path) -> None:
    _lines(tmp_path / "a.jsonl", [[1, 2]])
    config = _config([_source(tmp_path / "a.jsonl")], None)
    for attempt in (prepare, train_tokenizer):
        with pytest.raises(
            DataError, match=r"a\.jsonl: its documents are tokens, but data\.tokenizer\.path is not set"
        ):
            attempt(config, tmp_path / "out")
    recipe = {"model": {"preset": "tiny"}, "training": {"steps": 10}}
    found = problems_of({**recipe, "data": {"path": "a.jsonl", "tokens_column": "input_ids"}})
    assert "input_ids holds token ids, which mean nothing without" in found["data.tokenizer.path"].reason
    assert "None can be trained on ids" in found["data.tokenizer.path"].remedy
    both = {"path": "a.jsonl", "tokens_column": "input_ids", "text_column": "body"}
    found = problems_of({**recipe, "data": {"sources": [both], "tokenizer": {"path": "t"}}})
    assert found["data.sources.0.tokens_column"].remedy == "Keep one of them."
    unused = {"sources": [{"path": "a.jsonl", "text_column": "text"}], "tokens_column": "input_ids"}
    assert "data.tokenizer.path" not in problems_of({**recipe, "data": unused})


@pytest.mark.parametrize("name", ["a.txt", "b.md", "noend"])
def test_files_without_columns_of_tokens_are_refused(tokenizer: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("1 2 3\n")
    with pytest.raises(DataError) as caught:
        prepare(_config([_source(tmp_path / name)], tokenizer), tmp_path / "out")
    assert str(caught.value).startswith(f"{tmp_path / name}: text files have no column that data.tokens_column could")
    assert "those of arrow, " in str(caught.value) and "jsonl, parquet have" in str(caught.value)


def test_another_column_is_other_data(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": [1, 2], "b": [3, 4]}\n' * 3)
    first = prepare(_config([_source(tmp_path / "a.jsonl", tokens_column="a")], tokenizer), tmp_path / "out")
    assert first.manifest.total("documents") == 3
    with pytest.raises(DataError, match=r"data\.tokens_column: prepared with \['a'\], now \['b'\]"):
        prepare(_config([_source(tmp_path / "a.jsonl", tokens_column="b")], tokenizer), tmp_path / "out")
    with pytest.raises(DataError, match=r"data\.tokens_column: prepared with \['a'\], now none"):
        prepare(_config([{"path": str(tmp_path / "a.jsonl"), "text_column": "a"}], tokenizer), tmp_path / "out")


def test_the_witness_and_hlat_make_the_same_ids(tokenizer: Path) -> None:
    mine: Tokenizer = load_tokenizer(tokenizer)
    assert _ids(tokenizer) == [None if text is None else mine.encode(text) for text in TEXTS]
