"""Little or no validation text is said before and after preparation; the preparation itself is the witness."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from hlat.config import RecipeError
from hlat.config.load import parse_recipe
from hlat.data import input_check as split_check
from hlat.data.corpus_files import files_of_source, numbered_sources
from hlat.data.input_check import SourceSplit, split_sources
from hlat.data.prepare.preparation import prepare
from hlat.data.stores.cache import Cache
from hlat.launch.start_examination import load_and_check
from hlat.launch.start_place import Here
from hlat.runtime.errors import DataError

WORDS = "the quick brown fox jumps over the lazy dog and looks back "


def sections(folder: Path, documents: dict[str, list[str]], **validation: Any) -> dict[str, Any]:
    sources = []
    for name, texts in documents.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        sources.append({"path": str(folder / f"{name}.jsonl"), "name": name})
    return {
        "run": {"dir": str(folder / "run"), "device": "cpu"},
        "model": {"preset": "tiny-1m"},
        "data": {
            "sources": sources,
            "sequence_length": 64,
            "tokenizer": {"train": "char"},
            "validation": validation,
        },
        "batch": {"global_batch": 8, "micro_batch": 8},
        "training": {"steps": 10},
    }


def check(content: dict[str, Any]):
    return load_and_check(lambda: parse_recipe(content, world=1), Here(1, 1))


def prepared(content: dict[str, Any], folder: Path):
    return prepare(parse_recipe(content, world=1).data, folder, workers=1)


def texts(count: int, words: int, start: int = 0) -> list[str]:
    return [f"document {number} {WORDS * words}" for number in range(start, start + count)]


def test_whole_documents_that_are_demanded_and_few_are_said_in_a_line_before_and_after(tmp_path: Path) -> None:
    content = sections(tmp_path, {"prose": texts(900, 4), "code": texts(40, 20, 900)}, fraction=0.05, by="document")
    report = check(content)
    assert not any(note.rule == "validation" for note in report.before_training), "the run itself says it, exactly"
    notes = [note.text for note in report.notes if note.rule == "validation"]
    said = [note for note in prepared(content, tmp_path / "data").notes if "validation" in note]
    assert (
        notes
        == said
        == [
            "1 of 2 sources (code) has under 10,000 validation tokens; without data.validation.by=document, the last "
            "5 % is held out where documents are few."
        ]
    )
    del content["data"]["validation"]["by"]
    assert any(source.documents for source in prepared(content, tmp_path / "a").manifest.splits["validation"].sources)


@pytest.mark.parametrize("validation", [{"fraction": 0.05, "by": "tail"}, {"fraction": 0.0}])
def test_other_splits_are_not_warned_of(tmp_path: Path, validation: dict[str, Any]) -> None:
    content = sections(tmp_path, {"prose": texts(900, 4), "code": texts(40, 20, 900)}, **validation)
    assert not [note for note in check(content).notes if note.rule == "validation"]
    assert not [note for note in prepared(content, tmp_path / "data").notes if "for validation" in note]


def test_documents_that_are_demanded_and_not_chosen_are_refused_before_the_start_and_the_remedy_works(
    tmp_path: Path,
) -> None:
    content = sections(tmp_path, {"prose": texts(11, 4)}, fraction=0.001, by="document")
    with pytest.raises(RecipeError, match=r"none of the 11 documents is chosen .* data\.validation\.by=auto"):
        check(content)
    with pytest.raises(DataError, match="none of the 11 documents"):
        prepared(content, tmp_path / "data")
    content["data"]["validation"]["by"] = "auto"
    assert len(check(content).notes) == 1
    assert prepared(content, tmp_path / "other").manifest.splits["validation"].documents >= 1


def test_online_data_without_validation_text_is_a_note(tmp_path: Path) -> None:
    content = sections(tmp_path, {"prose": texts(11, 4)}, fraction=0.001)
    content["data"]["mode"] = "online"
    assert [note.text for note in check(content).notes if note.rule == "validation"] == [
        "none of the 11 documents is chosen for validation. data.mode=prepared would hold out the end."
    ]


def measured(content: dict[str, Any]) -> SourceSplit:
    """The only source, split before the start."""
    data = parse_recipe(content, world=1).data
    (source,) = numbered_sources(data)
    files = {"text": files_of_source(source, Cache(Path("unused"), 0))}
    (split,) = split_sources(data, files, None)
    return split


@pytest.mark.parametrize("duplicates", ["drop", "keep"])
@pytest.mark.parametrize("fraction", [0.5, 0.9])
def test_a_tail_is_cut_off_before_copies_are_left_out_as_the_preparation_does(
    tmp_path: Path, fraction: float, duplicates: str
) -> None:
    content = sections(
        tmp_path, {"text": ["a" * 60, "b" * 60, "b" * 60, "b" * 60, "c" * 60]}, fraction=fraction, by="tail"
    )
    content["data"] |= {"duplicates": duplicates, "sequence_length": 20}
    done = prepared(content, tmp_path / "data").manifest
    found = measured(content)
    assert found.held_out_bytes == done.splits["validation"].text_bytes
    assert found.bytes - found.held_out_bytes == done.splits["train"].text_bytes


def test_a_corpus_with_copies_before_its_tail_is_long_enough(tmp_path: Path) -> None:
    content = sections(tmp_path, {"text": ["a" * 60, "b" * 60, "b" * 60, "b" * 60, "c" * 60]}, fraction=0.5, by="tail")
    content["data"] |= {"duplicates": "drop", "sequence_length": 100}
    content["batch"] = {"global_batch": 1, "micro_batch": 1}
    check(content)
    assert prepared(content, tmp_path / "data").manifest.splits["train"].tokens == 120


def compress(name: str, text: bytes) -> bytes:
    return gzip.compress(text) if name.endswith(".gz") else pa.compress(text, "zstd", asbytes=True)


@pytest.mark.parametrize("ending", ["txt.gz", "txt.zst", "jsonl.gz", "jsonl.zst", "parquet"])
@pytest.mark.parametrize("by", ["document", "tail"])
def test_no_more_than_the_limit_is_read_of_a_file_that_expands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, by: str
) -> None:
    content = sections(tmp_path, {"text": []}, fraction=0.2, by=by)
    path = tmp_path / f"big.{ending}"
    content["data"]["sources"] = [{"path": str(path), "name": "big"}]
    limit, document = split_check._MOST_BYTES, "a" * (1 << 20)
    monkeypatch.setattr(split_check, "_MOST_BYTES", 3 * len(document))
    read = list[str]()

    def encode(text: str) -> bytes:
        read.append(text)
        return text.encode()

    monkeypatch.setattr(split_check, "content_bytes", encode)
    for count, known in ((3, True), (64, False)):
        read.clear()
        if ending == "parquet":
            pq.write_table(pa.table({"text": [document] * count}), path)
        else:
            line = document if ending.startswith("txt") else json.dumps({"text": document}) + "\n"
            path.write_bytes(compress(path.name, (line * count).encode()))
        assert path.stat().st_size < split_check._MOST_BYTES < limit
        data = parse_recipe(content, world=1).data
        files = {"big": files_of_source(numbered_sources(data)[0], Cache(Path("unused"), 0))}
        found = split_sources(data, files, None)
        assert bool(found) == known
        assert known or sum(map(len, read)) <= 8 * len(document)  # four documents, and their pieces
