"""Files that are not what their names say, or are other text than they seem: read rightly, or refused with the cure.

The documents that are expected are those that were written; each kind of file is after public reports of users.
"""

import base64
import bz2
import gzip
import json
import pickle
import sqlite3
import tarfile
import zipfile
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard
from pyarrow import ipc
from pyarrow import parquet as pq
from pyarrow.parquet import encryption

from hlat.config.sections.data import DataConfig
from hlat.data.corpus_files import list_files
from hlat.data.source_listing import doubts
from hlat.data.tokenizers.load import load_tokenizer
from hlat.runtime.errors import DataError
from tests.support.data.hf_folders import write_dataset
from tests.support.data.reading_sources import read_source, verdict

DOCS = [f"Document {number}: some words, é 東京 {number * 13}." for number in range(6)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in DOCS).encode()
BOM = b"\xef\xbb\xbf"
TSV = "text\tid\n" + "".join(f"{text}\t1\n" for text in DOCS)
CSV = "id,text\n" + "".join(f'1,"{text}"\n' for text in DOCS)
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 12345\n"
HTML = b"<!DOCTYPE html>\n<html><body>404 Not Found</body></html>\n"


def _table(values: object, column_type: pa.DataType | None = None) -> pa.Table:
    rows = [1] * len(values)  # type: ignore[arg-type]
    return pa.table({"id": pa.array(rows), "text": pa.array(values, type=column_type)})


def _parquet(table: pa.Table, **options: object) -> bytes:
    out = BytesIO()
    pq.write_table(table, out, **options)
    return out.getvalue()


def _stream(table: pa.Table) -> bytes:
    out = BytesIO()
    with ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    return out.getvalue()


def _file(table: pa.Table) -> bytes:
    out = BytesIO()
    with ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


def _long_window(content: bytes) -> bytes:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=30, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compressor.compress(content) + compressor.flush()


def _zip() -> bytes:
    out = BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a.jsonl", LINES)
    return out.getvalue()


def _tar(tar_format: int = tarfile.USTAR_FORMAT) -> bytes:
    out = BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tar_format) as archive:
        archive.addfile(tarfile.TarInfo("a.jsonl"))
    return out.getvalue()


READ: dict[str, bytes] = {
    "a.jsonlines": LINES,
    "a.jl": LINES,
    "A.NDJSON.ZSTD": zstandard.compress(LINES),
    "a.jsonl.gzip": gzip.compress(LINES[:100]) + gzip.compress(LINES[100:]),
    "marked.jsonl": BOM + LINES,
    "joined.jsonl": BOM + LINES[: LINES.index(b"\n") + 1] + BOM + LINES[LINES.index(b"\n") + 1 :],
    "marked.csv": BOM + CSV.encode(),
    "marked.tsv": BOM + TSV.encode(),
    "windows.jsonl": LINES.replace(b"\n", b"\r\n"),
    "binary.parquet": _parquet(_table([text.encode() for text in DOCS], pa.binary())),
    "view.arrow": _stream(_table(DOCS, pa.string_view())),
    "large.parquet": _parquet(_table(DOCS, pa.large_string())),
    "dictionary.arrow": _stream(_table(pa.array(DOCS).dictionary_encode())),
    "coded.parquet": _parquet(_table(pa.array([text.encode() for text in DOCS]).dictionary_encode())),
    "coded.arrow": _stream(_table(pa.array([text.encode() for text in DOCS]).dictionary_encode())),
    "others_twice.parquet": _parquet(pa.Table.from_arrays([pa.array(DOCS)] * 3, ["a", "a", "text"])),
    "integer.jsonl": LINES + b'{"id": ' + b"9" * 5000 + b', "text": ""}\n',
    "numbers.jsonl": LINES + b'{"a": NaN, "b": [-Infinity, 1e999], "c": "\\ud800", "text": null}\n',
    "nested.jsonl": LINES.replace(b'"text"', b'"meta": {"text": 1}, "text"'),
    "skipped.jsonl.zst": b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + zstandard.compress(LINES),
}
"""Files that give ``DOCS``."""

