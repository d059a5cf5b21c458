"""Text that changes between or during the starts of a run is named, however it was changed; the same is accepted."""

import gzip
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import csv, ipc
from pyarrow import parquet as pq

from hlat.config import BatchSchedule
from hlat.config.sections.data import DataConfig
from hlat.data.formats import parquet
from hlat.data.formats.base import FileRange
from hlat.data.formats.parquet import ParquetFormat
from hlat.data.formats.rows import InputFile
from hlat.data.online import prepare
from hlat.data.online.loader import CursorTable, build_worker_plan
from hlat.data.online.prepare import prepare_online
from hlat.data.online.streams import StreamAssignment
from hlat.data.online.worker import RowProducer
from hlat.data.stores.local_files import ContentRecord
from hlat.runtime.errors import DataError
from tests.support.data.corpora import documents, write_jsonl

_FORMATS = ["jsonl", "jsonl.gz", "csv", "txt", "parquet", "arrow"]
_STREAMS = 4


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = write_jsonl(folder / "a.jsonl", documents(40, 300))
    section = {"mode": "online", "path": str(texts), "tokenizer": {"vocab_size": 300}, "sequence_length": 32}
    prepare_online(DataConfig.model_validate(section), folder / "out", 0)
    return folder / "out" / "tokenizer"


def _write(file: Path, seed: int) -> Path:
    """Write a file of one of the formats, whose size does not depend on the seed: its texts are permuted."""
    texts = [f"{number:05d} {text}"[:3000].ljust(3000, ".") for number, text in enumerate(documents(90, 2500))]
    texts = texts[seed:] + texts[:seed]
    table = pa.table({"text": texts})
    match file.name.partition(".")[2]:
        case "jsonl":
            write_jsonl(file, [*texts])
        case "jsonl.gz":
            lines = write_jsonl(file.with_suffix(".lines"), [*texts]).read_bytes()
            file.write_bytes(gzip.compress(lines, compresslevel=0, mtime=0))
            file.with_suffix(".lines").unlink()
        case "csv":
            csv.write_csv(table, file)
        case "txt":
            file.write_text("\n".join(texts), encoding="utf-8")
        case "parquet":
            pq.write_table(table, file, row_group_size=10, compression="none", use_dictionary=False)
        case "arrow":
            with ipc.new_file(file, table.schema) as writer:
                writer.write_table(table, max_chunksize=10)
    return file


def _other(file: Path) -> Path:
    """Write a file of the same size beside a file, which differs from it in one document."""
    content = bytearray(file.read_bytes())
    at = content.index(b"00032 ")  # neither at an end nor in the middle
    content[at : at + 5] = b"99932"
    other = file.with_name(f".other-{file.name}")
    other.write_bytes(content)
    return other


def _rewrite(file: Path) -> None:
    file.write_bytes(_other(file).read_bytes())


