"""Finished data can be used without its corpus; other settings, files or folders are refused and named."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hlat.data import corpus_files as sources
from hlat.data.prepare.preparation import prepare
from hlat.data.prepare.worker import WorkerPool
from hlat.data.prepared.prepared_folder import check_tokenizer, check_vocabulary, open_prepared
from hlat.data.samples.training_data import ValidationData
from hlat.runtime.errors import DataError, StorageError
from tests.support.data.corpora import documents, tree, write_jsonl
from tests.support.data.preparing import data_config, training_data

pytestmark = pytest.mark.usefixtures("small_units")


def test_finished_data_is_returned_without_tokenizing(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    first = prepare(data_config(small), out, workers=1)
    before = tree(out)

    def no_work(*_: object) -> Iterator[int]:
        raise AssertionError("nothing should be tokenized")

    monkeypatch.setattr(WorkerPool, "run", no_work)
    again = prepare(data_config(small, sequence_length=7, shuffle=False, workers=3), out)
    assert again.fingerprint == first.fingerprint and tree(out) == before
    hashed: list[Path] = []
    read = sources.sha256_of
    monkeypatch.setattr(sources, "sha256_of", lambda path: (hashed.append(path), read(path))[1])
    os.utime(
        small / "a.jsonl"
    )  # new modification time, same content: hashed once more, accepted, and not hashed a third time
    for _ in range(3):
        assert prepare(data_config(small), out).fingerprint == first.fingerprint
    assert hashed == [small / "a.jsonl"]
    (out / "hashes.json").write_text("damaged")
    assert prepare(data_config(small), out).fingerprint == first.fingerprint and len(hashed) == 2
    text = (small / "a.jsonl").read_text()
    (small / "a.jsonl").write_text(text.replace("a", "e", 1))
    try:
        with pytest.raises(DataError, match=r"a\.jsonl changed since"):
            prepare(data_config(small), out)
    finally:
        (small / "a.jsonl").write_text(text)


def test_finished_data_is_used_without_its_corpus(small: Path, tmp_path: Path) -> None:
    corpus, out = tmp_path / "corpus", tmp_path / "out"
    shutil.copytree(small, corpus)
    with pytest.raises(DataError, match="gone"):
        prepare(data_config(tmp_path / "gone"), out)
    first = prepare(data_config(corpus), out, workers=1)
    with pytest.raises(DataError, match=r"typo: no such.*another path.*set in the recipe: data\.path=.*corpus$"):
        prepare(data_config(tmp_path / "typo"), out)
    with pytest.raises(DataError, match=r"typo.*another path"):
        prepare(data_config(corpus, validation={"path": str(tmp_path / "typo")}), out)
    shutil.rmtree(corpus)
    again = prepare(data_config(corpus), out)
    assert again.fingerprint == first.fingerprint and "used without it" in again.notes[-1]
    assert again.notes[:-1] == first.notes == open_prepared(out).notes
    corpus.mkdir()  # an existing but unusable corpus is not treated as missing
    with pytest.raises(DataError, match="contains no files"):
        prepare(data_config(corpus), out)
    corpus.rmdir()
    with pytest.raises(DataError, match=r"data\.validation\.fraction"):
        prepare(data_config(corpus, validation={"fraction": 0.3}), out)


def test_finished_data_is_used_when_its_corpus_can_no_longer_be_listed(small: Path, tmp_path: Path) -> None:
    corpus, out = tmp_path / "corpus", tmp_path / "out"
    shutil.copytree(small, corpus)
    first = prepare(data_config(corpus), out, workers=1)
    for name, target in (("c.jsonl", "gone.jsonl"), ("part2", "unmounted"), ("a.part", small / "a.jsonl")):
        (corpus / name).symlink_to(target)
        again = prepare(data_config(corpus), out)
        assert again.fingerprint == first.fingerprint
        assert str(corpus / name) in again.notes[-1] and "used without it" in again.notes[-1]
        (corpus / name).unlink()
    (corpus / "part2").symlink_to(small)
    with pytest.raises(DataError, match="from 2 files, now 4"):
        prepare(data_config(corpus), out)


def test_finished_data_is_used_without_the_given_tokenizer(small: Path, tmp_path: Path) -> None:
    trained = prepare(data_config(small), tmp_path / "first", workers=1)
    given = Path(shutil.copytree(trained.dir / "tokenizer", tmp_path / "given"))
    config, out = data_config(small, tokenizer={"path": str(given)}), tmp_path / "out"
    first = prepare(config, out, workers=1)
    shutil.rmtree(given)
    assert prepare(config, out).fingerprint == first.fingerprint == open_prepared(out, config).fingerprint
    for other in ({"path": str(tmp_path / "typo")}, {"path": str(given), "eos_token": None}):
        for attempt in (lambda config: prepare(config, out), lambda config: open_prepared(out, config)):
            with pytest.raises(DataError, match=rf"no such tokenizer.*{given} data\.tokenizer\.eos_token=auto"):
                attempt(data_config(small, tokenizer=other))
    changed = tmp_path / "changed"
    shutil.copytree(small, changed)
    write_jsonl(changed / "a.jsonl", ["other"])
    with pytest.raises(DataError, match=r"the corpus: "):  # the corpus exists, so it is checked
        prepare(data_config(changed, tokenizer={"path": str(given)}), out)


def test_finished_data_is_used_without_its_corpus_after_the_tokenizer_moved(small: Path, tmp_path: Path) -> None:
    trained = prepare(data_config(small), tmp_path / "first", workers=1)
    corpus, given, out = tmp_path / "corpus", tmp_path / "given", tmp_path / "out"
    shutil.copytree(small, corpus)
    shutil.copytree(trained.dir / "tokenizer", given)
    first = prepare(data_config(corpus, tokenizer={"path": str(given)}), out, workers=1)
    shutil.rmtree(corpus)
    moved = given.rename(tmp_path / "moved")
    assert prepare(data_config(corpus, tokenizer={"path": str(moved)}), out).fingerprint == first.fingerprint


def test_unusable_folders_and_too_large_tokenizers_are_refused(small: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="is a file"):
        prepare(data_config(small), tmp_path / "file")
    with pytest.raises(DataError, match=r"prepared_dir .*/file/below: .*/file is a file"):
        prepare(data_config(small), tmp_path / "file" / "below")
    with pytest.raises(StorageError, match="File name too long"):
        prepare(data_config(small), tmp_path / ("long" * 100))
    out = prepare(data_config(small), tmp_path / "out", workers=1)
    config = data_config(small, tokenizer={"path": str(out.dir / "tokenizer")})
    check_tokenizer(config, out.manifest.vocab_size)
    with pytest.raises(DataError, match=f"{out.manifest.vocab_size} tokens"):
        check_tokenizer(config, out.manifest.vocab_size - 1)
    check_tokenizer(data_config(small, tokenizer={"path": str(tmp_path / "gone")}), 1)
    check_tokenizer(data_config(small), 1)


def test_a_damaged_shard_is_an_error_when_it_is_read(small: Path, tmp_path: Path) -> None:
    prepared = prepare(data_config(small), tmp_path / "out", workers=1)
    shard = prepared.dir / "train-00001.bin"
    tokens = np.fromfile(shard, dtype="<u2")
    tokens[0] = 400
    tokens.tofile(shard)
    data = training_data(open_prepared(prepared.dir), 8, seed=0)
    with pytest.raises(DataError, match=r"train-00001\.bin: damaged: it contains token 400, the vocabulary has 400"):
        data.batch(0, data.samples_per_epoch)
    held_out = prepared.dir / "validation-00000.bin"
    held_out.write_bytes(b"\xff" * held_out.stat().st_size)
    with pytest.raises(DataError, match=r"validation-00000\.bin: damaged: it contains token 65535"):
        ValidationData(open_prepared(prepared.dir), 8).batch(0, 1)


def test_other_settings_or_files_are_refused_and_named(small: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for file in small.iterdir():
        (corpus / file.name).write_bytes(file.read_bytes())
    out = tmp_path / "out"
    prepare(data_config(corpus), out, workers=1)
    before = tree(out)
    for change, named in (
        ({"tokenizer": {"vocab_size": 401}}, "data.tokenizer.vocab_size: prepared with 400, now 401"),
        ({"validation": {"fraction": 0.3}}, "data.validation.fraction: prepared with 0.2, now 0.3"),
        ({"shard_tokens": 6000}, "data.shard_tokens: prepared with 5000, now 6000"),
        ({"text_column": "body"}, "data.text_column"),
    ):
        for attempt in (prepare, lambda config, out: open_prepared(out, config)):
            with pytest.raises(DataError) as caught:
                attempt(data_config(corpus, **change), out)
            assert named in str(caught.value) and "data.prepared_dir" in str(caught.value)
    write_jsonl(corpus / "b.jsonl", documents(20, 800, seed=2))
    with pytest.raises(DataError, match=r"b\.jsonl changed since"):
        prepare(data_config(corpus), out)
    write_jsonl(corpus / "c.jsonl", documents(20, 800, seed=2))
    with pytest.raises(DataError, match="from 2 files, now 3"):
        prepare(data_config(corpus), out)
    assert tree(out) == before


def test_foreign_files_are_not_overwritten(small: Path, tmp_path: Path) -> None:
    (tmp_path / "train-00000.bin").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"holds train-00000\.bin but no manifest"):
        prepare(data_config(small), tmp_path, workers=1)
    assert (tmp_path / "train-00000.bin").read_bytes() == b"mine"


def test_no_document_for_validation_is_an_error(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", documents(3, 800))
    few, out = {"fraction": 1e-6, "by": "document"}, tmp_path / "out"

    def before_tokenizing(stage: str, done: int, total: int) -> None:
        del done, total
        assert stage != "tokenize"

    with pytest.raises(DataError, match=r"none of the 3 documents.*by=auto.*fraction=0 for no validation\.$"):
        prepare(data_config(file, validation=few), out, workers=1, progress=before_tokenizing)
    trained = prepare(data_config(file, validation={"fraction": 0.2, "by": "tail"}), out, workers=1)
    assert trained.validation_tokens > 0
    given = data_config(file, validation=few, tokenizer={"path": str(trained.dir / "tokenizer")})
    with pytest.raises(DataError, match=r"none of the 3 documents.*by=auto.*fraction=0.*after deleting .*partial"):
        prepare(given, tmp_path / "other", workers=1)
    nulls = write_jsonl(tmp_path / "nulls.jsonl", [None, ""])
    with pytest.raises(DataError, match=r"nulls\.jsonl: every document in it is null or empty"):
        prepare(data_config(file, validation={"path": str(nulls)}), tmp_path / "third", workers=1)


def test_a_vocabulary_larger_than_the_models_is_refused(small: Path, tmp_path: Path) -> None:
    prepared = prepare(data_config(small), tmp_path / "out", workers=1)
    check_vocabulary(prepared, 400)
    with pytest.raises(DataError, match=r"400 tokens, the model only 399.*model\.vocab_size to at least 400"):
        check_vocabulary(prepared, 399)