REFUSED: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "lfs.txt": (LFS, ("Git LFS pointer", "git lfs pull")),
    "lfs.jsonl": (LFS, ("Git LFS pointer", "git lfs pull")),
    "lfs.parquet": (LFS, ("Git LFS pointer", "git lfs pull")),
    "lfs.arrow": (LFS, ("Git LFS pointer",)),
    "lfs.csv.gz": (LFS, ("Git LFS pointer",)),
    "xet.parquet": (b"# xet version 0\nfilesize = 1\n", ("Xet pointer",)),
    "annex.txt": (b"/annex/objects/SHA256E-s1--abc.txt\n", ("git annex get",)),
    "dvc.txt": (b"outs:\n- md5: 0123\n  path: a.txt\n", ("dvc pull",)),
    "error.parquet": (HTML, ("a page of HTML",)),
    "error.jsonl": (b"\n" + HTML.lower(), ("a page of HTML",)),
    "denied.txt": (b'<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code></Error>', ("error message of an object",)),
    "message.parquet": (b'{"error": "Repository not found"}', ("begins like plain text",)),
    "lines.txt": (LINES, ("lines of JSON objects", ".jsonl")),
    "copy.jsonl~": (LINES, ("lines of JSON objects",)),
    "list.json": (json.dumps([{"text": text} for text in DOCS]).encode(), ("one JSON list", "jq -c '.[]'")),
    "indented.jsonl": (json.dumps({"text": "a"}, indent=1).encode(), ("objects of several lines", "jq -c")),
    "twice.jsonl": (b'{"text": "a", "text": "b"}\n', ("the key 'text' is there 2 times",)),
    "deep.jsonl": (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b', "text": "a"}\n', ("nested too deeply",)),
    "mac.jsonl": (LINES.replace(b"\n", b"\r"), ("carriage return", "tr '\\r' '\\n'")),
    "wide.txt": (DOCS[0].encode("utf-16"), ("UTF-16", "iconv -f UTF-16 ")),
    "wide.jsonl": (LINES.decode().encode("utf-16"), ("UTF-16", "iconv -f UTF-16 ")),
    "wide.csv": (CSV.encode().decode("utf-8").encode("utf-16-be"), ("iconv -f UTF-16BE",)),
    "bare.txt": (DOCS[0].encode("utf-16-le"), ("iconv -f UTF-16LE",)),
    "widest.txt": (DOCS[0].encode("utf-32"), ("iconv -f UTF-32 ",)),
    "latin.txt": ("Größe".encode("latin-1"), ("invalid UTF-8 at byte 2", "iconv -f ENCODING")),
    "japanese.txt": ("東京".encode("shift-jis"), ("invalid UTF-8", "iconv -f ENCODING")),
    "zeros.jsonl": (bytes(5000), ("zero bytes", "never written")),
    "zeros.parquet": (bytes(5000), ("zero bytes",)),
    "plain.jsonl.gz": (LINES, ("its ending .gz", "plain text")),
    "plain.txt.zst": (DOCS[0].encode(), ("its ending .zst",)),
    "double.jsonl.gz": (gzip.compress(gzip.compress(LINES)), ("gzip data", "decompress once")),
    "other.jsonl.gz": (zstandard.compress(LINES), ("zstd data", ".zst")),
    "appended.jsonl.gz": (gzip.compress(LINES) + b"more text\n", ("other bytes follow the compressed data",)),
    "appended.jsonl.zst": (zstandard.compress(LINES) + b"more text\n", ("other bytes follow",)),
    "long.jsonl.zst": (_long_window(LINES), ("window", "zstd -d --long=31")),
    "cut.jsonl.gz": (gzip.compress(LINES)[:-9], ("truncated or damaged",)),
    "cut.arrow": (_stream(_table(DOCS))[:-8], ("no end marker", "between two batches")),
    "joined.feather": (_file(_table(DOCS[:3])) + _file(_table(DOCS[3:])), ("several arrow files that were joined",)),
    "joined.arrow": (_stream(_table(DOCS[:3])) + _stream(_table(DOCS[3:])), ("streams that were joined",)),
    "padded.arrow": (_stream(_table(DOCS)) + bytes(64), ("64 bytes follow", "incomplete copy")),
    "cut.feather": (_stream(_table(DOCS))[:-20], ("truncated or damaged",)),
    "archive.jsonl": (_zip(), ("zip archive", "Unpack")),
    "archive.txt": (_tar(), ("tar archive",)),
    "gnu.txt": (_tar(tarfile.GNU_FORMAT), ("tar archive",)),
    "packed.txt": (bz2.compress(LINES), ("bzip2 data",)),
    "image.txt": (b"GIF89a\x01\0\x01\0\x80\0\0", ("an image",)),
    "model.txt": (b"GGUF\x03\0\0\0", ("a model of llama.cpp",)),
    "feather.txt": (b"FEA1" + bytes(8), ("a Feather file of version 1",)),
    "rich.txt": (b"{\\rtf1\\ansi text}", ("an RTF document",)),
    "a.docx": (_zip(), ("Extract its text",)),
    "pickled.txt": (pickle.dumps(DOCS, 4), ("a pickle",)),
    "page.txt": (b"%PDF-1.7\n", ("a PDF",)),
    "Thumbs.db": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(100), ("Thumbs.db",)),
    "resource.txt": (b"\0\x05\x16\x07\0\2\0\0Mac OS X", ("AppleDouble",)),
    "table.txt": (_parquet(_table(DOCS)), ("a parquet file", ".parquet")),
    "table.parquet.gzip": (_parquet(_table(DOCS)), ("give it the ending .parquet",)),
    "wget.parquet?download=true": (_parquet(_table(DOCS)), ("a parquet file",)),
    "a.jsonl.crdownload": (LINES, ("Complete the download",)),
    "twice.parquet": (_parquet(pa.Table.from_arrays([pa.array(DOCS)] * 2, ["text"] * 2)), ("2 columns are called",)),
    "twice.arrow": (_stream(pa.Table.from_arrays([pa.array(DOCS)] * 2, ["text"] * 2)), ("2 columns are called",)),
    "list.parquet": (_parquet(_table([[text] for text in DOCS])), ("holds list", "a column of strings")),
    "struct.arrow": (_stream(_table([{"a": text} for text in DOCS])), ("holds struct",)),
    "bytes.parquet": (_parquet(_table([b"\xff"])), ("row 0: invalid UTF-8 at byte 0",)),
}  # fmt: skip
"""Files that are refused, and words of the message."""
_DAMAGED = {"cut.jsonl.gz", "cut.feather"}


