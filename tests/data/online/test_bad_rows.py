"""Online data with bad rows or damaged files: the errors and notes for the user."""

import gzip
import json
import os
import re
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from hlat.config import BatchSchedule
from hlat.config.sections.data import DataConfig
from hlat.data.online.loader import CursorTable, OnlineData, build_worker_plan
from hlat.data.online.prepare import prepare_online
from hlat.data.online.streams import StreamAssignment
from hlat.data.online.worker import RowProducer
from hlat.data.online.worker_protocol import Frame, WorkerPlan, unpack_rows
from hlat.runtime.errors import DataError
from tests.support.data.corpora import documents, write_jsonl

_SEED, _BATCH = 3, 8


class Reading(NamedTuple):
    """The frames of a tokenizing worker, run in this process, and its notes so far."""

    frames: Iterator[Frame | str]
    notes: list[str]

    def rows(self, count: int) -> list[list[int]]:
        """Return the inputs of the first ``count`` rows."""
        found = []
        while len(found) < count:
            frame = next(self.frames)
            if isinstance(frame, str):
                self.notes.append(frame)
            else:
                found.append(next(unpack_rows([frame.content], 32, False))[0].tolist())
        return found


_tokenizer: list[Path] = []


@pytest.fixture(scope="module", autouse=True)
def _given_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Train a tokenizer on good text, so that none has to be trained on bad text."""
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = write_jsonl(folder / "a.jsonl", documents(40, 300))
    section = {"mode": "online", "path": str(texts), "tokenizer": {"vocab_size": 300}, "sequence_length": 32}
    prepare_online(DataConfig.model_validate(section), folder / "out", 0)
    _tokenizer[:] = [folder / "out" / "tokenizer"]
    yield
    _tokenizer.clear()


def _config(path: Path | str, **more: Any) -> DataConfig:
    section = {"mode": "online", "path": str(path), "sequence_length": 32, "streams": 8, "validation": {"fraction": 0}}
    return DataConfig.model_validate({**section, "tokenizer": {"path": str(_tokenizer[0])}, **more})


def _plan(config: DataConfig, out: Path) -> WorkerPlan:
    assignment = StreamAssignment(0, 1, BatchSchedule(_BATCH), config.streams, _SEED)
    return build_worker_plan(prepare_online(config, out, 100), config, _SEED, assignment)


def _reading(config: DataConfig, out: Path, before: Callable[[], object] = lambda: None) -> Reading:
    """Read all streams from the beginning; ``before`` is called between preparation and the first row."""
    plan = _plan(config, out)
    before()
    producer = RowProducer(replace(plan, streams=list(range(config.streams))), CursorTable(config.streams, 1).values)
    return Reading(producer.frames(), [])


def _error_message(config: DataConfig, out: Path, rows: int, before: Callable[[], object] = lambda: None) -> str:
    reading = _reading(config, out, before)
    with pytest.raises(DataError) as caught:
        reading.rows(rows)
    assert type(caught.value) is DataError
    return str(caught.value)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A jsonl file of 16 blocks."""
    return write_jsonl(tmp_path / "a.jsonl", documents(80, 800))


def _parquet(tmp_path: Path) -> Path:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": documents(80, 800)}), file, row_group_size=20)
    return file


def _keep_times(file: Path, change: Callable[[bytes], bytes]) -> None:
    stat = file.stat()
    file.write_bytes(change(file.read_bytes()))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


CHANGED = "the file changed while it was being read. Run again once it is complete."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: os.truncate(file, 20_000), CHANGED),
        (lambda file: file.write_bytes(file.read_bytes().replace(b"ka", b"ko")), CHANGED),
        (lambda file: file.unlink(), "cannot be read: No such file or directory"),
        (lambda file: (file.unlink(), file.symlink_to(file)), "cannot be read: Too many levels of symbolic links"),
    ],
    ids=["truncated", "replaced", "missing", "cannot be opened"],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_that_changed_since_it_was_listed_is_reported(
    lines: Path, tmp_path: Path, kind: str, change: Callable[[Path], object], message: str
) -> None:
    file = lines if kind == "jsonl" else _parquet(tmp_path)
    assert _error_message(_config(file), tmp_path / "out", 1, lambda: change(file)) == f"{file}: {message}"


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz"])
def test_a_file_truncated_while_it_is_read_is_reported_as_changed(tmp_path: Path, kind: str) -> None:
    """Neither its last line nor its compressed data is called damaged."""
    lines = write_jsonl(tmp_path / "lines.jsonl", documents(600, 2_000))
    file = tmp_path / "texts" / f"a.{kind}"
    file.parent.mkdir()
    file.write_bytes(gzip.compress(lines.read_bytes()) if kind == "jsonl.gz" else lines.read_bytes())
    reading = _reading(_config(file, streams=1, shuffle=False), tmp_path / "out")
    reading.rows(2)
    os.truncate(file, 100_001)  # beyond what has been read, in the middle of a line
    with pytest.raises(DataError, match=f"^{re.escape(f'{file}: {CHANGED}')}$"):
        reading.rows(60_000)


