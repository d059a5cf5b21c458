"""CSV and TSV: the texts that Python's csv module and pyarrow read, in one piece and in ranges, and errors.

The files are written by the csv module, or are random bytes of the characters that matter.
"""

import csv
import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.csv as pa_csv
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hlat.config import BatchSchedule
from hlat.config.sections.data import DataConfig
from hlat.data.formats import base, csv_table
from hlat.data.formats import streams as line_reading
from hlat.data.formats.csv_table import iter_records
from hlat.data.formats.rows import TOKENS_COLUMN
from hlat.data.online.blocks import DocumentReader
from hlat.data.online.loader import CursorTable, build_worker_plan
from hlat.data.online.prepare import prepare_online
from hlat.data.online.streams import StreamAssignment
from hlat.data.prepare.preparation import prepare
from hlat.data.tokenizers.training import train_bpe
from hlat.runtime.errors import DataError
from tests.support.data.corpora import documents, tree, write_jsonl
from tests.support.data.preparation_model import tokenize_here
from tests.support.data.reading_files import read_documents, read_ranges
from tests.support.data.reading_ranks import run

TEXTS = [*documents(60, 300), 'He said "no".', '"', "a,b\tc", "two\nlines", "\r\n", "  ", "ü日本\U0001f600", "", "end"]
_texts = st.text(
    st.sampled_from('a",\t\n\r é日😀;') | st.characters(exclude_categories=["Cs"], min_codepoint=1), max_size=20
)


def _write(path: Path, texts: list[str], **dialect: Any) -> Path:
    """Write texts and numbers with the csv module; the ending of the path selects the delimiter and compression."""
    out = io.StringIO()
    delimiter = "\t" if ".tsv" in path.name else ","
    writer = csv.writer(out, delimiter=delimiter, **dialect)
    writer.writerows([["id", "text", "note"], *([number, text, "x, y"] for number, text in enumerate(texts))])
    compress = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
    path.write_bytes(compress(out.getvalue().encode()))
    return path


def _contents(path: Path, start: int = 0) -> list[Any]:
    return [row.content for row in read_documents(path, "text", start)]


# --- the same texts as other readers -------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    texts=st.lists(_texts, max_size=8),
    ending=st.sampled_from(["csv", "tsv"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
    newline=st.sampled_from(["\n", "\r\n"]),
    size=st.integers(1, 60),
)
def test_texts_are_those_of_the_csv_module_and_of_pyarrow(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], ending: str, quoting: Any, newline: str, size: int
) -> None:
    if any("\r" in text for text in texts):
        quoting = csv.QUOTE_ALL  # up to Python 3.12 the writer quotes \r otherwise only if its own lines end with it
    path = _write(tmp_path_factory.mktemp("csv") / f"a.{ending}", texts, quoting=quoting, lineterminator=newline)
    delimiter = "\t" if ending == "tsv" else ","
    with path.open(newline="", encoding="utf-8") as file:
        assert [row["text"] for row in csv.DictReader(file, delimiter=delimiter)] == texts
    parse = pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    convert = pa_csv.ConvertOptions(column_types={"text": "string"}, strings_can_be_null=False)
    assert pa_csv.read_csv(path, parse_options=parse, convert_options=convert)["text"].to_pylist() == texts
    rows = list(read_documents(path, "text"))
    assert [(row.row, row.content, row.error) for row in rows] == [(n, text, None) for n, text in enumerate(texts)]
    for start in (1, len(texts) // 2):
        assert _contents(path, start) == texts[start:]
    parts = read_ranges(path, "text", size)
    assert [row.content for part in parts for row in part] == texts
    assert [[row.row for row in part] for part in parts] == [[*range(len(part))] for part in parts]


@settings(deadline=None, max_examples=400)
@given(
    body=st.text(st.sampled_from('a",\n\né'), max_size=40),
    newline=st.sampled_from(["\n", "\r\n"]),
    size=st.integers(1, 20),
    buffer=st.sampled_from([1, 2, 7, 64]),
)
@example(body='"a""b",\n"",""\n', newline="\n", size=1, buffer=1)
@example(body='a"b,"c\nd"\n', newline="\n", size=1, buffer=1)
@example(body='"a"b,c\n"\n', newline="\n", size=1, buffer=1)
def test_random_quotes_give_the_texts_of_the_csv_module_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, body: str, newline: str, size: int, buffer: int
) -> None:
    """Records are those of the csv module, whether a row of them is good or bad, and however the bytes arrive."""
    content = ("id,text\n" + body).replace("\n", newline)
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    path.write_text(content, encoding="utf-8", newline="")
    wanted = list(csv.reader(io.StringIO(content, newline="")))[1:]
    wanted = [row for row in wanted if row]
    pieces = iter_records(io.BufferedReader(io.BytesIO(content.encode()), buffer), b",")  # type: ignore[arg-type]
    records = list(pieces)[1:]
    assert b"".join(record.content for record in records).count(b"\n") >= len(wanted) - 1
    try:
        rows = list(read_documents(path, "text"))
    except DataError as error:
        assert "has a quote that is never closed" in str(error)
        assert not records[-1].is_closed
        return
    assert len(rows) == len(wanted) == len(records)
    for row, fields, record in zip(rows, wanted, records, strict=True):
        assert content.encode()[record.offset : record.end] == record.content
        if row.error is None:
            assert fields[1] == row.content and len(fields) == 2
        else:
            assert len(fields) != 2 or "goes on after its closing quote" in row.error.reason
    ranged = [row for part in read_ranges(path, "text", size) for row in part]
    assert [row.content for row in ranged] == [row.content for row in rows]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz", "a.tsv.zst"])