@pytest.mark.parametrize("name", READ)
def test_what_is_read_is_what_was_written(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(READ[name])
    assert read_source(tmp_path / name, tmp_path) == DOCS


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named_and_only_damage_is_called_damage(tmp_path: Path, name: str) -> None:
    content, words = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    message = verdict(tmp_path / name, tmp_path)
    assert isinstance(message, str) and str(tmp_path / name) in message
    assert all(word in message for word in words), message
    assert ("truncated or damaged" in message) == (name in _DAMAGED) and "LATIN1" not in message


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(BOM + DOCS[0].encode() + b"\n" + BOM + DOCS[1].encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(BOM + DOCS[2].encode()))
    (tmp_path / "c.md").write_bytes(b"a word" + BOM + b"joiner inside")
    assert read_source(tmp_path, tmp_path) == [f"{DOCS[0]}\n{DOCS[1]}", DOCS[2], "a word\ufeffjoiner inside"]


BEGINNINGS = (
    *("PAR1 is a receptor.", "GGUF is a file format.", "FEA1", "GIF89a is a format.", "BZh91AY&SY begins it."),
    *("%PDF-1.7 is written first.", "{\\rtf begins it.", "version https://git-lfs.github.com is old.", "PK", "Rar!"),
    *("# xet version of the library", "/annex/objects/ is a folder.", "outs:\n- md5", "Obj", "SQLite format 3", "7z"),
    *("<error> in <code>", "<html> is a tag", "ARROW1", "MMIDIDX", f"{'.' * 257}ustard", f"{'é' * 128}.mustard ustar"),
)


def test_text_that_begins_like_another_file_is_text(tmp_path: Path) -> None:
    for number, text in enumerate(BEGINNINGS):
        (tmp_path / f"{number:02}.txt").write_text(text)
    assert read_source(tmp_path, tmp_path) == list(BEGINNINGS)


def test_a_page_of_html_is_text_where_text_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_bytes(HTML)
    assert read_source(tmp_path / "a.html", tmp_path) == [HTML.decode()]


def test_a_shard_of_nulls_beside_others(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(_parquet(_table(DOCS)))
    (tmp_path / "b.parquet").write_bytes(_parquet(_table([None] * 3, pa.null())))
    (tmp_path / "c.parquet").write_bytes(_parquet(_table([], pa.null())))
    assert read_source(tmp_path, tmp_path) == DOCS


def test_a_bad_document_is_left_out_where_bad_rows_may_be(tmp_path: Path) -> None:
    for number, text in enumerate(DOCS):
        (tmp_path / f"{number}.txt").write_text(text)
    (tmp_path / "x.txt").write_bytes(LFS)
    (tmp_path / "y.txt").write_bytes(DOCS[0].encode("utf-16"))
    assert read_source(tmp_path, tmp_path, unreadable_rows=0.3) == DOCS


@pytest.mark.parametrize("spelled", ['"é"', '"\\u00e9"'])
def test_a_key_that_is_there_twice_is_refused_in_either_spelling(tmp_path: Path, spelled: str) -> None:
    for other in ('"é"', '"\\u00e9"'):
        (tmp_path / "a.jsonl").write_text(f'{{{spelled}: "a", {other}: "b"}}\n')
        with pytest.raises(DataError, match="the key 'é' is there 2 times"):
            read_source(tmp_path / "a.jsonl", tmp_path, text_column="é")


def test_a_saved_dataset_says_what_it_lacks(tmp_path: Path) -> None:
    table = pa.table({"text": DOCS})
    folder = write_dataset(tmp_path / "saved", [table[:2], table[2:4], table[4:]])
    config = DataConfig.model_validate({"path": str(folder)})
    assert read_source(folder, tmp_path) == DOCS and not doubts(list_files(config, tmp_path))
    (folder / "dataset_info.json").write_text(json.dumps({"splits": {"train": {"num_examples": 9}}}))
    (doubt,) = doubts(list_files(config, tmp_path))
    assert doubt.startswith(f"{folder}: 6 rows, and dataset_info.json says 9")
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "_data_files": state["_data_files"][:2]}))
    message = verdict(folder, tmp_path)
    assert "lists 2 data files, but data-00000-of-00003.arrow is one of 3" in message


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_pointer_is_no_tokenizer(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(LFS)
    with pytest.raises(DataError, match=rf"{name}: this is a Git LFS pointer, .* Run `git lfs pull`"):
        load_tokenizer(tmp_path)


class _Keys(encryption.KmsClient):  # type: ignore[misc]
    def wrap_key(self, key: bytes, master: str) -> bytes:
        del master
        return base64.b64encode(key)

    def unwrap_key(self, key: bytes, master: str) -> bytes:
        del master
        return base64.b64decode(key)


@pytest.mark.parametrize("plaintext_footer", [False, True])
def test_an_encrypted_file_is_not_damaged(tmp_path: Path, plaintext_footer: bool) -> None:
    settings = encryption.EncryptionConfiguration(
        footer_key="key", column_keys={"key": ["text"]}, plaintext_footer=plaintext_footer
    )
    factory = encryption.CryptoFactory(lambda _: _Keys())
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), settings)
    pq.write_table(_table(DOCS), tmp_path / "a.parquet", encryption_properties=properties)
    message = verdict(tmp_path / "a.parquet", tmp_path)
    assert isinstance(message, str) and "is encrypted" in message and "damaged" not in message


