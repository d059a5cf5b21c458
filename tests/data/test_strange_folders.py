"""Folders and globs with links, names and numbers that are not as they seem: all files found, or the reason said."""

import glob
import gzip
import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from hlat.config.sections.data import DataConfig
from hlat.data.corpus_files import list_files
from hlat.data.source_listing import SourceNotFoundError, doubts, find_files, first_bytes
from hlat.runtime.errors import DataError
from tests.data.test_strange_files import DOCS, HTML, LFS, LINES
from tests.support.data.reading_sources import read_source, verdict


def _folder(path: Path) -> Path:
    path.mkdir()
    (path / "a.jsonl").write_bytes(LINES)
    return path


def _dangling(folder: Path) -> None:
    (folder / "b.jsonl").symlink_to("gone/b.jsonl")


def _loop(folder: Path) -> None:
    (folder / "b.jsonl").symlink_to("b.jsonl")


def _dangling_folder(folder: Path) -> None:
    (folder / "part2").symlink_to("unmounted/part2")


def _latin_name(folder: Path) -> None:
    Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.jsonl")).write_bytes(LINES)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_dangling, "b.jsonl: a link to gone/b.jsonl, which does not exist"),
        (_loop, "b.jsonl: a link to b.jsonl"),
        (_dangling_folder, "part2: a link to unmounted/part2"),
        (_latin_name, "caf\\xe9.jsonl: its name is not UTF-8"),
    ],
)
def test_a_file_that_is_not_there_is_not_left_out(tmp_path: Path, spoil: Callable[[Path], None], said: str) -> None:
    folder = _folder(tmp_path / "corpus")
    spoil(folder)
    for source in (folder, f"{folder}/**/*.jsonl"):
        message = verdict(source, tmp_path)
        assert isinstance(message, str) and said in message


@pytest.mark.parametrize(
    ("link", "pattern"),
    [("a/text", "*/text/*.jsonl"), ("2024.05", "*/*.jsonl"), ("v1.0", "**/*.jsonl"), ("a/text.d", "**/text.d/*.jsonl")],
)
def test_a_link_to_no_folder_that_a_glob_crosses_is_named(tmp_path: Path, link: str, pattern: str) -> None:
    for folder in (tmp_path / "c" / "b", tmp_path / "c" / "a", tmp_path / "c" / "b" / "text"):
        folder.mkdir(parents=True)
        (folder / "a.jsonl").write_bytes(LINES)
    (tmp_path / "c" / "notes.txt").symlink_to("gone")
    (tmp_path / "c" / link).symlink_to("gone")
    with pytest.raises(DataError, match=f"{link}: a link to gone, which does not exist"):
        read_source(f"{tmp_path}/c/{pattern}", tmp_path)


def test_folders_of_the_system_and_hidden_ones_are_no_part_of_a_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, closed = _folder(tmp_path / "corpus"), ["lost+found", "System Volume Information", ".Trash-1000", ".store"]
    for name in (*closed, "part2"):
        (folder / name).mkdir()
    (folder / ".store" / "b.jsonl").write_bytes(LINES)
    (folder / "linked").symlink_to(folder / ".store")
    scan, access = os.scandir, os.access

    def deny(path: str) -> None:  # root may list everything
        if Path(path).name in closed[:3]:
            raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", lambda path: (deny(path), scan(path))[1])
    monkeypatch.setattr(os, "access", lambda path, *a, **k: Path(path).name not in closed and access(path, *a, **k))
    for source in (folder, f"{folder}/**/*.jsonl"):
        assert read_source(source, tmp_path) == DOCS * 2
    assert read_source(f"{folder}/*/*.jsonl", tmp_path) == DOCS
    closed[0] = "part2"
    for source in (folder, f"{folder}/**/*.jsonl", f"{folder}/*/*.jsonl"):
        with pytest.raises(DataError, match="part2: the folder cannot be listed: Permission denied"):
            read_source(source, tmp_path)


PATTERNS = (
    *("**", "**/*", "**/a*", "**/a**.x", "*/**/a.x", "**/.d/*", "**/.*", ".d/**", "**/.d/**/*.x", "**/[ab]/**/*"),
    *(
        "**/*/a.x",
        "**/**/b.x",
        "b/**/b/**",
        "**/[.]d/*",
        "**/[!a]*",
        "a/**/../*.x",
        "**/?.x",
        "**x",
        "[a]/*",
        "**/[*].x",
    ),
)


