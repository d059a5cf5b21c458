"""A bad file ends preparation, whatever share of bad rows is allowed; a bad row does not.

tests/data/test_file_list.py checks the message of each error if no bad rows are allowed.
"""

import gzip
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hlat.config.sections.data import DataConfig
from hlat.data.prepare.preparation import prepare
from hlat.data.prepared.prepared_folder import PreparedData
from hlat.runtime.errors import DataError
from tests.support.data.corpora import documents, write_jsonl
from tests.support.data.preparation_model import tokenize_here

TEXTS = documents(150, 60)


@pytest.fixture(scope="module", autouse=True)
def single_process() -> Iterator[None]:
    """Tokenize in this process."""
    with pytest.MonkeyPatch.context() as patch:
        tokenize_here(patch)
        yield


def _prepared(path: Path, out: Path, share: float = 0.5, **more: object) -> PreparedData:
    section = {"path": str(path), "tokenizer": {"vocab_size": 300}, "validation": {"fraction": 0}}
    return prepare(DataConfig.model_validate(section | {"unreadable_rows": share} | more), out, workers=1)


def _parquet(path: Path, bad: list[int]) -> Path:
    values = pa.array([b"ab\xff" if n in bad else text.encode() for n, text in enumerate(TEXTS)], type=pa.binary())
    broken = pa.Array.from_buffers(pa.string(), len(values), values.buffers())
    pq.write_table(pa.table({"text": broken}), path, row_group_size=100)
    return path


def _listed(prepared: PreparedData) -> list[dict[str, object]]:
    return [json.loads(line) for line in (prepared.dir / "quarantine.jsonl").read_text().splitlines()]


def test_parquet_rows_that_are_not_utf8_are_listed(tmp_path: Path) -> None:
    file = _parquet(tmp_path / "a.parquet", [0, 63, 64, 120])
    prepared = _prepared(file, tmp_path / "out")
    reason = "invalid UTF-8 at byte 2 of the text (invalid start byte)"
    assert _listed(prepared) == [{"file": str(file), "row": row, "reason": reason} for row in (0, 63, 64, 120)]
    assert prepared.manifest.total("documents") == len(TEXTS) - 4
    with pytest.raises(DataError, match=rf"{file}, row 0: invalid UTF-8 at byte 2 of the text"):
        _prepared(file, tmp_path / "other", 0)


def test_text_files_that_are_not_text_are_listed(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, text in enumerate(TEXTS[:8]):
        (corpus / f"{number}.txt").write_text(text)
    (corpus / "latin.txt").write_bytes("café".encode("latin-1"))
    (corpus / "zero.txt").write_bytes(b"abc\0")
    prepared = _prepared(corpus, tmp_path / "out")
    assert [Path(str(entry["file"])).name for entry in _listed(prepared)] == ["latin.txt", "zero.txt"]
    assert (prepared.manifest.total("documents"), prepared.manifest.total("rows")) == (8, 10)
    with pytest.raises(DataError, match=rf"{corpus / 'latin.txt'}: invalid UTF-8 at byte 3 "):
        _prepared(corpus, tmp_path / "other", 0.1)


def test_a_truncated_line_is_a_bad_row_and_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", [*TEXTS]).read_bytes()[:-5]
    (tmp_path / "a.jsonl").write_bytes(lines)
    (entry,) = _listed(_prepared(tmp_path / "a.jsonl", tmp_path / "out"))
    assert entry["line"] == 150 and "The line does not end with a newline: the file may be truncated" in str(
        entry["reason"]
    )
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines)[:-20])
    with pytest.raises(DataError, match=r"b\.jsonl\.gz: the compressed data cannot be read to its end"):
        _prepared(tmp_path / "b.jsonl.gz", tmp_path / "gz", 0.99)
    parquet = _parquet(tmp_path / "c.parquet", [])
    parquet.write_bytes(parquet.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"c\.parquet: the parquet file cannot be read to its end"):
        _prepared(parquet, tmp_path / "parquet", 0.99)
    with pytest.raises(DataError, match=r"d\.parquet: no column 'body'; it has text\. Set data\.text_column"):
        _prepared(_parquet(tmp_path / "d.parquet", []), tmp_path / "column", 0.99, text_column="body")


@contextmanager
def _unprivileged() -> Iterator[None]:
    """Switch from root, who ignores permissions, to another user."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_files_and_folders_without_read_permission_are_named() -> None:
    with tempfile.TemporaryDirectory() as open_to_all:
        folder = Path(open_to_all)
        folder.chmod(0o777)
        file = write_jsonl(folder / "a.jsonl", [*TEXTS])
        (folder / "corpus" / "closed").mkdir(parents=True)
        write_jsonl(folder / "corpus" / "a.jsonl", [*TEXTS])
        for closed in (file, folder / "corpus" / "closed"):
            closed.chmod(0)
        with _unprivileged():
            with pytest.raises(DataError, match=rf"{file}: .*[Pp]ermission denied"):
                _prepared(file, folder / "out")
            with pytest.raises(DataError, match=r"corpus/closed: the folder cannot be listed: Permission denied"):
                _prepared(folder / "corpus", folder / "other")
        assert not list(folder.rglob("manifest.json"))


def test_a_file_that_is_deleted_during_preparation_is_named(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    files = [write_jsonl(corpus / f"{number}.jsonl", [*TEXTS]) for number in range(3)]
    section = {"path": str(corpus), "tokenizer": {"vocab_size": 300}, "unreadable_rows": 0.5}

    def delete(stage: str, done: int, total: int) -> None:
        if stage == "hash" and done == total:
            files[1].unlink()

    with pytest.raises(DataError, match=rf"{files[1]}: no such file"):
        prepare(DataConfig.model_validate(section), tmp_path / "out", workers=1, progress=delete)
