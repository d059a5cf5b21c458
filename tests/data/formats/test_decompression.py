"""Small files that decompress to large ones: memory is bounded by the document limit, and messages name the cause.

The expected lines come from bytes.split; memory is measured by tracemalloc, which counts every bytes object.
"""

import gzip
import io
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from hlat.config import BatchSchedule
from hlat.config.sections.data import DataConfig
from hlat.data.formats import base
from hlat.data.formats import rows as text_column
from hlat.data.formats import streams as line_reading
from hlat.data.formats import text as text_files
from hlat.data.formats.streams import iter_lines
from hlat.data.online import worker
from hlat.data.online.loader import OnlineData
from hlat.data.online.prepare import prepare_online
from hlat.data.prepare.preparation import prepare
from hlat.data.prepared.prepared_folder import PreparedData
from hlat.runtime.errors import DataError
from tests.support.data.corpora import documents
from tests.support.data.preparation_model import tokenize_here
from tests.support.data.preparing import SMALL
from tests.support.data.reading_files import read_documents, read_lines

LIMIT = 1 << 20
TOO_LONG = 24 * LIMIT


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit a document to 1 MiB instead of 256 MiB, so that 24 MiB are far too long."""
    for module in (line_reading, base, text_column):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", LIMIT)
    monkeypatch.setattr(text_files, "MAX_TEXT_BYTES", 4 * LIMIT)
    tokenize_here(monkeypatch)


def write_compressed(path: Path, content: bytes) -> Path:
    """Write a file, compressed as its suffix says."""
    compress = {".zst": zstandard.compress, ".gz": gzip.compress}.get(path.suffix, bytes)
    path.write_bytes(compress(content))
    return path


def line(size: int) -> bytes:
    """Return a line of JSON of ``size`` bytes, newline included."""
    text = b"a" * (size - len(b'{"text":""}\n'))
    return b'{"text":"' + text + b'"}\n'


def read_with_peak(path: Path) -> tuple[list[str | None], list[str], int]:
    """Return the texts of a file, the errors of its bad rows, and the peak memory in bytes."""
    tracemalloc.start()
    try:
        rows = list(read_documents(path, "text"))
        return (
            [row.content for row in rows],
            [row.error.reason for row in rows if row.error],
            tracemalloc.get_traced_memory()[1],
        )  # type: ignore[misc]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_a_line_that_is_too_long_is_a_bad_row(tmp_path: Path, suffix: str) -> None:
    path = write_compressed(tmp_path / f"bomb{suffix}", line(50) + line(TOO_LONG) + b"\n \n" + line(60))
    texts, errors, peak = read_with_peak(path)
    assert [text and len(text) for text in texts] == [38, None, 48]
    (error,) = errors
    assert error.startswith("a line of more than 1,048,576 bytes")
    if suffix != ".jsonl":
        assert f"compressed bytes gave {LIMIT + 51:,}, " in error and error.endswith(" times as many")
    assert peak < 3 * LIMIT  # the beginning of the line in chunks and joined, and as much for everything else


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_many_blank_lines_take_no_memory(tmp_path: Path, suffix: str) -> None:
    texts, errors, peak = read_with_peak(
        write_compressed(tmp_path / f"a{suffix}", line(50) + b"\n" * TOO_LONG + b" \r\n" + b"{x\n" + line(60))
    )
    assert [text and len(text) for text in texts] == [38, None, 48] and "invalid JSON" in errors[0]
    assert peak < 2 * LIMIT
    (row,) = (row for row in read_documents(tmp_path / f"a{suffix}", "text") if row.error)
    assert row.error is not None and row.error.line == TOO_LONG + 3


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_only_a_compressed_text_file_has_a_size_limit(tmp_path: Path, suffix: str) -> None:
    content = b"a" * TOO_LONG
    texts, errors, peak = read_with_peak(write_compressed(tmp_path / f"bomb.txt{suffix}", content))
    assert texts == [None] and errors[0].startswith("more than 4,194,304 bytes of text: ")
    assert peak < 2.5 * 4 * LIMIT  # a growing array may be copied as it grows, an eighth larger
    assert read_with_peak(write_compressed(tmp_path / f"right.txt{suffix}", content[: 4 * LIMIT]))[0] == [
        content[: 4 * LIMIT].decode()
    ]
    assert read_with_peak(write_compressed(tmp_path / "plain.txt", content))[0] == [content.decode()]


def test_a_highly_compressed_file_of_short_lines_is_read(tmp_path: Path) -> None:
    path = write_compressed(tmp_path / "same.jsonl.zst", line(1000) * 20_000)
    assert path.stat().st_size * 1000 < 1000 * 20_000
    rows = list(read_documents(path, "text"))
    assert len(rows) == 20_000 and all(row.content == "a" * 988 for row in rows)


@pytest.mark.parametrize("size", [LIMIT - 1, LIMIT, LIMIT + 1, LIMIT + 2])
def test_a_line_can_be_as_long_as_the_limit(tmp_path: Path, size: int) -> None:
    path = write_compressed(tmp_path / "a.jsonl", line(size) + line(50))
    first, second = read_documents(path, "text")
    assert (first.error is None) == (size <= LIMIT) and second.content == "a" * 38


_bytes = st.text(st.sampled_from("a \n\r\t"), max_size=60).map(str.encode)


@given(content=_bytes, limit=st.integers(1, 12), buffer=st.sampled_from([1, 2, 7, 64]))
def test_lines_are_the_same_as_from_bytes_split(content: bytes, limit: int, buffer: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_reading, "MAX_LINE_BYTES", limit)
        found = list(iter_lines(io.BufferedReader(io.BytesIO(content), buffer)))  # type: ignore[arg-type]
    expected, offset = {}, 0
    for number, text in enumerate(content.split(b"\n"), 1):
        expected[number] = offset, text + b"\n" * (offset + len(text) < len(content))
        offset += len(text) + 1
    assert [(line.offset, line.content) for line in found] == [
        (expected[line.line][0], expected[line.line][1][: limit + 1]) for line in found
    ]
    numbers = [line.line for line in found]
    assert numbers == sorted(set(numbers)) and set(numbers) >= {n for n, (_, text) in expected.items() if text.strip()}
    assert all(expected[number][1].strip() or len(expected[number][1]) > limit for number in numbers)


def test_blocks_of_a_file_skip_a_line_that_is_too_long(tmp_path: Path) -> None:
    content = line(50) + line(2 * LIMIT) + line(60)
    path = write_compressed(tmp_path / "a.jsonl", content)
    edges = [0, 40, 50, 51, LIMIT, 2 * LIMIT + 40, 2 * LIMIT + 50, len(content)]
    rows = [row for a, b in pairwise(edges) for row in read_lines(path, "text", a, b)]
    assert [row.content and len(row.content) for row in rows] == [38, None, 48]


@pytest.mark.parametrize("column_type", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_a_table_value_that_is_too_long_is_a_bad_row(
    tmp_path: Path, column_type: pa.DataType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_column, "BATCH_BYTES", 1000)
    values = ["a", "b" * (LIMIT + 1), None, "c" * LIMIT, "d"]
    pq.write_table(pa.table({"text": pa.array(values).cast(column_type)}), tmp_path / "a.parquet", compression="zstd")
    rows = list(read_documents(tmp_path / "a.parquet", "text"))
    assert [row.content for row in rows] == ["a", None, None, "c" * LIMIT, "d"]
    (error,) = (row.error for row in rows if row.error)
    assert error.reason == "a text of 1,048,577 bytes; a document may have 1,048,576"


def config(path: Path, **more: object) -> DataConfig:
    return DataConfig.model_validate({"path": str(path), **SMALL, **more})


@pytest.fixture
def bomb(tmp_path: Path) -> Path:
    texts = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in documents(60, 800))
    return write_compressed(tmp_path / "bomb.jsonl.zst", texts + line(TOO_LONG) + line(50))


def test_preparation_fails_or_leaves_the_bad_row_out(bomb: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=rf"{bomb}, line 61: a line of more than 1,048,576 bytes: .* times as many\. A doc"
    ):
        prepare(config(bomb), tmp_path / "refused", workers=1)
    prepared: PreparedData = prepare(config(bomb, unreadable_rows=0.05), tmp_path / "out", workers=1)
    assert (prepared.manifest.total("documents"), prepared.manifest.total("unreadable_rows")) == (61, 1)


def _rows_online(config: DataConfig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[worker.Frame | str]:
    data = OnlineData(prepare_online(config, folder, 100), config, 0, BatchSchedule(4), 1)
    monkeypatch.setattr(worker, "_TOGETHER", 4)
    plan = data._plan.__class__(**{**vars(data._plan), "streams": list(range(config.streams))})
    return worker.RowProducer(plan, data.cursors().values).frames()


def test_online_data_fails_or_leaves_the_bad_row_out(
    bomb: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    online = {"mode": "online", "streams": 4, "sequence_length": 64, "validation": {"fraction": 0}}
    with pytest.raises(DataError, match=r"line 61: a line of more than 1,048,576 bytes: "):
        for number, _ in enumerate(_rows_online(config(bomb, **online), tmp_path / "a", monkeypatch)):
            assert number < 10_000
    frames = _rows_online(config(bomb, **online, unreadable_rows=0.05), tmp_path / "b", monkeypatch)
    notes = (frame for frame in frames if isinstance(frame, str))
    assert "line 61: a line of more than 1,048,576 bytes" in next(notes)


_MEASURED = """
import resource, sys
from pathlib import Path
from hlat.data.formats.rows import InputFile
from hlat.data.formats.registry import format_of
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
path = Path(sys.argv[1])
found = format_of(path).documents(InputFile(path, "text"))
rows = [row.error.reason if row.error else row.content for row in found]
print(rows, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
def test_82_kilobytes_that_decompress_to_2700_megabytes(tmp_path: Path) -> None:
    path = tmp_path / "bomb.jsonl.zst"
    with path.open("wb") as file, zstandard.ZstdCompressor().stream_writer(file) as out:
        out.write(b'{"text":"')
        for _ in range(2700):
            out.write(b"a" * (1 << 20))
        out.write(b'"}\n{"text":"after"}\n')
    assert path.stat().st_size < 90_000
    done = subprocess.run([sys.executable, "-c", _MEASURED, str(path)], capture_output=True, text=True, check=True)
    assert "'a line of more than 268,435,456 bytes: " in done.stdout and "'after'" in done.stdout
    assert (
        int(done.stdout.split()[-1]) < 2 * 256 + 64
    )  # MiB: the beginning of the line, in chunks and joined, and buffers
