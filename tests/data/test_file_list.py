"""Every file type gives the same documents; every problem of a file is a DataError that names the position."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from pyarrow import ipc

from hlat.config.sections.data import DataConfig
from hlat.data import corpus_files as sources
from hlat.data.prepare.preparation import prepare
from hlat.data.source_listing import find_files
from hlat.runtime.errors import DataError
from tests.support.data.corpora import documents, write_jsonl
from tests.support.data.reading_files import read_documents

TEXTS: list[str | None] = [*documents(300, 40), None, "", "naïve 日本語 \U0001f600", "last"]


def _table(texts: list[str | None] = TEXTS, column_type: pa.DataType | None = None) -> pa.Table:
    return pa.table({"id": list(range(len(texts))), "text": pa.array(texts, type=column_type or pa.string())})


def _jsonl(texts: list[str | None] = TEXTS) -> bytes:
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()


def _write(path: Path) -> Path:
    match "".join(path.suffixes):
        case ".parquet":
            pq.write_table(_table(), path, row_group_size=100)
        case ".large.parquet":
            pq.write_table(_table(column_type=pa.large_string()), path)
        case ".dictionary.parquet":
            pq.write_table(_table().set_column(1, "text", _table()["text"].dictionary_encode()), path)
        case ".arrow":
            with ipc.new_file(path, _table().schema) as writer:
                writer.write_table(_table(), max_chunksize=70)
        case ".stream.arrow":
            with ipc.new_stream(path, _table().schema) as writer:
                writer.write_table(_table(), max_chunksize=70)
        case ".jsonl":
            path.write_bytes(_jsonl())
        case ".jsonl.gz":
            path.write_bytes(gzip.compress(_jsonl()[:5000]) + gzip.compress(_jsonl()[5000:]))
        case ".jsonl.zst":
            path.write_bytes(zstandard.compress(_jsonl()[:5000]) + zstandard.compress(_jsonl()[5000:]))
    return path


FORMATS = [
    "a.parquet",
    "a.large.parquet",
    "a.dictionary.parquet",
    "a.arrow",
    "a.stream.arrow",
    "a.jsonl",
    "a.jsonl.gz",
    "a.jsonl.zst",
]


@pytest.mark.parametrize("name", FORMATS)
def test_all_formats_give_the_same_documents_from_any_row(tmp_path: Path, name: str) -> None:
    file = _write(tmp_path / name)
    for start in (0, 1, 64, 99, 100, 101, 303, 304):
        rows = list(read_documents(file, "text", start))
        assert [(row.row, row.content) for row in rows] == list(enumerate(TEXTS))[start:]
        positions = [row.position for row in rows]
        assert positions == sorted(positions) and all(0 <= p <= file.stat().st_size for p in positions)


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    for name in ("b.md", "a.txt", "sub/c.py", "sub/.hidden.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "z.txt.gz").write_bytes(gzip.compress(b"zipped"))
    files, _ = find_files(str(tmp_path))
    assert [f.relative_to(tmp_path).as_posix() for f in files] == ["a.txt", "b.md", "sub/c.py", "z.txt.gz"]
    texts = [row.content for f in files for row in read_documents(f, "text")]
    assert texts == ["a.txt", "b.md", "sub/c.py", "zipped"]
    assert find_files(f"{tmp_path}/**/*.py") == ([tmp_path / "sub/c.py"], [])


# --- errors ------------------------------------------------------------------------------------------------------


def _refusal(path: Path | str, out: Path, **section: object) -> str:
    """Return the message of the DataError from preparing a path; check that no prepared data is left behind."""
    config = DataConfig.model_validate({"path": str(path), "tokenizer": {"vocab_size": 300}, **section})
    with pytest.raises(DataError) as caught:
        prepare(config, out, workers=1)
    assert not (out / "manifest.json").exists()
    assert not list(out.rglob("*.tmp")) if out.exists() else True
    return str(caught.value)


def _truncate(path: Path, share: float) -> Path:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    return path


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.99])
def test_a_truncated_file_is_named(tmp_path: Path, name: str, share: float) -> None:
    file = _truncate(_write(tmp_path / name), share)
    message = _refusal(file, tmp_path / "out")
    assert str(file) in message and "truncated or damaged" in message


def test_a_truncated_arrow_stream_is_named(tmp_path: Path) -> None:
    file = _truncate(_write(tmp_path / "a.stream.arrow"), 0.6)
    assert str(file) in _refusal(file, tmp_path / "out")


def test_a_damaged_parquet_page_is_reported(tmp_path: Path) -> None:
    file = _write(tmp_path / "a.parquet")
    content = bytearray(file.read_bytes())
    content[len(content) // 4 : len(content) // 4 + 200] = bytes(200)
    file.write_bytes(content)
    assert str(file) in _refusal(file, tmp_path / "out")


def test_a_truncated_jsonl_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(_jsonl()[:-5])
    message = _refusal(file, tmp_path / "out")
    assert f"{file}, line 304" in message and "truncated" in message


def _line(tmp_path: Path, line: bytes) -> str:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    return _refusal(file, tmp_path / "out")


def test_bad_json_lines_are_named(tmp_path: Path) -> None:
    assert "line 2: invalid JSON" in _line(tmp_path, b"{nonsense")
    assert "line 2: invalid UTF-8 at byte 28" in _line(tmp_path, b'{"text": "x\xff"}')
    assert "line 2: a JSON list, not an object" in _line(tmp_path, b"[1]")
    assert "line 2: no column 'text'; it has content, id" in _line(tmp_path, b'{"content": "x", "id": 1}')
    assert "line 2: 'text' holds a number, not text" in _line(tmp_path, b'{"text": 7}')
    assert "line 2: character 1 is half of a surrogate pair" in _line(tmp_path, b'{"text": "x\\ud800"}')


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.stream.arrow"])
def test_a_wrong_column_name_lists_the_columns(tmp_path: Path, name: str) -> None:
    file = _write(tmp_path / name)
    message = _refusal(file, tmp_path / "out", text_column="body")
    assert f"{file}: no column 'body'; it has id, text" in message
    message = _refusal(file, tmp_path / "out", text_column="id")
    assert "column 'id' holds int64, not text" in message and "(text)" in message


def test_invalid_utf8_in_parquet_names_the_row(tmp_path: Path) -> None:
    values = pa.array([b"fine"] * 150 + [b"ab\xff"], type=pa.binary())
    broken = pa.Array.from_buffers(pa.string(), len(values), values.buffers())
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": broken}), file, row_group_size=100)
    assert f"{file}, row 150: invalid UTF-8 at byte 2" in _refusal(file, tmp_path / "out")


def test_invalid_utf8_in_text_names_the_byte(tmp_path: Path) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes("café".encode("latin-1"))
    assert f"{file}: invalid UTF-8 at byte 3" in _refusal(file, tmp_path / "out")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl", "a.jsonl.gz"])
def test_an_empty_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert f"{tmp_path / name}: the file is empty" in _refusal(tmp_path / name, tmp_path / "out")


def test_a_source_without_files_or_text_is_an_error(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "no such file or folder" in _refusal(tmp_path / "missing.txt", out)
    assert "no file matches this glob" in _refusal(f"{tmp_path}/*.txt", out)
    (tmp_path / "folder").mkdir()
    assert "contains no files" in _refusal(tmp_path / "folder", out)
    assert not out.exists()
    (tmp_path / "empty.txt").touch()
    assert "no text for training" in _refusal(tmp_path / "empty.txt", out)
    write_jsonl(tmp_path / "nulls.jsonl", [None, "", None])
    assert "no text for training" in _refusal(tmp_path / "nulls.jsonl", out)


@pytest.mark.parametrize("path", ["/", "/**/*.txt", "/proc", "/sys/kernel/**"])
def test_the_files_of_the_system_are_no_corpus(path: str) -> None:
    """Some of them can be read without end, and some wait for ever."""
    with pytest.raises(DataError, match="files of the system"):
        find_files(path)


def test_a_wildcard_in_the_first_folder_is_no_walk_over_the_system(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    _, first, *others = tmp_path.parts
    assert find_files("/".join(["", f"{first[:-1]}*", *others, "**", "*.txt"]))[0] == [tmp_path / "a.txt"]


@pytest.mark.parametrize("name", ["a" * 300, "~nobody-at-all/texts", "loop/texts"])
def test_paths_that_no_file_can_have_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    with pytest.raises(DataError):
        find_files(name)


def test_a_folder_that_mixes_text_and_record_files_is_refused(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    _write(corpus / "a.parquet")
    (corpus / "README.md").write_text("about")
    message = _refusal(corpus, tmp_path / "out")
    assert "README.md" in message and f"{corpus}/**/*.parquet" in message


def test_a_file_that_changes_while_it_is_read_is_reported(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    config = DataConfig.model_validate({"path": str(file), "tokenizer": {"vocab_size": 300}})

    def grow(stage: str, done: int, total: int) -> None:
        if stage == "sample" and done < total:
            with file.open("a") as more:
                more.write('{"text": "more"}\n')

    with pytest.raises(DataError, match="changed while it was being read"):
        prepare(config, tmp_path / "out", workers=1, progress=grow)


@pytest.mark.parametrize("name", ["table.xlsx", "tokens.npy", "a.tar", "a.tar.gz", "a.ZIP", "page.pdf"])
def test_unsupported_file_types_are_refused_by_their_suffix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).write_text("text all the same")
    with pytest.raises(DataError, match=name):
        list(read_documents(tmp_path / name, "text"))
    (tmp_path / "a.txt").write_text("text")
    hashed: list[Path] = []
    monkeypatch.setattr(sources, "sha256_of", hashed.append)
    for path in (tmp_path / name, tmp_path, f"{tmp_path}/*"):
        message = _refusal(path, tmp_path / "out")
        assert str(tmp_path / name) in message and "**/*.txt" in message
    assert not hashed and not (tmp_path / "out").exists(), "refused before anything is read or written"


def test_a_text_with_a_zero_byte_is_refused(tmp_path: Path) -> None:
    (tmp_path / "core").write_bytes(b"abc\0def")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("é\0".encode()))
    for name, position in (("core", 3), ("a.txt.gz", 2)):
        message = _refusal(tmp_path / name, tmp_path / "out")
        assert f"{tmp_path / name}: a zero byte (NUL) at byte {position}" in message
