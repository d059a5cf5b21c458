"""Prepared data: the same bytes for any number of workers and any interruption; wrong things are refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import tokenizers
from corpora import documents, prose, tree, write_jsonl

from hlat.config import DataConfig
from hlat.data import (
    Prepared,
    TrainingData,
    ValidationData,
    check_tokenizer,
    check_vocabulary,
    open_prepared,
    preparation,
    prepare,
    sources,
    verify,
)
from hlat.data.pool import WorkerPool
from hlat.data.units import Unit
from hlat.runtime import DataError, StorageError

SMALL: dict[str, Any] = {"tokenizer": {"vocab_size": 400}, "validation": {"fraction": 0.2}, "shard_tokens": 5000}


def _config(path: Path | str, **more: Any) -> DataConfig:
    return DataConfig.model_validate({"path": str(path), **SMALL, **more})


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 documents with nulls and empties in two files."""
    folder = tmp_path_factory.mktemp("small")
    write_jsonl(folder / "a.jsonl", [*documents(40, 800), None, ""])
    write_jsonl(folder / "b.jsonl", [None, *documents(20, 800, seed=1)])
    return folder


@pytest.fixture(scope="module", autouse=True)
def small_units() -> Iterator[None]:
    """Units of 50 kB instead of a megabyte, so that a corpus of many units is tokenized in a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "_SMALLEST_UNIT", UNIT)
        yield


UNIT = 50_000
LARGE: dict[str, Any] = {"tokenizer": {"vocab_size": 400, "train_bytes": 100_000}, "shard_tokens": 60_000}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of about 20 units and 8 shards, in three files; the tokenizer is trained on a part of it."""
    folder = tmp_path_factory.mktemp("large")
    for number in range(3):
        write_jsonl(folder / f"{number}.jsonl", documents(60, 4_500, seed=number))
    return folder


class Watched(NamedTuple):
    """What a run that nothing disturbs makes, and of which units."""

    files: dict[str, bytes]
    units: set[int]