def test_a_database_is_no_text(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "a.db") as database:
        database.execute("create table t (text)")
    with pytest.raises(DataError, match="an SQLite database"):
        read_source(tmp_path / "a.db", tmp_path)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["train-00000-of-00001.jsonl", "test-00000-of-00001.jsonl"], "test-00000-of-00001.jsonl: named as a test"),
        (["train/0.jsonl", "Validation/0.jsonl", "Validation/1.jsonl"], "0.jsonl and 1 more: named as a test"),
        (["test/train.jsonl"], ""),  # the folder of all of them
        (["trains.jsonl", "testimony.jsonl"], ""),
        (["test.jsonl", "other.jsonl"], ""),
        (["a.jsonl", "a.jsonl.gz"], "a.jsonl.gz: the same file uncompressed is beside it, and both are read."),
        (["a.jsonl", "b.jsonl.gz"], ""),
    ],
)
def test_text_that_was_hardly_meant_is_told(tmp_path: Path, names: list[str], told: str) -> None:
    """huggingface/datasets/issues/7343, marin-community/marin/pull/2381."""
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(gzip.compress(LINES) if name.endswith("gz") else LINES)
    found = doubts(list_files(DataConfig.model_validate({"path": str(tmp_path)}), tmp_path))
    assert len(found) == bool(told) and told in "".join(found)


def test_checksums_of_the_pages_of_a_parquet_file_are_compared(tmp_path: Path) -> None:
    """Without compression nothing else shows a changed byte; apache/arrow/pull/38360, parquet-java writes them."""
    content = _parquet(_table(DOCS), compression="none", use_dictionary=False, write_page_checksum=True)
    (tmp_path / "a.parquet").write_bytes(content)
    assert read_source(tmp_path, tmp_path) == DOCS
    (tmp_path / "a.parquet").write_bytes(content.replace(b"Document 2", b"Document 9"))
    assert "CRC checksum verification failed" in str(verdict(tmp_path / "a.parquet", tmp_path))