def test_plain_and_compressed_files_are_read_from_any_row(tmp_path: Path, name: str) -> None:
    path = _write(tmp_path / name, TEXTS)
    for start in (0, 1, len(TEXTS) - 1, len(TEXTS)):
        assert _contents(path, start) == TEXTS[start:]
    positions = [row.position for row in read_documents(path, "text")]
    assert positions == sorted(positions) and positions[-1] <= path.stat().st_size


def test_a_byte_order_mark_empty_lines_and_a_missing_last_newline_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for header in (b"text,id", b'"text","id"'):
        path.write_bytes(b"\xef\xbb\xbf" + header + b'\r\n\r\n\n\na,1\n\n"b\n\nc",2\r\n\n  ,3')
        assert _contents(path) == ["a", "b\n\nc", "  "]
        assert [row.content for part in read_ranges(path, "text", 1) for row in part] == ["a", "b\n\nc", "  "]
    path.write_bytes(b"\n\r\n\ntext\n" + b"\n" * 3_000_000 + b"a\n")
    assert _contents(path) == ["a"]
    path.write_bytes(b"text\n")
    assert _contents(path) == [] and read_ranges(path, "text", 1) == []


@pytest.fixture
def tokenizer(tmp_path: Path) -> Iterator[Path]:
    """Train a tokenizer, and tokenize in this process."""
    train_bpe(TEXTS, 300).save(tmp_path / "tokenizer")
    with pytest.MonkeyPatch.context() as patch:
        tokenize_here(patch)
        yield tmp_path / "tokenizer"


def _config(path: Path, tokenizer: Path, **more: Any) -> DataConfig:
    section = {"sources": [{"path": str(path), "name": "a"}], "tokenizer": {"path": str(tokenizer)}}
    section |= {"sequence_length": 24, "validation": {"fraction": 0.2}, "shard_tokens": 2000}
    return DataConfig.model_validate(section | more)


def test_prepared_data_is_the_same_as_from_lines(tokenizer: Path, tmp_path: Path) -> None:
    wanted = prepare(_config(write_jsonl(tmp_path / "a.jsonl", [*TEXTS]), tokenizer), tmp_path / "lines")
    found = prepare(_config(_write(tmp_path / "a.csv", TEXTS), tokenizer), tmp_path / "csv")
    shards = [{n: c for n, c in tree(made.dir).items() if n.endswith(".bin")} for made in (wanted, found)]
    assert shards[0] == shards[1] and len(shards[0]) > 4
    assert found.manifest.total("empty_documents") == 1


def test_online_every_document_is_read_once_an_epoch_and_samples_resume(tokenizer: Path, tmp_path: Path) -> None:
    texts = TEXTS * 6
    config = _config(_write(tmp_path / "a.csv", texts), tokenizer, mode="online", streams=4, validation={"fraction": 0})
    plan = build_worker_plan(
        prepare_online(config, tmp_path / "out", 0), config, 3, StreamAssignment(0, 1, BatchSchedule(8), 4, 3)
    )
    blocks, partitions = sum(plan.sources[0].blocks), plan.sources[0].partition_count(4)
    assert blocks >= 8 and partitions == 4
    found = []
    for partition in range(partitions):
        for document in DocumentReader(plan).documents(0, partition, partitions)(0, 0):
            if document.block * partitions + (partition + document.block) % partitions < blocks:
                found.append(document.content)
            elif document.block * partitions > blocks + partitions:
                break
    assert sorted(found) == sorted(text for text in texts if text)
    whole = run(plan, 1, 1, CursorTable(4, 1), 0, 4)
    cursors, resumed = CursorTable(4, 1), dict[int, Any]()
    for ranks, first in ((2, 0), (1, 8), (4, 16), (1, 24)):
        resumed |= run(plan, ranks, 1, cursors, first, 1)
    assert resumed == whole


