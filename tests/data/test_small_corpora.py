"""Small and odd corpora train with the recipe that gives nothing but their path, and are told of it in one line.

The witness of the split is a plain script below: documents by hash, or the last share of the text.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hlat.config.load import parse_recipe
from hlat.config.sections.data import DataConfig
from hlat.data.prepare.partitions import merge_partition_folders, prepare_partition
from hlat.data.prepare.preparation import prepare
from hlat.data.prepared.consistency import TAILS
from hlat.data.prepared.manifest import MANIFEST_FILE, write_record
from hlat.data.prepared.prepared_folder import PreparedData, open_prepared
from hlat.launch.start_examination import load_and_check
from hlat.launch.start_place import Here
from hlat.runtime.errors import DataError
from tests.support.data.corpora import write_jsonl

LINE = "the quick brown fox jumps over the lazy dog and looks back once more. "
Corpus = dict[str, list[str]]  # documents by the name of their source


def prose(count: int, characters: int, start: int = 0) -> list[str]:
    """Different documents of about so many characters."""
    return [
        f"{n} " + (LINE * (characters // len(LINE) + 1))[: max(characters - 5, 1)] for n in range(start, start + count)
    ]


def sources(count: int, documents: int, characters: int) -> Corpus:
    return {f"s{n:03}": prose(documents, characters, n * documents) for n in range(count)}


CORPORA: dict[str, tuple[Callable[[], Corpus], dict[str, Any]]] = {
    "one document": (lambda: {"s": prose(1, 20_000)}, {}),
    "one long line": (lambda: {"s": [LINE * 3000]}, {}),
    "one line of 70 characters": (lambda: {"s": [LINE]}, {}),
    "two documents": (lambda: {"s": prose(2, 5000)}, {}),
    "ten documents": (lambda: {"s": prose(10, 3000)}, {}),
    "60 poems": (lambda: {"s": prose(60, 400)}, {}),
    "300 documents": (lambda: {"s": prose(300, 500)}, {}),
    "2,000 short documents": (lambda: {"s": prose(2000, 60)}, {}),
    "empty documents between": (lambda: {"s": [text for each in prose(20, 500) for text in (each, "", "")]}, {}),
    "40 sources x 4 short": (lambda: sources(40, 4, 100), {}),
    "40 sources x 1": (lambda: sources(40, 1, 800), {}),
    "400 sources x 1": (lambda: sources(400, 1, 80), {}),
    "5 large sources and a tiny one": (lambda: {**sources(5, 400, 300), "tiny": prose(2, 90, 9000)}, {}),
    "one huge and many tiny documents": (lambda: {"s": ["z" * 300_000, *prose(50, 40)]}, {}),
    "a source of one word": (lambda: {"s": prose(1000, 200), "word": ["ab"]}, {}),
    "duplicates kept": (lambda: {"s": prose(1, 300) * 50 + prose(3, 300, 1)}, {}),
    "duplicates dropped": (lambda: {"s": prose(3, 300) + prose(1, 300, 9) * 50}, {"duplicates": "drop"}),
    "all are copies, dropped": (lambda: {"s": prose(1, 900) * 50}, {"duplicates": "drop"}),
    "a source of copies, dropped": (lambda: {"s": prose(800, 300), "t": prose(4, 300)}, {"duplicates": "drop"}),
    "half kept aside": (lambda: {"s": prose(12, 300)}, {"validation": {"fraction": 0.5}}),
    "a thousandth kept aside": (lambda: {"s": prose(400, 300)}, {"validation": {"fraction": 0.001}}),
}


def write(folder: Path, corpus: Corpus, **data: Any) -> dict[str, Any]:
    named = []
    for name, documents in corpus.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        named.append({"path": str(path), "name": name})
    return {
        "run": {"dir": str(folder / "run"), "device": "cpu"},
        "model": {"preset": "tiny-1m"},
        "data": {"sources": named, "sequence_length": 8, "tokenizer": {"train": "char"}} | data,
        "batch": {"global_batch": 1, "micro_batch": 1},
        "training": {"steps": 1},
    }


def checked(content: dict[str, Any]) -> list[str]:
    report = load_and_check(lambda: parse_recipe(content, world=1), Here(1, 1))
    return [note.text for note in report.notes if note.rule == "validation"]


def test_a_check_knows_of_the_tail_of_a_text_that_is_too_long_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text is one document, so what is held out is known without it; of several texts nothing is said unread."""
    monkeypatch.setattr("hlat.data.input_check._MOST_BYTES", 1 << 16)
    for count, says in ((1, "the corpus has too few documents to hold out whole ones"), (3, "")):
        folder = tmp_path / str(count)
        folder.mkdir()
        for number in range(count):
            (folder / f"{number}.txt").write_text(LINE * 2000)
        said = checked(write(folder, {}, path=str(folder), sources=[]))
        assert len(said) == bool(says) and says in "".join(said)


def data_of(content: dict[str, Any]) -> Any:
    return parse_recipe(content, world=1).data


def texts_of(prepared: PreparedData, split: Any) -> str:
    return prepared.tokenizer.decode(prepared.tokens(split).read(0, prepared.manifest.splits[split].tokens).tolist())