@pytest.fixture(scope="module")
def undisturbed(large: Path, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """The large corpus, prepared."""
    out = tmp_path_factory.mktemp("reference")
    with pytest.MonkeyPatch.context() as patch:
        units = _watch_units(patch)
        prepare(_config(large, **LARGE), out, workers=2)
    assert len(units) > 15
    assert sum(name.startswith("train-0") for name in tree(out)) > 3
    return Watched(tree(out), units)


@pytest.fixture
def reference(undisturbed: Watched) -> dict[str, bytes]:
    """The files of the large corpus, prepared without disturbance."""
    return undisturbed.files


def _watch_units(patch: pytest.MonkeyPatch) -> set[int]:
    """The numbers of the units that are tokenized from now on."""
    seen: set[int] = set()
    run = WorkerPool.run

    def watched(pool: WorkerPool, units: Iterator[Unit]) -> Iterator[int]:
        for number in run(pool, units):
            seen.add(number)
            yield number

    patch.setattr(WorkerPool, "run", watched)
    return seen


# --- what comes out ----------------------------------------------------------------------------------------------


def test_tokens_are_the_documents_in_order(small: Path, tmp_path: Path) -> None:
    prepared = prepare(_config(small), tmp_path / "out", workers=2)
    texts = [t for t in [*documents(40, 800), *documents(20, 800, seed=1)] if t]
    found: dict[str, list[str]] = {}
    for split in ("train", "validation"):
        bounds = prepared.documents(split).tolist()
        tokens = prepared.tokens(split)
        assert bounds[0] == 0 and bounds[-1] == len(tokens) == prepared.manifest.splits[split].tokens
        parts = [tokens.read(a, b).tolist() for a, b in pairwise(bounds)]
        assert all(part[-1] == prepared.tokenizer.eos_id for part in parts)
        assert [part[:-1] for part in parts] == [prepared.tokenizer.encode(prepared.tokenizer.decode(p)) for p in parts]
        found[split] = [prepared.tokenizer.decode(part) for part in parts]
        assert prepared.manifest.splits[split].text_bytes == sum(len(t.encode()) for t in found[split])
    held_out = set(found["validation"])
    assert found["train"] == [t for t in texts if t not in held_out]
    assert found["validation"] == [t for t in texts if t in held_out] != []
    assert (prepared.manifest.null_rows, prepared.manifest.empty_documents) == (2, 1)
    assert "2 rows hold no text" in prepared.notes[0]
    assert all(shard.tokens == 5000 for shard in prepared.manifest.splits["train"].shards[:-1])
    assert len(prepared.manifest.splits["train"].shards) > 1
    assert verify(tmp_path / "out").fingerprint == prepared.fingerprint


@pytest.mark.parametrize("workers", [1, 3])
def test_same_bytes_for_any_number_of_workers(
    large: Path, tmp_path: Path, reference: dict[str, bytes], workers: int
) -> None:
    prepare(_config(large, **LARGE), tmp_path / "out", workers=workers)
    assert tree(tmp_path / "out") == reference


def test_split_follows_the_document_not_its_neighbours(small: Path, tmp_path: Path) -> None:
    def held_out(path: Path, out: str) -> set[str]:
        prepared = prepare(_config(path), tmp_path / out, workers=1)
        bounds = prepared.documents("validation").tolist()
        tokens = prepared.tokens("validation")
        return {prepared.tokenizer.decode(tokens.read(a, b)) for a, b in pairwise(bounds)}

    both = held_out(small, "both")
    one = held_out(small / "a.jsonl", "one")
    assert one == both & set(documents(40, 800))


def test_tail_is_nanogpts_split(shared: Path, tmp_path: Path) -> None:
    file = shared / "data" / "text" / "tinyshakespeare.txt"
    text = file.read_text()
    chars = sorted(set(text))
    section = {"tokenizer": {"train": "char"}, "validation": {"by": "tail", "fraction": 0.1}}
    prepared = prepare(DataConfig.model_validate({"path": str(file), **section}), tmp_path, workers=1)
    ids = [chars.index(char) for char in text]
    cut = int(len(text) * 0.9)
    assert prepared.manifest.vocab_size == 65 and prepared.manifest.eos_id is None
    assert prepared.tokens("train").read(0, prepared.train_tokens).tolist() == ids[:cut]
    assert prepared.tokens("validation").read(0, prepared.validation_tokens).tolist() == ids[cut:]


def test_tail_is_taken_of_every_source(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two.txt"
    one.mkdir()
    texts = [prose(n, 700) for n in range(3)]
    for number, text in enumerate(texts[:2]):
        (one / f"{number}.txt").write_text(text)
    two.write_text(texts[2])
    section = {"tokenizer": {"train": "char"}, "validation": {"by": "tail", "fraction": 0.25}}
    sources = [{"path": str(one)}, {"path": str(two)}]
    prepared = prepare(DataConfig.model_validate({"sources": sources, **section}), tmp_path / "out", workers=2)
    first = texts[0] + texts[1]
    cuts = int(len(first) * 0.75), int(len(texts[2]) * 0.75)
    train = prepared.tokenizer.decode(prepared.tokens("train").read(0, prepared.train_tokens))
    held_out = prepared.tokenizer.decode(prepared.tokens("validation").read(0, prepared.validation_tokens))
    assert train == first[: cuts[0]] + texts[2][: cuts[1]]
    assert held_out == first[cuts[0] :] + texts[2][cuts[1] :]


def test_validation_of_its_own(small: Path, tmp_path: Path) -> None:
    validation = {"path": str(small / "b.jsonl")}
    prepared = prepare(_config(small / "a.jsonl", validation=validation), tmp_path / "out", workers=1)
    train, held_out = prepared.manifest.splits["train"], prepared.manifest.splits["validation"]
    assert (train.documents, held_out.documents) == (40, 20)


def test_dtype_follows_the_vocabulary(small: Path, tmp_path: Path) -> None:
    description = json.loads(prepare(_config(small), tmp_path / "a", workers=1).tokenizer.files["tokenizer.json"])
    # the same tokenizer with one token at id 65536, which two bytes do not hold
    description["added_tokens"].append({**description["added_tokens"][0], "id": 65536, "content": "<|last|>"})
    filler = {f"<filler {i}>": i for i in range(400, 65536)}
    description["model"]["vocab"].update(filler)
    big = tmp_path / "tokenizer.json"
    big.write_text(json.dumps(description))
    assert tokenizers.Tokenizer.from_file(str(big)).token_to_id("<|last|>") == 65536
    section = {"tokenizer": {"path": str(big), "eos_token": "<|last|>"}}
    prepared = prepare(_config(small, **section), tmp_path / "b", workers=1)
    assert prepared.manifest.dtype == "uint32"
    assert prepared.tokens("train").read(0, prepared.train_tokens).max() == 65536
    verify(tmp_path / "b")


def test_small_corpus_says_that_the_vocabulary_is_smaller(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", ["tiny corpus"] * 3)
    config = _config(file, tokenizer={"vocab_size": 5000}, validation={"fraction": 0})
    prepared = prepare(config, tmp_path / "out", workers=1)
    assert "too small for data.tokenizer.vocab_size = 5000" in prepared.notes[0]


def test_progress_counts_up_to_all_bytes(large: Path, tmp_path: Path) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    prepare(
        _config(large, **LARGE),
        tmp_path / "out",
        workers=2,
        progress=lambda stage, done, total: seen.setdefault(stage, []).append((done, total)),
    )
    size = sum(file.stat().st_size for file in large.iterdir())
    assert list(seen) == ["hash", "sample", "tokenize"]
    for steps in seen.values():
        assert {total for _, total in steps} == {size}
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)
        assert steps[-1] == (size, size)
    assert len(seen["tokenize"]) > 5


# --- again -------------------------------------------------------------------------------------------------------


def test_done_already_returns_at_once(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    first = prepare(_config(small), out, workers=1)
    before = tree(out)

    def no_work(*_: object) -> Iterator[int]:
        raise AssertionError("nothing is to be tokenized")

    monkeypatch.setattr(WorkerPool, "run", no_work)
    again = prepare(_config(small, sequence_length=7, shuffle=False, workers=3), out)
    assert again.fingerprint == first.fingerprint and tree(out) == before
    hashed: list[Path] = []
    read = sources._sha256
    monkeypatch.setattr(sources, "_sha256", lambda path: (hashed.append(path), read(path))[1])
    os.utime(small / "a.jsonl")  # another time, same content: hashed again, accepted, and not hashed a third time
    for _ in range(3):
        assert prepare(_config(small), out).fingerprint == first.fingerprint
    assert hashed == [small / "a.jsonl"]
    (out / "hashes.json").write_text("damaged")
    assert prepare(_config(small), out).fingerprint == first.fingerprint and len(hashed) == 2
    text = (small / "a.jsonl").read_text()
    (small / "a.jsonl").write_text(text.replace("a", "e", 1))
    try:
        with pytest.raises(DataError, match=r"a\.jsonl changed since"):
            prepare(_config(small), out)
    finally:
        (small / "a.jsonl").write_text(text)


def test_finished_data_stands_without_its_corpus(small: Path, tmp_path: Path) -> None:
    corpus, out = tmp_path / "corpus", tmp_path / "out"
    shutil.copytree(small, corpus)
    with pytest.raises(DataError, match="gone"):
        prepare(_config(tmp_path / "gone"), out)
    first = prepare(_config(corpus), out, workers=1)
    with pytest.raises(DataError, match=r"typo: no such.*another path.*give the recipe data\.path=.*corpus$"):
        prepare(_config(tmp_path / "typo"), out)
    with pytest.raises(DataError, match=r"typo.*another path"):
        prepare(_config(corpus, validation={"path": str(tmp_path / "typo")}), out)
    shutil.rmtree(corpus)
    again = prepare(_config(corpus), out)
    assert again.fingerprint == first.fingerprint and "taken as it is" in again.notes[-1]
    assert again.notes[:-1] == first.notes == open_prepared(out).notes
    corpus.mkdir()  # there, but not usable: not the same as gone
    with pytest.raises(DataError, match="holds no files"):
        prepare(_config(corpus), out)
    corpus.rmdir()
    with pytest.raises(DataError, match=r"data\.validation\.fraction"):
        prepare(_config(corpus, validation={"fraction": 0.3}), out)


def test_finished_data_stands_without_the_tokenizer_it_was_given(small: Path, tmp_path: Path) -> None:
    trained = prepare(_config(small), tmp_path / "first", workers=1)
    given = Path(shutil.copytree(trained.dir / "tokenizer", tmp_path / "given"))
    config, out = _config(small, tokenizer={"path": str(given)}), tmp_path / "out"
    first = prepare(config, out, workers=1)
    shutil.rmtree(given)
    assert prepare(config, out).fingerprint == first.fingerprint == open_prepared(out, config).fingerprint
    for other in ({"path": str(tmp_path / "typo")}, {"path": str(given), "eos_token": None}):
        for attempt in (lambda config: prepare(config, out), lambda config: open_prepared(out, config)):
            with pytest.raises(DataError, match=rf"no such tokenizer.*{given} data\.tokenizer\.eos_token=auto"):
                attempt(_config(small, tokenizer=other))
    changed = tmp_path / "changed"
    shutil.copytree(small, changed)
    write_jsonl(changed / "a.jsonl", ["other"])
    with pytest.raises(DataError, match=r"the corpus: "):  # the corpus is there, so it counts
        prepare(_config(changed, tokenizer={"path": str(given)}), out)


def test_finished_data_stands_without_corpus_though_the_tokenizer_moved(small: Path, tmp_path: Path) -> None:
    trained = prepare(_config(small), tmp_path / "first", workers=1)
    corpus, given, out = tmp_path / "corpus", tmp_path / "given", tmp_path / "out"
    shutil.copytree(small, corpus)
    shutil.copytree(trained.dir / "tokenizer", given)
    first = prepare(_config(corpus, tokenizer={"path": str(given)}), out, workers=1)
    shutil.rmtree(corpus)
    moved = given.rename(tmp_path / "moved")
    assert prepare(_config(corpus, tokenizer={"path": str(moved)}), out).fingerprint == first.fingerprint


def test_a_folder_that_is_a_file_and_a_tokenizer_that_is_too_large(small: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="is a file"):
        prepare(_config(small), tmp_path / "file")
    with pytest.raises(DataError, match=r"prepared_dir .*/file/below: .*/file is a file"):
        prepare(_config(small), tmp_path / "file" / "below")
    with pytest.raises(StorageError, match="File name too long"):
        prepare(_config(small), tmp_path / ("long" * 100))
    out = prepare(_config(small), tmp_path / "out", workers=1)
    config = _config(small, tokenizer={"path": str(out.dir / "tokenizer")})
    check_tokenizer(config, out.manifest.vocab_size)
    with pytest.raises(DataError, match=f"{out.manifest.vocab_size} tokens"):
        check_tokenizer(config, out.manifest.vocab_size - 1)
    check_tokenizer(_config(small, tokenizer={"path": str(tmp_path / "gone")}), 1)
    check_tokenizer(_config(small), 1)


def test_a_damaged_shard_is_an_error_where_it_is_read(small: Path, tmp_path: Path) -> None:
    prepared = prepare(_config(small), tmp_path / "out", workers=1)
    shard = prepared.dir / "train-00001.bin"
    tokens = np.fromfile(shard, dtype="<u2")
    tokens[0] = 400
    tokens.tofile(shard)
    data = TrainingData(open_prepared(prepared.dir), 8, seed=0)
    with pytest.raises(DataError, match=r"train-00001\.bin: damaged: it holds token 400, the vocabulary has 400"):
        data.batch(0, data.samples_per_epoch)
    held_out = prepared.dir / "validation-00000.bin"
    held_out.write_bytes(b"\xff" * held_out.stat().st_size)
    with pytest.raises(DataError, match=r"validation-00000\.bin: damaged: it holds token 65535"):
        ValidationData(open_prepared(prepared.dir), 8).batch(0, 1)


def test_other_settings_or_files_are_refused_by_name(small: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for file in small.iterdir():
        (corpus / file.name).write_bytes(file.read_bytes())
    out = tmp_path / "out"
    prepare(_config(corpus), out, workers=1)
    before = tree(out)
    for change, named in (
        ({"tokenizer": {"vocab_size": 401}}, "data.tokenizer.vocab_size: prepared with 400, now 401"),
        ({"validation": {"fraction": 0.3}}, "data.validation.fraction: prepared with 0.2, now 0.3"),
        ({"shard_tokens": 6000}, "data.shard_tokens: prepared with 5000, now 6000"),
        ({"text_column": "body"}, "data.text_column"),
    ):
        for attempt in (prepare, lambda config, out: open_prepared(out, config)):
            with pytest.raises(DataError) as caught:
                attempt(_config(corpus, **change), out)
            assert named in str(caught.value) and "data.prepared_dir" in str(caught.value)
    write_jsonl(corpus / "b.jsonl", documents(20, 800, seed=2))
    with pytest.raises(DataError, match=r"b\.jsonl changed since"):
        prepare(_config(corpus), out)
    write_jsonl(corpus / "c.jsonl", documents(20, 800, seed=2))
    with pytest.raises(DataError, match="from 2 files, now 3"):
        prepare(_config(corpus), out)
    assert tree(out) == before


def test_strange_files_are_not_overwritten(small: Path, tmp_path: Path) -> None:
    (tmp_path / "train-00000.bin").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"holds train-00000\.bin but no manifest"):
        prepare(_config(small), tmp_path, workers=1)
    assert (tmp_path / "train-00000.bin").read_bytes() == b"mine"


def test_no_document_for_validation_is_an_error(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", documents(3, 800))
    few, out = {"fraction": 1e-6}, tmp_path / "out"

    def before_tokenizing(stage: str, done: int, total: int) -> None:
        del done, total
        assert stage != "tokenize"

    with pytest.raises(DataError, match=r"none of the 3 documents.*by=tail.*fraction=0 for no validation\.$"):
        prepare(_config(file, validation=few), out, workers=1, progress=before_tokenizing)
    trained = prepare(_config(file, validation={"fraction": 0.2, "by": "tail"}), out, workers=1)
    assert trained.validation_tokens > 0
    given = _config(file, validation=few, tokenizer={"path": str(trained.dir / "tokenizer")})
    with pytest.raises(DataError, match=r"none of the 3 documents.*by=tail.*fraction=0.*after deleting .*partial"):
        prepare(given, tmp_path / "other", workers=1)
    nulls = write_jsonl(tmp_path / "nulls.jsonl", [None, ""])
    with pytest.raises(DataError, match=r"nulls\.jsonl: every document in it is null or empty"):
        prepare(_config(file, validation={"path": str(nulls)}), tmp_path / "third", workers=1)


def test_vocabulary_larger_than_the_models(small: Path, tmp_path: Path) -> None:
    prepared = prepare(_config(small), tmp_path / "out", workers=1)
    check_vocabulary(prepared, 400)
    with pytest.raises(DataError, match=r"400 tokens, the model only 399.*model\.vocab_size to at least 400"):
        check_vocabulary(prepared, 399)


# --- damage ------------------------------------------------------------------------------------------------------


@pytest.fixture
def finished(small: Path, tmp_path: Path) -> Prepared:
    return prepare(_config(small), tmp_path / "out", workers=1)


@pytest.mark.parametrize("name", ["train-00000.bin", "validation-documents.bin"])
def test_opening_notices_missing_and_shorter_files(finished: Prepared, name: str) -> None:
    file = finished.dir / name
    content = file.read_bytes()
    for change in (lambda: file.write_bytes(content[:-2]), file.unlink):
        change()
        with pytest.raises(DataError, match=name):
            open_prepared(finished.dir)


@pytest.mark.parametrize("name", ["train-00001.bin", "validation-00000.bin", "train-documents.bin"])
def test_verifying_notices_one_bit(finished: Prepared, name: str) -> None:
    file = finished.dir / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    open_prepared(finished.dir)
    with pytest.raises(DataError, match=f"{name}: the checksum differs"):
        verify(finished.dir)


def test_verifying_notices_tokens_outside_the_vocabulary(finished: Prepared) -> None:
    file = finished.dir / "train-00000.bin"
    tokens = np.fromfile(file, dtype="<u2")
    tokens[7] = 400
    tokens.tofile(file)
    with pytest.raises(DataError, match="token 400 is outside the vocabulary of 400"):
        verify(finished.dir)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format_version": 99}', "\x00"])
def test_damaged_manifest(finished: Prepared, content: str) -> None:
    (finished.dir / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=r"manifest\.json"):
        open_prepared(finished.dir)


def test_other_tokenizer_in_the_folder(finished: Prepared) -> None:
    file = finished.dir / "tokenizer" / "tokenizer.json"
    file.write_text(file.read_text().replace("ByteLevel", "ByteLevel ", 0) + "\n")
    with pytest.raises(DataError, match="not the tokenizer that made this data"):
        open_prepared(finished.dir)


def test_nothing_prepared_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no prepared data here"):
        open_prepared(tmp_path)


def test_one_preparation_at_a_time(small: Path, tmp_path: Path) -> None:
    def second(stage: str, done: int, total: int) -> None:
        del stage, done, total
        with pytest.raises(DataError, match="another process is preparing data here"):
            prepare(_config(small), tmp_path, workers=1)

    prepare(_config(small), tmp_path, workers=1, progress=second)


# --- interruptions -----------------------------------------------------------------------------------------------


def _start(config: DataConfig, out: Path, before: str = "") -> "subprocess.Popen[str]":
    """A process of its own that prepares, in a session of its own; ``before`` is run first."""
    program = f"""
import sys
from hlat.config import DataConfig
from hlat.data import prepare
from hlat.runtime import HlatError
import hlat.data.preparation
hlat.data.preparation._SMALLEST_UNIT = {UNIT}
{before}
try:
    prepare(DataConfig.model_validate_json(sys.argv[1]), sys.argv[2], workers=2)
except HlatError as error:
    print(error)
    sys.exit(error.exit_code)
"""
    command = [sys.executable, "-c", program, config.model_dump_json(), str(out)]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)


def _wait(condition: Any, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def _finished_units(out: Path) -> list[Path]:
    return sorted((out / "partial" / "units").glob("*.json"))


def _gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=10)
    return not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("how", "when"),
    [
        (signal.SIGKILL, "key.json"),
        (signal.SIGKILL, 1),
        (signal.SIGKILL, 4),
        (signal.SIGINT, 2),
        (signal.SIGTERM, 2),
    ],
)
def test_killed_and_run_again(
    large: Path,
    tmp_path: Path,
    undisturbed: Watched,
    monkeypatch: pytest.MonkeyPatch,
    how: signal.Signals,
    when: str | int,
) -> None:
    out, config = tmp_path / "out", _config(large, **LARGE)
    process = _start(config, out)
    if isinstance(when, int):
        _wait(lambda: len(_finished_units(out)) >= when, process)
    else:
        _wait((out / "partial" / when).exists, process)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(how)
    process.wait(timeout=30)
    process.communicate()
    assert process.returncode != 0
    assert _gone(workers), "a worker outlives its parent"
    assert not (out / "manifest.json").exists()
    with pytest.raises(DataError):
        open_prepared(out)

    done = {int(file.stem) for file in _finished_units(out)}
    redone = _watch_units(monkeypatch)
    prepare(config, out, workers=2)
    assert tree(out) == undisturbed.files
    assert redone.isdisjoint(done) and redone | done == undisturbed.units


def test_killed_at_every_rename(small: Path, tmp_path: Path) -> None:
    """The parent's commits are its renames: killed before each of them in turn, the next run completes the same."""
    config = _config(small)
    prepare(config, tmp_path / "reference", workers=1)
    reference = tree(tmp_path / "reference")
    number = 0
    while True:
        out = tmp_path / f"out-{number}"
        child = os.fork()
        if child == 0:
            _die_at_rename(number)
            prepare(config, out, workers=1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            break
        complete = (out / "manifest.json").exists()
        prepare(config, out, workers=1)
        assert tree(out) == reference, f"killed at rename {number}, manifest in place: {complete}"
        number += 1
    assert os.waitstatus_to_exitcode(status) == 0
    assert number > 15  # key, tokenizer, shards with checksums, boundaries, manifest, and moving all of these


def _die_at_rename(number: int) -> None:
    count = 0

    def hook(event: str, _: object) -> None:
        nonlocal count
        if event == "os.rename":
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

    sys.addaudithook(hook)


def test_finished_units_of_another_preparation_are_refused_not_destroyed(
    large: Path, small: Path, tmp_path: Path, reference: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    process = _start(_config(large, **LARGE), out)
    _wait(lambda: _finished_units(out), process)
    process.kill()
    process.wait()
    process.communicate()
    done = _finished_units(out)
    for other, named in (
        (_config(small), "the corpus"),
        (_config(large, **{**LARGE, "shard_tokens": 6000}), "data.shard_tokens"),
    ):
        with pytest.raises(DataError, match=named) as caught:
            prepare(other, out, workers=1)
        assert "partial" in str(caught.value) and _finished_units(out) == done
    changed = Path(shutil.copytree(large, tmp_path / "changed"))
    write_jsonl(changed / "1.jsonl", documents(60, 4_500, seed=9))
    corpus = large.rename(large.with_name("aside"))
    changed.rename(large)  # the same path, and one file of it is another
    try:
        with pytest.raises(DataError, match=r"the corpus: \S*1\.jsonl changed since\n"):
            prepare(_config(large, **LARGE), out, workers=1)
    finally:
        shutil.rmtree(large)
        corpus.rename(large)
    key = out / "partial" / "key.json"
    content = key.read_bytes()
    for unknown, named in ((b"{}", "damaged"), (content.replace(b'"format": ', b'"format": 9'), "data format: 9")):
        key.write_bytes(unknown)
        with pytest.raises(DataError, match=named):
            prepare(_config(large, **LARGE), out, workers=1)
    assert _finished_units(out) == done
    key.write_bytes(content)
    prepare(_config(large, **LARGE), out, workers=2)
    assert tree(out) == reference


def test_killed_worker_is_reported(large: Path, tmp_path: Path, reference: dict[str, bytes]) -> None:
    out, config = tmp_path / "out", _config(large, **LARGE)

    def kill(stage: str, done: int, total: int) -> None:
        if stage == "tokenize" and 0 < done < total:
            for child in psutil.Process().children():
                with suppress(psutil.NoSuchProcess):  # called again for one that is dead and not yet waited for
                    child.kill()

    with pytest.raises(DataError, match="killed by signal 9, perhaps because memory ran out"):
        prepare(config, out, workers=2, progress=kill)
    prepare(config, out, workers=2)
    assert tree(out) == reference


# --- full disks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1_000, 12_000, 60_000])
def test_file_size_limit(large: Path, tmp_path: Path, reference: dict[str, bytes], limit: int) -> None:
    """A limit that strikes while the tokenizer, a unit or a shard is written (EFBIG stands for every refusal)."""
    out, config = tmp_path / "out", _config(large, **LARGE)
    process = _start(config, out, f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, -1))")
    message, trace = process.communicate(timeout=60)
    assert process.returncode == StorageError.exit_code, trace
    assert f"{out}" in message and "File too large" in message and "data.prepared_dir" in message
    assert not [file for file in out.rglob("*.tmp") if file.is_file()]
    prepare(config, out, workers=2)
    assert tree(out) == reference


def test_full_disk(large: Path, tmp_path: Path) -> None:
    """A file system of 200 kB, where the system lets us mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = (
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)], check=False).returncode == 0
    )
    if not mounted:
        pytest.skip("mounting a small file system needs root")
    try:
        with pytest.raises(StorageError, match=r"No space left on device.*finished work is kept"):
            prepare(_config(large, **LARGE), disk / "out", workers=2)
        assert not list(disk.rglob("*.tmp")) and not list(disk.rglob("manifest.json"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    "megabytes", [pytest.param(8, id="8 MB"), pytest.param(100, id="100 MB", marks=pytest.mark.slow)]
)
def test_long_document_in_bounded_memory(tmp_path: Path, megabytes: int) -> None:
    """Encoded whole, a document takes about 120 bytes of memory per byte of text; in pieces, its text and its tokens.

    The bound on a worker: 100 MB for Python and the libraries, 80 MB for the pieces in work, and 16 bytes per byte of
    text: 4 for the text (bytes, string, and the parts of it), 12 for the tokens, at most one per byte (two copies of 4
    bytes, then two of 2).
    """
    file = tmp_path / "long.jsonl"
    block = prose(1, 1_000_000).encode()
    text = (block * (megabytes * 1_000_000 // len(block) + 1))[: megabytes * 1_000_000].decode(errors="ignore")
    write_jsonl(file, [text, *documents(20, 500)])
    peaks: list[int] = []

    def look(stage: str, done: int, total: int) -> None:
        if stage == "tokenize":
            peaks.extend(_peak_memory(child.pid) for child in psutil.Process().children())

    config = _config(file, tokenizer={"vocab_size": 400, "train_bytes": 100_000}, shard_tokens=10**9)
    prepare(config, tmp_path / "out", workers=1, progress=look)
    assert 0 < max(peaks) < 180e6 + 16 * megabytes * 1e6
    prepared = verify(tmp_path / "out")
    assert sum(split.documents for split in prepared.manifest.splits.values()) == 21


def _peak_memory(pid: int) -> int:
    """Bytes that a process has held at most, as Linux counts them for the program that it runs now; 0 once ended."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)