# --- bad rows and files --------------------------------------------------------------------------------------------

BAD_ROWS = [
    (b"b", "a row of 1 fields, but the header has 2"),
    (b"b,c,d", "a row of 3 fields, but the header has 2"),
    (b'"b"c,d', "field 1 goes on after its closing quote; a quote in it is doubled"),
    (b'b,"c" ', "field 2 goes on after its closing quote; a quote in it is doubled"),
    (b"b,c\rd,e", "a carriage return outside of quotes"),
    (b"b,caf\xe9", "invalid UTF-8 at byte 3 of the text (unexpected end of data)"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD_ROWS)
def test_a_bad_row_is_named_by_its_first_line(tokenizer: Path, tmp_path: Path, bad: bytes, reason: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'id,text\n1,"two\nlines"\n' + bad + b"\n2,good\n")
    config = _config(path, tokenizer, validation={"fraction": 0})
    with pytest.raises(DataError) as caught:
        prepare(config, tmp_path / "out")
    assert str(caught.value).startswith(f"{path}, line 4: {reason}")
    allowed = prepare(config.model_copy(update={"unreadable_rows": 0.5}), tmp_path / "allowed")
    (listed,) = (allowed.dir / "quarantine.jsonl").read_text().splitlines()
    assert json.loads(listed) == {"file": str(path), "row": 1, "line": 4, "reason": json.loads(listed)["reason"]}
    online = config.model_copy(update={"mode": "online", "streams": 1})
    plan = build_worker_plan(
        prepare_online(online, tmp_path / "o", 0), online, 0, StreamAssignment(0, 1, BatchSchedule(8), 1, 0)
    )
    with pytest.raises(DataError) as caught:
        run(plan, 1, 1, CursorTable(1, 1), 0, 1)
    assert str(caught.value).startswith(f"{path}, the record that ends at byte {23 + len(bad)}: {reason}")


BAD_FILES = [
    (b'text\na\n"b\nc\n', r"the row that ends the file begins at byte 7 .* has a quote that is never closed"),
    (b'"text\n', r"the row that ends the file begins at byte 0 .* has a quote that is never closed"),
    (b"body,id\na,1\n", r"no column 'text'; it has body, id\. Set data\.text_column to one of these"),
    (b"text,text\na,1\n", r"2 columns are called 'text'\. Rename them"),
    (b"\n\n", r"no header: the file has only empty lines"),
    (b"text,id\ra,1\rb,2\r", r", line 1: not the header of a csv file: a carriage return outside of quotes"),
    ("text\na\n".encode("utf-16"), r"it begins like text in UTF-16"),
    (b"", r"the file is empty \(0 bytes\)"),
]


@pytest.mark.parametrize(("content", "message"), BAD_FILES)
def test_a_bad_file_is_refused_whatever_rows_may_be_bad(
    tokenizer: Path, tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    config = _config(tmp_path / "a.csv", tokenizer, unreadable_rows=0.9)
    with pytest.raises(DataError, match=message) as caught:
        prepare(config, tmp_path / "out")
    assert str(caught.value).startswith(str(tmp_path / "a.csv"))


@pytest.mark.parametrize("share", [0.3, 0.6, 0.99])
def test_a_truncated_compressed_file_is_named(tmp_path: Path, share: float) -> None:
    path = _write(tmp_path / "a.csv.gz", TEXTS)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(DataError, match=r"a\.csv\.gz: the compressed data cannot be read to its end"):
        _contents(path)


@pytest.mark.parametrize("name", ["a.csv", "a.csv.zst"])
def test_a_row_that_is_too_long_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also one whose lines are short, and the rows after it are read."""
    for module in (base, csv_table, line_reading):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(csv_table, "_READ_BYTES", 7)
    texts = ["a", "b" * 5000, 'c"\n' * 2000, "d" * 1000, "e"]
    path = _write(tmp_path / name, texts)
    rows = list(read_documents(path, "text"))
    assert [row.content for row in rows] == ["a", None, None, None, "e"]
    errors = [row.error for row in rows if row.error is not None]
    assert [error.line for error in errors] == [3, 4, 2005]
    assert all(error.reason.startswith("a row of more than 1,000 bytes") for error in errors)
    assert all(("compressed bytes gave" in error.reason) == (name == "a.csv.zst") for error in errors)


def test_a_column_of_tokens_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.csv: csv files have no column that data\.tokens_column could name"):
        list(read_documents(_write(tmp_path / "a.csv", TEXTS), "text", 0, TOKENS_COLUMN))