def test_globs_match_what_pythons_glob_matches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(0)
    for _ in range(150):
        folder = tmp_path.joinpath(*random.choices(["a", "b", ".d", "[a]", "x.y"], k=random.randrange(4)))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / random.choice(["a.x", "b.x", ".h.x", "*.x", "a.y", "file"])).touch()
    monkeypatch.chdir(tmp_path)
    for root in ("", f"{glob.escape(str(tmp_path))}/", "./a/"):
        for pattern in PATTERNS:
            names = glob.glob(f"{root}{pattern}", recursive=True)  # noqa: PTH207 - the witness
            expected = sorted({Path(name) for name in names if Path(name).is_file()})
            try:
                assert find_files(f"{root}{pattern}") == (expected, []), pattern
            except SourceNotFoundError:
                assert not expected, pattern


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    folder, elsewhere = _folder(tmp_path / "corpus"), _folder(tmp_path / "elsewhere")
    (folder / "part2").symlink_to(elsewhere)
    (folder / "again").symlink_to(elsewhere)
    (folder / "loop").symlink_to(folder)
    (folder / "around").symlink_to(tmp_path)
    (tmp_path / "beside.jsonl").write_bytes(b'{"text": "no part of the corpus"}\n')
    (elsewhere / "back").symlink_to(folder)
    assert read_source(folder, tmp_path) == DOCS * 2
    (folder / "around").unlink()
    assert read_source(f"{folder}/**/*.jsonl", tmp_path) == DOCS * 2


def test_findings_are_one_short_table(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_bytes(LFS)
    for name, content in {
        "a.txt": HTML,
        "b.txt": bytes(9),
        "c.txt": LINES,
        "d.txt": b"%PDF-1.4\n",
        "e.txt": b"\xff",
    }.items():
        (tmp_path / name).write_bytes(content)
    message = verdict(tmp_path, tmp_path)
    assert isinstance(message, str)
    first, *rows = message.splitlines()
    assert first == "the corpus: 44 of its files cannot be used:"
    assert rows[0].startswith(f"  {tmp_path}/00.txt and 39 more: this is a Git LFS pointer")
    assert len(rows) == 4 and rows[-1] == "  and 2 files with 2 other problems"


def test_first_bytes_are_read_in_one_go_and_told_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(100):
        (tmp_path / f"{number:02}.txt").write_bytes(LFS if number % 3 else b"text")
        (tmp_path / f"{number:02}.txt.gz").write_bytes(gzip.compress(b"text"))
    files = list_files(DataConfig.model_validate({"path": str(tmp_path)}), tmp_path)
    opened, path_open = list[Path](), Path.open
    monkeypatch.setattr(Path, "open", lambda path, *a: (opened.append(path), path_open(path, *a))[1])
    found = [Path(finding.path).name for finding in first_bytes(files, 0)]
    assert found == [f"{number:02}.txt" for number in range(100) if number % 3]
    assert sorted(opened) == [Path(file.path) for file in files]


def test_files_that_seem_absent_or_are_named_twice_are_told(tmp_path: Path) -> None:
    for number in (0, 1, 3):
        (tmp_path / f"train-{number:05}-of-00004.jsonl").write_bytes(LINES)
    config = DataConfig.model_validate({"sources": [{"path": str(tmp_path)}, {"path": f"{tmp_path}/*-00003-*"}]})
    absent, twice = doubts(list_files(config, tmp_path))
    assert absent.startswith("1 file of 4 absent, by names like ") and "train-00000-of-00004.jsonl" in absent
    assert twice == f"{tmp_path}/train-00003-of-00004.jsonl: named more than once, and read as often."


@pytest.mark.parametrize(
    ("names", "absent"),
    [
        (["train-00000-of-00002-6b3f0e1a2c4d5e6f.jsonl", "train-00001-of-00002-0f1e2d3c4b5a6978.jsonl"], ""),
        (["train-00001-of-00002-0f1e2d3c4b5a6978.jsonl"], "1 file of 2"),
        (["c4-train.00000-of-01024.jsonl", "c4-train.00007-of-01024.jsonl"], "1,022 files of 1,024"),
        (["a_0000-of-0002.jsonl", "b-000001-of-000002.jsonl"], "1 file of 2"),
        (["a-00000-of-00001.jsonl", "a-00000-of-00001-of-many.jsonl", "2-of-3.jsonl"], ""),
    ],
)
def test_names_say_how_many_files_there_were(tmp_path: Path, names: list[str], absent: str) -> None:
    for name in names:
        (tmp_path / name).write_bytes(LINES)
    found = doubts(list_files(DataConfig.model_validate({"path": str(tmp_path)}), tmp_path))
    assert (all(each.startswith(f"{absent} absent, ") for each in found) and found) if absent else not found