def _rewrite_keeping_times(file: Path) -> None:
    before = file.stat()
    _rewrite(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def _replace_by_rename(file: Path) -> None:
    other, before = _other(file), file.stat()
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(file)


def _retarget_link(file: Path) -> None:
    other, before = _other(file), file.stat()
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    file.unlink()
    file.symlink_to(other)


_CHANGES = [_rewrite, _replace_by_rename, _retarget_link]


def _config(path: Path, tokenizer: Path, **more: Any) -> DataConfig:
    section = {"mode": "online", "path": str(path), "sequence_length": 32, "streams": _STREAMS}
    tokens = {"tokenizer": {"path": str(tokenizer)}, "validation": {"fraction": 0}}
    return DataConfig.model_validate({**section, **tokens, **more})


def _start(config: DataConfig, out: Path, ranks: int = 1) -> RowProducer:
    """Prepare, and return what a worker has that tokenizes all streams."""
    assignment = StreamAssignment(0, ranks, BatchSchedule(8), _STREAMS, 3)
    plan = build_worker_plan(prepare_online(config, out, 0), config, 3, assignment)
    return RowProducer(replace(plan, streams=list(range(_STREAMS))), CursorTable(_STREAMS, 1).values)


@pytest.mark.parametrize(
    ("kind", "change"),
    [*((kind, _rewrite_keeping_times) for kind in _FORMATS), *(("txt", change) for change in _CHANGES)],
)
def test_a_small_corpus_is_compared_at_the_start(
    tokenizer: Path, tmp_path: Path, kind: str, change: Callable[[Path], None]
) -> None:
    file = _write(tmp_path / f"a.{kind}", 0)
    config = _config(file, tokenizer)
    prepare_online(config, tmp_path / "out", 0)
    change(file)
    with pytest.raises(DataError, match=rf"^{file}: the content of the file has changed: it differs within bytes"):
        prepare_online(config, tmp_path / "out", 0)


@pytest.mark.parametrize("kind", _FORMATS)
def test_blocks_of_a_large_corpus_are_compared_as_they_are_read_again(
    tokenizer: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start is killed before the content of the files is recorded; its blocks are.

    Those of files of which the part with a block is not known are compared in the background only.
    """
    monkeypatch.setattr(prepare, "_RECORDED_BYTES", 0)
    file = _write(tmp_path / f"a.{kind}", 0)
    config = _config(file, tokenizer)
    first = _start(config, tmp_path / "out")
    list(islice(first.frames(), 4000))  # more than an epoch
    if is_left := kind in ("arrow", "jsonl.gz"):
        first.content.complete()
    _rewrite_keeping_times(file)
    again = _start(config, tmp_path / "out")
    with nullcontext() if is_left else pytest.raises(DataError, match=rf"^{file}: the content of the file has changed"):
        list(islice(again.frames(), 4000))
    with pytest.raises(DataError, match=rf"^{file}: the content of the file has changed"):
        again.content.complete()


@pytest.mark.parametrize("kind", ["arrow", "jsonl.gz"])
def test_the_first_batch_does_not_wait_until_a_file_is_read_completely(
    tokenizer: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the first start, nor after the file was touched; one worker of all ranks compares it, once."""
    monkeypatch.setattr(prepare, "_RECORDED_BYTES", 0)
    file = _write(tmp_path / f"a.{kind}", 0)
    config = _config(file, tokenizer)
    read: list[Path] = []
    digests = ContentRecord._digests

    def recorded_digests(record: ContentRecord, local: Path, *args: Any) -> Iterator[tuple[int, bytes]]:
        read.append(local)
        yield from digests(record, local, *args)

    monkeypatch.setattr(ContentRecord, "_digests", recorded_digests)
    for _ in range(2):
        workers = [_start(config, tmp_path / "out") for _ in range(3)]
        for worker in workers:
            next(worker.frames())
        assert read == []
        for number, worker in enumerate([*workers, *workers]):
            worker.content.complete(number % 3, 3)
        assert read == [file]
        read.clear()
        file.chmod(0o400)


def test_row_groups_of_a_file_are_looked_up_once(tokenizer: Path, tmp_path: Path) -> None:
    """They are looked up again once it has been written."""
    file = InputFile(_write(tmp_path / "a.parquet", 0), "text")
    parquet._read_groups.cache_clear()
    parts = [ParquetFormat().bytes_of(file, FileRange(row, row + 1)) for row in range(90)]
    assert parquet._read_groups.cache_info().misses == 1
    column = [pq.ParquetFile(file.path).metadata.row_group(group).column(0) for group in range(9)]
    expected = [(each.data_page_offset, each.data_page_offset + each.total_compressed_size) for each in column]
    assert parts == [part for part in expected for _ in range(10)]
    pq.write_table(pq.read_table(file.path), file.path, row_group_size=90)
    assert ParquetFormat().bytes_of(file, FileRange(89, 90)) == ParquetFormat().bytes_of(file, FileRange(0, 1))
    assert ParquetFormat().bytes_of(file, FileRange(90, 91)) is None


def test_what_no_block_was_read_from_is_compared_in_the_background(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker takes other files, so the numbers of ranks and workers may differ between two starts."""
    monkeypatch.setattr(prepare, "_RECORDED_BYTES", 0)
    (tmp_path / "texts").mkdir()
    files = [_write(tmp_path / "texts" / f"{name}.jsonl", seed) for seed, name in enumerate("abc")]
    config = _config(tmp_path / "texts", tokenizer)
    first = _start(config, tmp_path / "out")
    for worker in range(2):
        first.content.complete(worker, 2)
    assert first.content.incomplete() == []
    _rewrite_keeping_times(files[2])
    again = _start(config, tmp_path / "out").content
    for worker in (0, 1, 3, 4):
        again.complete(worker, 5)
    with pytest.raises(DataError, match=rf"^{files[2]}: the content"):
        again.complete(2, 5)


def test_text_that_changes_while_it_is_read_is_noticed_at_the_end_of_its_block(tokenizer: Path, tmp_path: Path) -> None:
    file = _write(tmp_path / "a.parquet", 0)
    producer = _start(_config(file, tokenizer), tmp_path / "out")
    frames = producer.frames()
    next(frames)
    _rewrite_keeping_times(file)
    with pytest.raises(DataError, match=rf"^{file}: the content of the file has changed"):
        list(islice(frames, 4000))


def test_the_same_text_is_accepted(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is touched, copied to another place, read only, and prepared anew."""
    file = _write(tmp_path / "a.jsonl", 0)
    config = _config(file, tokenizer)
    before = list(islice(_start(config, tmp_path / "out").frames(), 50))
    os.utime(file)
    file.chmod(0o444)
    assert list(islice(_start(config, tmp_path / "out").frames(), 50)) == before
    moved = Path(shutil.copy(file, tmp_path / "b.jsonl"))
    assert list(islice(_start(_config(moved, tokenizer), tmp_path / "out").frames(), 50)) == before
    (tmp_path / "out" / "corpus.content").unlink()  # as if the folder could not be written
    monkeypatch.setattr(prepare, "_RECORDED_BYTES", 0)
    os.utime(file)
    assert list(islice(_start(config, tmp_path / "out").frames(), 50)) == before


def test_a_file_written_before_all_of_it_was_recorded_is_refused(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing tells then if it is the same text."""
    monkeypatch.setattr(prepare, "_RECORDED_BYTES", 0)
    file = _write(tmp_path / "a.jsonl", 0)
    config = _config(file, tokenizer)
    prepare_online(config, tmp_path / "out", 0)
    prepare_online(config, tmp_path / "out", 0)
    _rewrite(file)
    with pytest.raises(DataError, match=rf"^{file}: the file was written after its text was prepared"):
        prepare_online(config, tmp_path / "out", 0)


def test_a_run_remembers_its_text_without_the_prepared_data(tokenizer: Path, tmp_path: Path) -> None:
    (run_dir := tmp_path / "run").mkdir()
    file = _write(tmp_path / "a.jsonl", 0)
    config = _config(file, tokenizer)

    def start() -> RowProducer:
        assignment = StreamAssignment(0, 1, BatchSchedule(8), _STREAMS, 3)
        prepared = prepare_online(config, run_dir / "data", 0).for_run(run_dir)
        plan = build_worker_plan(prepared, config, 3, assignment)
        return RowProducer(replace(plan, streams=list(range(_STREAMS))), CursorTable(_STREAMS, 1).values)

    start().content.complete()
    shutil.rmtree(run_dir / "data")
    _rewrite(file)
    again = start()
    with pytest.raises(DataError, match=rf"^{file}: the content of the file has changed"):
        next(again.frames())
