"""Files of public reports that were read wrongly, or refused with a cure that does not help: told now, with the cure.

Each case names its report. What is read as it was written is in test_strange_files.py.
"""

import json
import os
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
import zstandard
from pyarrow import ipc
from pyarrow import parquet as pq

from hlat.config.sections.data import DataConfig
from hlat.data.corpus_files import list_files
from tests.support.data.reading_sources import verdict

DOCS = [f"Document {number}: some words, é 東京 {number * 13}." for number in range(6)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in DOCS).encode()
CSV = "id,text\n" + "".join(f'1,"{text}"\n' for text in DOCS)


def _parquet(texts: list[Any], **options: Any) -> bytes:
    out = BytesIO()
    pq.write_table(pa.table({"text": texts, "id": [1] * len(texts)}), out, **options)
    return out.getvalue()


def _arrow(texts: list[str]) -> bytes:
    out, table = BytesIO(), pa.table({"text": pa.array(texts, pa.string())})
    with ipc.new_file(out, table.schema) as writer:
        for batch in table.to_batches():
            writer.write_batch(batch)
    return out.getvalue()


def _dictionary(*, is_raw: bool = False) -> zstandard.ZstdCompressionDict:
    if is_raw:  # has no number, which frames could name
        return zstandard.ZstdCompressionDict(LINES * 3, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    return zstandard.train_dictionary(2000, [f"{DOCS[number % 6] * 3}{number}".encode() for number in range(1200)])


class Told(NamedTuple):
    """Files by name, the words of the message about them, and words that it must not have."""

    report: str
    files: dict[str, bytes]
    words: tuple[str, ...]
    absent: tuple[str, ...] = ()


ROWS = [f"row {number:05}" for number in range(2000)]
JOINED = "several parquet files that were joined"
REPORTS = (
    # of equal and unequal sizes, with indexes, and with an empty file at the end, whose footer has no rows
    Told("xtream1101/s3-concat#10", {"a.parquet": _parquet(ROWS[:1000]) + _parquet(ROWS[1000:])}, (JOINED,)),
    Told("xtream1101/s3-concat#10", {"a.parquet": _parquet(ROWS[:10]) + _parquet(ROWS)}, (JOINED,), ("damaged",)),
    Told("xtream1101/s3-concat#10", {"a.parquet": _parquet(ROWS) + _parquet(ROWS[:10])}, (JOINED,), ("damaged",)),
    Told("xtream1101/s3-concat#10", {"a.parquet": _parquet(ROWS) + _parquet([])}, (JOINED,)),
    Told(
        "xtream1101/s3-concat#10",
        {"a.parquet": b"".join(_parquet(ROWS[at : at + 500], write_page_index=True) for at in range(0, 2000, 500))},
        (JOINED,),
    ),
    Told("xtream1101/s3-concat#10", {"a.feather": _arrow(DOCS) + _arrow([])}, ("several arrow files",)),
    Told("apache/arrow#40655", {"a.arrow": CSV.encode()}, ("begins like plain text",), ("damaged",)),
    Told("apache/arrow#40655", {"a.feather": b"Entry not found"}, ("begins like plain text",), ("damaged",)),
    Told(
        "whitfin/s3-concat#3, PNNL-CompBio/coderdata#161",
        {"a.csv": CSV.encode() * 3},
        ("line 8: the names of the columns again, as where files were joined", "data.unreadable_rows"),
    ),
    Told("ckan/datapusher#74", {"a.csv": b"id,text\n" + CSV.encode()}, ("line 2: the names of the columns again",)),
    Told(
        "manybabies/mb2-analysis#89",
        {"a.tsv": CSV.replace(",", "\t").encode() + b"id\ttext\r\n"},
        ("line 8: the names of the columns again",),
    ),
    Told(
        "mithrandie/csvq#18",
        {"a.csv": CSV.replace("id", "id,is_new").replace("1,", "1,1,").encode() + b"text,is_new,id\nfoo,0,1\n"},
        ("line 8: the names of the columns again", "another order", "a file of its own"),
        ("data.unreadable_rows",),
    ),
    Told("a dictionary", {"a.csv": CSV.encode() + b"text,id\n"}, ("line 8: the names", "data.unreadable_rows")),
    Told(
        "a text in Latin-1",
        {"a.txt": b"soci\xc3\xa9t\xe9"},
        ("invalid UTF-8 at byte", "iconv -f ENCODING", "Or the file was cut"),
    ),
    Told("MyCometG3/QLStephenSwift#19", {"a.txt": "東京は日本".encode("iso2022_jp")}, ("iconv -f ISO-2022-JP -t",)),
    Told("a page in ISO-2022-JP", {"a.txt": "<html><body>東京</body></html>".encode("iso2022_jp")}, ("ISO-2022-JP",)),
    Told("Alinto/sogo#380", {"a.txt": b"text. " * 999 + "① 東京".encode("iso2022_jp_3")}, ("-f ISO-2022-JP-3 ",)),
    Told("Alinto/sogo#380", {"a.csv": b"id,text\n1," + "한국어".encode("iso2022_kr")}, ("text in ISO-2022-KR",)),
    Told(
        "facebook/zstd#3655",
        {"a.jsonl.zst": zstandard.ZstdCompressor(dict_data=_dictionary()).compress(LINES)},
        ("compressed with a dictionary", "zstd -d -D DICTIONARY"),
        ("damaged",),
    ),
    Told(
        "kim-em/lean-zip#570",
        {"a.jsonl.zst": zstandard.ZstdCompressor(dict_data=_dictionary(is_raw=True)).compress(LINES)},
        ("truncated or damaged", "Unless it was compressed with a dictionary", "zstd -d -D DICTIONARY"),
    ),
    Told(
        "ohdearquant/lionagi#2062",
        {"a.txt": (DOCS[0] * 20).encode() + "京".encode()[:2]},
        ("invalid UTF-8 at byte 720", "was cut inside of its last character: fetch"),
        ("iconv",),
    ),
    Told("koth/kcws#9", {"a.txt": DOCS[0].encode(), "b.txt": "東京".encode()[:-1]}, ("b.txt: ", "was cut"), ("iconv",)),
    Told("shenwei356/csvtk#13", {"a.csv": b"sep=,\n" + CSV.encode()}, ("Leave out this first line",)),
    Told("tspence/csharp-csv-reader#28", {"a.csv": b"sep=;\n" + CSV.encode()}, ("Leave out this first line",)),
    Told("BaseXdb/basex#164, mholt/PapaParse#43", {"a.csv": CSV.replace("\n", "\r").encode()}, ("tr '\\r' '\\n'",)),
    Told("aws/aws-sdk-pandas#1008", {"a.parquet": _parquet([float("nan")] * 3)}, ("holds double", "Cast it")),
    Told("duckdb/duckdb#9608", {"a.parquet": _parquet([1])}, ("Cast it to a column of strings",)),
    Told("huggingface/datasets#7169", {"a.jsonl": LINES + b'{"b": 1}\n'}, ("if other rows or files have it, add it",)),
    Told(
        "IndoNLP/nusa-crowd#338, haotian-liu/LLaVA#981",
        {"a.json": b'[{"text":"a"},{"text":"b'},
        ("one JSON list", "it was cut"),
        ("jq",),
    ),
    Told("haotian-liu/LLaVA#981", {"a.json": b'[{"text":"a"},\n{"text":"b"}]\n'}, ("one JSON list", "jq -c"), ("cut",)),
    Told(
        "AllenInstitute/biofile-finder#911, dlt-hub/dlt#1693, delta-io/delta#13",
        {"a.parquet": _parquet(DOCS), "_delta_log/00000000000000000000.json": b'{"add": {"path": "a.parquet"}}\n'},
        ("the folder of a table of Delta", 'spark.read.format("delta")'),
        ("text_column",),
    ),
    Told(
        "derekwisong/datui#237",
        {"2024/a_0_1.parquet": _parquet(DOCS), "2024/a_0_2.parquet": _parquet(DOCS), ".hoodie/hoodie.properties": b""},
        ("the folder of a table of Hudi",),
    ),
    Told(
        "derekwisong/datui#237",
        {"data/a.parquet": _parquet(DOCS), "metadata/v1.metadata.json": b"{}", "metadata/version-hint.text": b"1"},
        ("the folder of a table of Iceberg",),
    ),
    Told(
        "apache/spark#6411",
        {"0.parquet": _parquet(DOCS), "_temporary/0/_temporary/attempt_1/1.parquet": _parquet(DOCS)},
        ("_temporary/0: files that a job of Spark or Hadoop had not", "leave them out with a glob"),
    ),
)  # fmt: skip


@pytest.mark.parametrize("told", [pytest.param(told, id=f"{n}-{told.report}") for n, told in enumerate(REPORTS)])
def test_what_was_read_wrongly_is_told_with_its_cure(tmp_path: Path, told: Told) -> None:
    for name, content in told.files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    message = verdict(tmp_path, tmp_path)
    assert isinstance(message, str), message
    assert all(word in message for word in told.words) and not any(word in message for word in told.absent), message


def test_a_parquet_file_whose_indexes_hold_the_magic_word_is_read(tmp_path: Path) -> None:
    texts = [f"PAR1PAR1 {number}" for number in range(300)]
    for options in ({}, {"row_group_size": 50, "compression": "none", "use_dictionary": False}):
        (tmp_path / "a.parquet").write_bytes(_parquet(texts, write_page_index=True, **options))
        assert verdict(tmp_path / "a.parquet", tmp_path) == texts


def test_a_text_that_resembles_the_end_of_a_parquet_file_is_read(tmp_path: Path) -> None:
    texts = [f"\x15\x02 no footer\x0e\0\0\0PAR1PAR1 {number}" for number in range(300)]
    options = {"row_group_size": 50, "compression": "none", "use_dictionary": False}
    (tmp_path / "a.parquet").write_bytes(_parquet(texts, write_page_index=True, **options))
    assert verdict(tmp_path / "a.parquet", tmp_path) == texts


def test_rows_that_repeat_the_header_are_left_out_however_they_are_written(tmp_path: Path) -> None:
    """The message says so of data.unreadable_rows: its comparison knows quotes, line ends and byte order marks."""
    again = [b"\xef\xbb\xbfid,text\n", b'"id","text"\r\n', b'text,"id"\n']
    lines = "".join(f'{number},"{text}\nid,text"\n' for number, text in enumerate(DOCS)).encode()
    (tmp_path / "a.csv").write_bytes(b"id,text\n" + lines.join(again) + lines)
    found = verdict(tmp_path / "a.csv", tmp_path, unreadable_rows=0.3)
    assert found == [f"{text}\nid,text" for text in DOCS] * 3


def test_the_mark_of_a_finished_job_is_no_text_beside_its_files(tmp_path: Path) -> None:
    for name, content in {
        "part-0.parquet": _parquet(DOCS),
        "_SUCCESS": b"",
        "text/part-0": b"a",
        "text/_SUCCESS": b"",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert len(list_files(DataConfig(path=str(tmp_path / "text")), tmp_path)) == 2  # as data was prepared before
    (tmp_path / "text" / "part-0").unlink()
    assert verdict(tmp_path, tmp_path) == DOCS
    (tmp_path / "_SUCCESS").write_bytes(b"a text")
    assert "mixes text files (_SUCCESS) with parquet files" in verdict(tmp_path, tmp_path)


@pytest.mark.parametrize("inner", ["*.parquet", "**/*.parquet", "a.parquet", "data"])
@pytest.mark.parametrize("sign", ["_delta_log/0.json", ".hoodie/hoodie.properties", "metadata/v1.metadata.json"])
def test_a_part_of_a_table_is_no_corpus_either(tmp_path: Path, inner: str, sign: str) -> None:
    """dlt-hub/dlt#1693, derekwisong/datui#237: a glob, a file or a folder in it."""
    for name, content in {sign: b"{}\n", "a.parquet": _parquet(DOCS), "data/b.parquet": _parquet(DOCS)}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    found = verdict(tmp_path / inner, tmp_path)
    if sign.startswith("metadata") and inner in ("*.parquet", "a.parquet"):
        assert found == DOCS  # rows of Iceberg are below data/
    else:
        assert f"{tmp_path}: the folder of a table of " in found


GOOD = (
    {"data/a.txt": b"a", "metadata/validation.metadata.json": b"{}"},
    {"data/a.parquet": _parquet(["a"]), "metadata/2023.metadata.json": b"{}"},
    {"a.jsonl": b'{"text": "a"}\n', "data/.keep": b"", "metadata/v1.metadata.json": b"{}"},
    {"_delta_log/0.json": b"{}", "clean/a.txt": b"a"},
    {"_temporary/a.txt": b"a"},
    {"a.txt": "a: the sequence \x1b$B starts Kanji, 東京".encode()},
    {"a.txt": "a mailbox in UTF-8, 東京, with one mail: \x1b$B$3$s\x1b(B".encode()},
    {"a.txt": b"echo '\x1b$(COLOR_RED)' \x1b$A and \x1b[31mred\x1b[0m \x1b(B"},
)


@pytest.mark.parametrize("files", GOOD)
def test_a_good_corpus_that_looks_a_little_like_these_is_read(tmp_path: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    name = next(name for name in files if name.endswith(("a.txt", "a.jsonl", "a.parquet")))
    found = verdict(tmp_path / name, tmp_path)
    assert len(found) == 1 and found[0].startswith(("a", "echo")), found


def test_names_with_an_underscore_are_read_and_what_is_below_a_named_folder(tmp_path: Path) -> None:
    """Spark and pyarrow leave out such names, but sites have their text there (_posts); apache/spark#6411."""
    for folder in ("_posts", "_temporary", "metadata"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jsonl").write_bytes(LINES)
    (tmp_path / "metadata" / "model.metadata.json").write_bytes(LINES)
    assert verdict(tmp_path / "_posts", tmp_path) == verdict(tmp_path / "_temporary", tmp_path) == DOCS
    assert verdict(f"{tmp_path}/_*s/*", tmp_path) == verdict(f"{tmp_path}/meta*/a*", tmp_path) == DOCS


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    """MemPalace/mempalace#2221."""
    os.mkfifo(tmp_path / "a.jsonl")
    assert "a.jsonl: a pipe, socket or device. Write what it gives" in verdict(tmp_path / "a.jsonl", tmp_path)