def expected(corpus: Corpus, fraction: float, drop: bool) -> tuple[str, str, set[str]]:
    """Training text, validation text, and the sources cut at their tail, by the definition of data.validation.by."""
    train, aside, cut, seen = "", "", set[str](), set[str]()

    def is_chosen(text: str) -> bool:
        digest = hashlib.blake2b(text.encode(), digest_size=8, key=b"hlat validation split").digest()
        return int.from_bytes(digest, "little") < int(fraction * 2.0**64)

    for name, documents in corpus.items():
        kept = []
        for text in filter(None, documents):
            if not (drop and text in seen):
                kept.append(text)
                seen.add(text)
        chosen = [text for text in kept if is_chosen(text)]
        size, share = sum(map(len, kept)), sum(map(len, chosen))
        enough = (len(chosen) >= 5 or share >= 10_000 or share >= fraction * size / 2) and share and share < size
        if enough or size < 2:
            train += "".join(text for text in kept if not is_chosen(text))
            aside += "".join(chosen)
        else:
            cut.add(name)
            left = max(size - int(size * (1 - fraction)), min(-(-16 // len(corpus)), size // 2))
            train, aside = train + "".join(kept)[: size - left], aside + "".join(kept)[size - left :]
    return train, aside, cut


@pytest.mark.parametrize("name", CORPORA)
def test_an_odd_corpus_is_split_without_refusal_and_told_in_one_line(tmp_path: Path, name: str) -> None:
    make, data = CORPORA[name]
    corpus = make()
    content = write(tmp_path, corpus, **data)
    said = checked(content)
    done = prepare(data_of(content), tmp_path / "data", workers=1)
    fraction = data.get("validation", {}).get("fraction", 0.01)
    train, aside, cut = expected(corpus, fraction, data.get("duplicates") == "drop")
    assert (texts_of(done, "train"), texts_of(done, "validation")) == (train, aside)
    assert done.validation_tokens >= 2, "something can be predicted"
    assert said == [note for note in done.notes if "validation" in note], "check and train say the same"
    assert len(said) == bool(cut) and all(len(line) < 200 and "\n" not in line for line in said)
    assert f"{len(cut)} of " in "".join(said) or len(corpus) == 1 or not cut
    names = list(corpus)
    assert done.manifest.settings.get(TAILS, []) == [names.index(each) for each in sorted(cut)]


def test_parts_of_a_corpus_are_split_as_the_whole(tmp_path: Path) -> None:
    content = write(tmp_path, {**sources(3, 200, 300), "a": prose(3, 900, 7000), "b": prose(4, 90, 8000)})
    whole = prepare(data_of(content), tmp_path / "whole", workers=1)
    content["data"]["tokenizer"] = {"path": str(whole.tokenizer_dir)}
    given = data_of(content)
    folders = [tmp_path / f"part-{number}" for number in (1, 2, 3)]
    for part, folder in enumerate(folders, 1):
        prepare_partition(given, folder, part, 3, workers=1)
        prepare_partition(given, folder, part, 3, workers=1)  # nothing to do
    merged = merge_partition_folders(given, tmp_path / "merged", folders)
    assert whole.manifest.settings[TAILS] and merged.manifest.splits == whole.manifest.splits
    assert merged.notes == whole.notes
    assert prepare(given, tmp_path / "merged", workers=1).fingerprint == merged.fingerprint


def test_a_tail_of_several_files_is_cut_in_parts_as_in_the_whole(tmp_path: Path) -> None:
    """It begins in the second of three files, each of which is a part."""
    (folder := tmp_path / "texts").mkdir()
    for number in range(3):
        write_jsonl(folder / f"{number}.jsonl", [*prose(20, 300, 100 * number)])
    section = {"path": str(folder), "sequence_length": 8, "tokenizer": {"train": "char"}}
    section["validation"] = {"fraction": 0.5, "by": "tail"}
    whole = prepare(DataConfig.model_validate(section), tmp_path / "whole", workers=1)
    given = DataConfig.model_validate(section | {"tokenizer": {"path": str(whole.tokenizer_dir), "eos_token": None}})
    folders = [tmp_path / f"part-{number}" for number in (1, 2, 3)]
    for part, each in enumerate(folders, 1):
        prepare_partition(given, each, part, 3, workers=1)
    merged = merge_partition_folders(given, tmp_path / "merged", folders)
    assert merged.manifest.splits == whole.manifest.splits


def test_data_of_earlier_versions_stays_valid_and_is_not_commented(tmp_path: Path) -> None:
    """They split every source by hash, and recorded that; a recipe that gives nothing else still means their data."""
    content = write(tmp_path, {"s": prose(400, 300), "t": prose(2, 90, 900)})
    content["data"] |= {"validation": {"by": "document"}, "prepared_dir": str(tmp_path / "data")}
    old = prepare(data_of(content), tmp_path / "data", workers=1)
    write_record(old.dir / MANIFEST_FILE, old.manifest.model_copy(update={"notes": []}))
    del content["data"]["validation"]
    again = prepare(data_of(content), old.dir, workers=1)
    assert again.fingerprint == old.fingerprint and again.notes == [] and checked(content) == []
    new = prepare(data_of(content), tmp_path / "new", workers=1)
    assert new.manifest.settings[TAILS] == [1]
    content["data"]["validation"] = {"by": "document"}
    with pytest.raises(DataError, match="sources split at their tail"):
        open_prepared(new.dir, data_of(content))
