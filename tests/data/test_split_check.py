"""Little or no validation text is said before and after preparation; the preparation itself is the witness."""

import json
from pathlib import Path
from typing import Any

import pytest

from hlat.config import RecipeError
from hlat.config.load import parse_recipe
from hlat.data.prepare import prepare
from hlat.launch.start_checks import Here, load_and_check
from hlat.runtime import DataError

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


def test_a_source_of_few_documents_is_named_with_its_tokens_as_the_preparation_counts_them(tmp_path: Path) -> None:
    content = sections(tmp_path, {"prose": texts(900, 4), "code": texts(40, 20, 900)}, fraction=0.05)
    report = check(content)
    assert not any(note.rule == "validation" for note in report.before_training), "the run itself says it, exactly"
    notes = [str(note) for note in report.notes if note.rule == "validation"]
    done = prepared(content, tmp_path / "data")
    said = [note for note in done.notes if "for validation" in note]
    assert len(notes) == len(said) == 1
    aside = {done.manifest.source_names[each.source]: each for each in done.manifest.splits["validation"].sources}
    assert aside["prose"].documents > 5 and "prose" not in said[0]  # enough documents: nothing to say
    kept = aside.get("code")
    documents, tokens = (0, 0) if kept is None else (kept.documents, kept.tokens)
    assert f"{documents} of 40 documents of code ({tokens:,} tokens) for validation" in said[0]
    assert f"{documents} of 40 documents of code (about " in notes[0]  # ends of documents are not counted yet
    for text in (said[0], notes[0]):
        assert "data.validation.by=tail keeps the last 0.05 of each source" in text
        assert "data.validation.fraction=0.2 " in text or "data.validation.path" in text


@pytest.mark.parametrize("validation", [{"fraction": 0.05, "by": "tail"}, {"fraction": 0.0}])
def test_other_splits_are_not_warned_of(tmp_path: Path, validation: dict[str, Any]) -> None:
    content = sections(tmp_path, {"prose": texts(900, 4), "code": texts(40, 20, 900)}, **validation)
    assert not [note for note in check(content).notes if note.rule == "validation"]
    assert not [note for note in prepared(content, tmp_path / "data").notes if "for validation" in note]


def test_a_split_without_validation_text_is_refused_before_the_start_and_the_remedy_works(tmp_path: Path) -> None:
    content = sections(tmp_path, {"prose": texts(11, 4)}, fraction=0.001)
    with pytest.raises(RecipeError, match="none of the 11 documents is chosen for validation") as refused:
        check(content)
    with pytest.raises(DataError, match="none of the 11 documents"):
        prepared(content, tmp_path / "data")
    named = str(refused.value).split("data.validation.fraction=")[1].split(",")[0]
    content["data"]["validation"] = {"fraction": float(named)}
    check(content)
    assert prepared(content, tmp_path / "other").manifest.splits["validation"].documents >= 1