@pytest.mark.parametrize("kind", ["parquet", "jsonl.gz"])
def test_a_damaged_file_is_named(lines: Path, tmp_path: Path, kind: str) -> None:
    """The damage changes neither the file's size nor its modification time, and was there before the first start."""
    file = _parquet(tmp_path)
    if kind == "jsonl.gz":
        file = tmp_path / "b.jsonl.gz"
        file.write_bytes(gzip.compress(lines.read_bytes()))

    def damage() -> None:
        _keep_times(file, lambda content: content[:2000] + bytes(500) + content[2500:])
        (tmp_path / "out" / "corpus.content").unlink()

    message = _error_message(_config(file), tmp_path / "out", 400, damage)
    assert message.startswith(f"{file}: the ") and "It is truncated or damaged: fetch or write" in message


BROKEN = [b'{"text": "caf\xe9 au lait"}\n', b'{"text": 7}\n', b"{nonsense\n", b'{"text": "\\ud800"}\n']


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A jsonl file whose every tenth line cannot be read."""
    file = tmp_path / "broken.jsonl"
    texts = [json.dumps({"text": text}).encode() + b"\n" for text in documents(72, 200)]
    file.write_bytes(b"".join(BROKEN[n // 9 % 4] + b"".join(texts[n : n + 9]) for n in range(0, 72, 9)))
    return file


def test_an_unreadable_row_is_an_error_unless_some_are_allowed(broken: Path, tmp_path: Path) -> None:
    message = _error_message(_config(broken), tmp_path / "out", 200)
    assert message.startswith(f"{broken}, the line that ends at byte ")
    assert message.endswith(
        "Or set data.unreadable_rows to the share of the rows that may be left out for being unreadable."
    )


def test_each_bad_row_is_reported_once(broken: Path, tmp_path: Path) -> None:
    reading = _reading(_config(broken, unreadable_rows=0.2), tmp_path / "out")
    reading.rows(2000)  # several epochs
    ends = np.cumsum([len(line) for line in broken.read_bytes().splitlines(keepends=True)]).tolist()
    positions = [f"{broken}, the line that ends at byte {ends[n]:,}" for n in range(0, 80, 10)]
    assert sorted(note.partition(":")[0] for note in reading.notes) == sorted(positions)
    assert {note.split(": ")[1].split(" at byte")[0] for note in reading.notes} == {
        "invalid UTF-8",
        "'text' holds a number, not text",
        "invalid JSON",
        "character 0 is half of a surrogate pair (U+D800), which is not text",
    }


def test_more_unreadable_rows_than_allowed_are_an_error(broken: Path, tmp_path: Path) -> None:
    """With so few rows it takes several epochs: the fraction is checked from the hundredth unreadable row on."""
    message = _error_message(_config(broken, unreadable_rows=0.05), tmp_path / "out", 5000)
    assert re.match(
        r"10\d of [\d,]+ rows cannot be read; data.unreadable_rows allows a share of 0.05. The last", message
    )


def test_a_bad_row_of_a_parquet_file_is_reported_by_its_number_in_the_file(tmp_path: Path) -> None:
    file, texts = tmp_path / "a.parquet", [text.encode() for text in documents(80, 800)]
    texts[57] = b"caf\xe9"
    column = pa.array(texts, pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), file, row_group_size=20)
    message = _error_message(_config(file), tmp_path / "out", 5000)
    assert message.startswith(f"{file}, row 57: invalid UTF-8 at byte 3 of the text")


@pytest.mark.parametrize(
    ("texts", "fraction"), [(["", None, ""], 0.0), (["a text", "another"] * 40, 0.999999)], ids=["empty", "validation"]
)
def test_a_source_without_training_text_is_an_error_instead_of_an_endless_search(
    tmp_path: Path, texts: list[str | None], fraction: float
) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", texts)
    message = _error_message(_config(file, validation={"fraction": fraction}), tmp_path / "out", 1)
    assert message == "the corpus: no text for training: every document is null, empty, or validation text."


def test_a_worker_opens_more_files_than_the_soft_limit(tmp_path: Path) -> None:
    """Every stream has a file open: the worker raises the soft limit, 1024 on most systems."""
    folder = tmp_path / "many"
    folder.mkdir()
    for number, text in enumerate(documents(60, 400)):
        write_jsonl(folder / f"{number:03d}.jsonl", [text, text])
    config = _config(folder, streams=60)
    data = OnlineData(prepare_online(config, tmp_path / "out", 100), config, _SEED, BatchSchedule(60), 1)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft_limit = len(list(Path("/proc/self/fd").iterdir())) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft_limit, before[0]), before[1]))
    try:
        loader = data.loader(0, data.cursors(), 0, print)
        (process,) = (child for child in psutil.Process().children() if "hlat.data.online.worker" in child.cmdline())
        loader.read(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        loader.close()
    assert not process.is_running()
