"""Damage of prepared data is reported when it is opened, verified or read."""

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hlat.data.documents import SPLITS
from hlat.data.online.prepare import open_validation_sets
from hlat.data.prepare import preparation
from hlat.data.prepare.preparation import prepare
from hlat.data.prepare.verification import verify_data
from hlat.data.prepared import prepared_folder
from hlat.data.prepared.prepared_folder import PreparedData, open_prepared
from hlat.data.prepared.summary import summarize
from hlat.data.stores.local_files import ContentRecord
from hlat.runtime.errors import DataError
from tests.support.data.preparing import data_config, training_data

pytestmark = pytest.mark.usefixtures("small_units")


@pytest.fixture
def finished(small: Path, tmp_path: Path) -> PreparedData:
    return prepare(data_config(small), tmp_path / "out", workers=1)


@pytest.mark.parametrize("name", ["train-00000.bin", "validation-documents.bin"])
def test_opening_reports_missing_and_truncated_files(finished: PreparedData, name: str) -> None:
    file = finished.dir / name
    content = file.read_bytes()
    for change in (lambda: file.write_bytes(content[:-2]), file.unlink):
        change()
        with pytest.raises(DataError, match=name):
            open_prepared(finished.dir)


@pytest.mark.parametrize("name", ["train-00001.bin", "validation-00000.bin", "train-documents.bin"])
def test_verification_reports_a_flipped_bit(finished: PreparedData, name: str) -> None:
    file = finished.dir / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    open_prepared(finished.dir)
    with pytest.raises(DataError, match=f"{name}: the checksum differs"):
        verify_data(finished.dir)


@pytest.mark.parametrize("position", [0, 1000, -1])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_flipped_bit_of_a_token_is_reported_before_training(
    finished: PreparedData, monkeypatch: pytest.MonkeyPatch, split: str, position: int
) -> None:
    """A split that is too large to be compared is named instead; the other one is still compared."""
    finished.check_before_training()
    assert finished.training_notes == []
    file = finished.dir / f"{split}-00000.bin"
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match=rf"damaged: {split}-00000\.bin: the checksum differs"):
        finished.check_before_training()
    sizes = {
        name: sum(shard.stat().st_size for shard in finished.dir.glob(f"{name}-0*.bin"))
        for name in ("train", "validation")
    }
    assert sizes["validation"] < sizes["train"]
    monkeypatch.setattr(prepared_folder, "_COMPARED_BYTES", sizes["validation"])
    [note] = finished.training_notes
    assert "of train shards are compared with their checksums while the model trains" in note
    assert str(finished.dir) in note
    with nullcontext() if split == "train" else pytest.raises(DataError, match="validation-00000"):
        finished.check_before_training()


def _flip_keeping_times(file: Path) -> None:
    before = file.stat()
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("between_starts", [True, False])
def test_tokens_that_change_after_they_were_read_are_noticed(
    finished: PreparedData, tmp_path: Path, between_starts: bool
) -> None:
    """Whatever the size of the split: nothing is compared before training here."""
    tokens = finished.for_run(tmp_path).tokens("train")
    right = tokens.read(0, len(tokens)).tolist()
    _flip_keeping_times(finished.dir / "train-00000.bin")
    tokens = finished.for_run(tmp_path).tokens("train") if between_starts else tokens
    with pytest.raises(DataError, match=r"train-00000\.bin: the content of the file has changed: it differs within"):
        tokens.read(0, len(tokens))
    _flip_keeping_times(finished.dir / "train-00000.bin")
    assert finished.for_run(tmp_path).tokens("train").read(0, len(tokens)).tolist() == right


@pytest.mark.parametrize("at_end", [False, True])
def test_a_large_split_is_compared_with_its_checksums_while_the_model_trains(
    finished: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_end: bool
) -> None:
    """A start after that reads no shard again that was not written since."""
    monkeypatch.setattr(prepared_folder, "_COMPARED_BYTES", 0)

    def read() -> None:
        data = finished.for_run(tmp_path)
        data.check_while_training()
        process = data._content._process
        assert process is not None
        process.wait()
        if at_end:
            assert data.notes_at_end() == []
        else:
            data.tokens("train").read(0, 2)

    file = finished.dir / "train-00001.bin"
    _flip_keeping_times(file)
    for _ in range(2):
        with pytest.raises(DataError, match=r"train-00001\.bin: the content of the file has changed: its checksum"):
            read()
    _flip_keeping_times(file)
    read()
    with monkeypatch.context() as patched:
        patched.setattr(ContentRecord, "_digests", lambda *_: pytest.fail("a shard is read again"))
        finished.for_run(tmp_path)._content.compare(SPLITS)


def test_a_run_whose_checksums_were_not_all_compared_says_so(
    finished: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process, here one that does nothing, has not ended when the run ends; or it was killed."""
    assert finished.for_run(tmp_path).notes_at_end() == []
    monkeypatch.setattr(prepared_folder, "_COMPARED_BYTES", 0)
    (program := tmp_path / "idle").write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    data = finished.for_run(tmp_path)
    data.check_while_training()
    process = data._content._process
    assert process is not None
    [note] = data.notes_at_end()
    assert note.startswith(f"{finished.dir}: not all checksums were compared: the run has ended before")
    process.kill()
    process.wait()
    for _ in range(2):
        [note] = data.notes_at_end()
        assert "not all checksums were compared: the process that compares them ended with code -9" in note


def test_one_process_of_a_machine_compares_validation_sets(finished: PreparedData, tmp_path: Path) -> None:
    shutil.copytree(finished.dir, tmp_path / "validation" / "news")
    recipe: Any = SimpleNamespace(evaluation=SimpleNamespace(sets={"news": "news.jsonl"}), run_dir=tmp_path)
    assert open_validation_sets(recipe)["news"].fingerprint == finished.fingerprint
    _flip_keeping_times(tmp_path / "validation" / "news" / "train-00000.bin")
    assert open_validation_sets(recipe, compare=False)["news"].fingerprint == finished.fingerprint
    with pytest.raises(DataError, match=r"damaged: train-00000\.bin"):
        open_validation_sets(recipe)


@pytest.mark.parametrize(("position", "bit"), [(0, 0), (17, 7), (80, 0), (163, 7), (-8, 0), (-1, 7)])
def test_document_boundaries_are_checked_before_they_are_used(finished: PreparedData, position: int, bit: int) -> None:
    for split in ("train", "validation"):
        file = finished.dir / f"{split}-documents.bin"
        right = file.read_bytes()
        wrong = bytearray(right)
        wrong[position % len(wrong)] ^= 1 << bit
        file.write_bytes(wrong)
        with pytest.raises(DataError, match=rf"{split}-documents\.bin: "):
            summarize(open_prepared(finished.dir))
        for more in ({"isolate": True}, {"packing": "best-fit"}) if split == "train" else ():
            with pytest.raises(DataError, match=rf"{split}-documents\.bin: "):
                training_data(open_prepared(finished.dir), 32, 0, **more)
        file.write_bytes(right)
    summarize(open_prepared(finished.dir))


def test_the_summary_reports_tokens_outside_the_vocabulary(finished: PreparedData) -> None:
    for file in finished.dir.glob("train-0*.bin"):
        np.full(file.stat().st_size // 2, 65_535, dtype="<u2").tofile(file)
    with pytest.raises(DataError, match=r"train-0000\d\.bin: damaged: it contains token 65535, the vocabulary has 400"):
        summarize(open_prepared(finished.dir))


def test_verification_reports_tokens_outside_the_vocabulary(finished: PreparedData) -> None:
    file = finished.dir / "train-00000.bin"
    tokens = np.fromfile(file, dtype="<u2")
    tokens[7] = 400
    tokens.tofile(file)
    with pytest.raises(DataError, match="token 400 at 7 is outside the vocabulary of 400"):
        verify_data(finished.dir)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format_version": 99}', "\x00"])
def test_a_damaged_manifest_is_named(finished: PreparedData, content: str) -> None:
    (finished.dir / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=r"manifest\.json"):
        open_prepared(finished.dir)


def test_another_tokenizer_in_the_folder_is_reported(finished: PreparedData) -> None:
    file = finished.dir / "tokenizer" / "tokenizer.json"
    file.write_text(file.read_text().replace("ByteLevel", "ByteLevel ", 0) + "\n")
    with pytest.raises(DataError, match="not the tokenizer that prepared this data"):
        open_prepared(finished.dir)


def test_a_folder_without_prepared_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no prepared data here"):
        open_prepared(tmp_path)


def test_runs_that_start_together_share_finished_data(small: Path, tmp_path: Path) -> None:
    first = prepare(data_config(small), tmp_path, workers=1)
    with ThreadPoolExecutor(1) as pool, preparation.locked_folder(tmp_path, wait=False):
        second = pool.submit(prepare, data_config(small), tmp_path, workers=1)
        with pytest.raises(TimeoutError):  # it waits for the lock
            second.result(timeout=0.5)
    assert second.result().fingerprint == first.fingerprint


def test_a_second_preparation_in_the_same_folder_is_refused(small: Path, tmp_path: Path) -> None:
    def second(stage: str, done: int, total: int) -> None:
        del stage, done, total
        with pytest.raises(DataError, match="another process is preparing data in this folder"):
            prepare(data_config(small), tmp_path, workers=1)

    prepare(data_config(small), tmp_path, workers=1, progress=second)
