"""Partitions prepared separately, also after a kill, merge to what one machine makes; problems are reported at once."""

import os
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest

from hlat.config.sections.data import DataConfig
from hlat.data.prepare.partitions import (
    find_partition_folders,
    merge_partition_folders,
    partition_folder,
    prepare_partition,
    train_tokenizer,
)
from hlat.data.prepare.preparation import prepare
from hlat.data.prepare.work_units import index_file, tokens_file
from hlat.runtime.errors import DataError
from tests.support.data.corpora import documents, tree, write_jsonl
from tests.support.data.preparation_model import BAD
from tests.support.data.preparing import STUCK, finished_units, start, wait, watch_units

pytestmark = pytest.mark.usefixtures("small_units")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """A corpus of three files and about 20 units, with duplicates across the files and unreadable rows."""
    folder = tmp_path_factory.mktemp("dirty")
    (folder / "corpus").mkdir()
    for number in range(3):
        file = write_jsonl(
            folder / "corpus" / f"{number}.jsonl", [*documents(50, 4_500, seed=number), None, *documents(9, 4_500)]
        )
        lines = file.read_bytes().splitlines(keepends=True)
        lines[10:10], lines[40:40] = [BAD[number] + b"\n"], [BAD[3] + b"\n"] * number
        file.write_bytes(b"".join(lines))
    section = {"path": str(folder / "corpus"), "duplicates": "drop", "unreadable_rows": 0.1, "shard_tokens": 60_000}
    section["validation"] = {"fraction": 0.1}
    trained = DataConfig.model_validate(section | {"tokenizer": {"vocab_size": 400, "train_bytes": 100_000}})
    train_tokenizer(trained, folder / "tokenizer")
    return DataConfig.model_validate(section | {"tokenizer": {"path": str(folder / "tokenizer")}})


@pytest.fixture(scope="module")
def whole(config: DataConfig, small_units: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the corpus, prepared by one machine."""
    prepared = prepare(config, tmp_path_factory.mktemp("whole") / "out", workers=2)
    assert prepared.manifest.total("copies") > 15 and prepared.manifest.total("unreadable_rows") == 6
    assert len(prepared.manifest.splits["train"].shards) > 3
    return tree(prepared.dir)


@pytest.fixture(scope="module")
def two(config: DataConfig, small_units: None, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folders of two partitions of the corpus."""
    folder = tmp_path_factory.mktemp("two")
    for number in (1, 2):
        prepare_partition(config, partition_folder(folder / "out", number, 2), number, 2, workers=1)
    return find_partition_folders(folder / "out")


@pytest.mark.parametrize("workers", [1, 3])
def test_same_bytes_for_any_number_of_workers(
    config: DataConfig, whole: dict[str, bytes], tmp_path: Path, workers: int
) -> None:
    prepare(config, tmp_path / "out", workers=workers)
    assert tree(tmp_path / "out") == whole


@pytest.mark.parametrize("parts", [1, 3, 5])
def test_partitions_merge_to_the_same_bytes_as_one_preparation(
    config: DataConfig, whole: dict[str, bytes], tmp_path: Path, parts: int
) -> None:
    """Three files divided into five partitions leave two of them empty."""
    folders = [partition_folder(tmp_path / "out", number, parts) for number in range(1, parts + 1)]
    records = [prepare_partition(config, folder, n, parts, workers=2) for n, folder in enumerate(folders, 1)]
    assert sorted(record.stop - record.first for record in records) == [0] * (parts - 3) + {1: [3]}.get(parts, [1] * 3)
    before = tree(tmp_path)
    assert prepare_partition(config, folders[0], 1, parts) == records[0]
    merge_partition_folders(config, tmp_path / "out", find_partition_folders(tmp_path / "out"))
    assert tree(tmp_path / "out") == whole
    after = tree(tmp_path)
    assert {name: after[name] for name in before} == before, "partitions are only read"
    merge_partition_folders(config, tmp_path / "out", folders)
    assert prepare(config, tmp_path / "out").fingerprint
    assert tree(tmp_path / "out") == whole


@pytest.mark.parametrize("what", ["whole", "part"])
def test_a_killed_preparation_or_partition_resumes_to_the_same_bytes(
    config: DataConfig,
    whole: dict[str, bytes],
    two: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    out = tmp_path / "out"
    part = "from hlat.data.prepare.partitions import prepare_partition\n"
    part += "def prepare(*a, **k): prepare_partition(*a, 2, 2, **k)"
    process = start(config, out, STUCK + (part if what == "part" else ""))
    wait(lambda: len(finished_units(out)) >= 1, process)
    processes = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    psutil.wait_procs(processes, timeout=600)
    done, redone = {int(file.stem) for file in finished_units(out)}, watch_units(monkeypatch)
    if what == "part":
        with pytest.raises(DataError, match="the part is not finished"):
            merge_partition_folders(config, tmp_path / "merged", [two[0], out])
        prepare_partition(config, out, 2, 2, workers=2)
        assert tree(out / "part" / "units") == tree(two[1] / "part" / "units")
    else:
        prepare(config, out, workers=2)
        assert tree(out) == whole
    assert redone and redone.isdisjoint(done)


def test_a_merge_killed_before_any_rename_resumes_to_the_same_bytes(
    config: DataConfig, whole: dict[str, bytes], two: list[Path], tmp_path: Path
) -> None:
    number, out = 0, tmp_path / "out"
    while not (out / "manifest.json").exists():
        child = os.fork()
        if child == 0:
            _die_at_rename(number)
            merge_partition_folders(config, out, two)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
        number += 1
    assert tree(out) == whole and number > 5


def _die_at_rename(number: int) -> None:
    count = 0

    def hook(event: str, _: object) -> None:
        nonlocal count
        if event == "os.rename":
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

    sys.addaudithook(hook)


# --- errors ---------------------------------------------------------------------------------------------------------


def _problems(config: DataConfig, folders: list[Path], out: Path) -> list[str]:
    with pytest.raises(DataError, match=r"^the parts cannot be merged:\n") as caught:
        merge_partition_folders(config, out, folders)
    assert not out.exists()
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def test_all_problems_of_partitions_are_reported_at_once(config: DataConfig, two: list[Path], tmp_path: Path) -> None:
    out, first = tmp_path / "out", two[0]
    (problem,) = _problems(config, [], out)
    assert problem.startswith("no parts were named") and "hlat data prepare --part I/N" in problem
    assert _problems(config, [first, first], out) == ["part 2 of 2 is missing"]
    copy = Path(shutil.copytree(first, tmp_path / "copy"))
    (tmp_path / "empty").mkdir()
    other = config.model_copy(update={"shard_tokens": 50_000})
    prepare_partition(other, tmp_path / "other", 2, 3, workers=1)
    found = _problems(config, [first, copy, tmp_path / "gone", tmp_path / "empty", tmp_path / "other"], out)
    assert found == [
        f"{tmp_path / 'gone'}: no such folder",
        f"{tmp_path / 'empty'}: no part of a corpus",
        f"{tmp_path / 'other'}: data.shard_tokens: prepared with 50000, now 60000",
        f"part 1 of 2 was given 2 times: {first}, {copy}",
        "part 2 of 2 is missing",
        "part 1 of 3 is missing",
        "part 3 of 3 is missing",
        f"the parts are of different divisions of the corpus: {first} is one of 2, {copy} is one of 2, "
        f"{tmp_path / 'other'} is one of 3",
    ]


def test_a_partition_of_another_corpus_is_refused(config: DataConfig, two: list[Path], tmp_path: Path) -> None:
    assert config.path is not None
    corpus = Path(shutil.copytree(config.path, tmp_path / "corpus"))
    moved = config.model_copy(update={"path": str(corpus)})
    prepare_partition(moved, tmp_path / "moved", 2, 2, workers=1)
    merge_partition_folders(config, tmp_path / "merged", [two[0], tmp_path / "moved"])  # the same files at another path
    with (corpus / "0.jsonl").open("a") as more:
        more.write('{"text": "more"}\n')
    prepare_partition(moved, tmp_path / "foreign", 2, 2, workers=1)
    (found,) = _problems(config, [two[0], tmp_path / "foreign"], tmp_path / "out")
    assert found.startswith(f"{tmp_path / 'foreign'}: its corpus differs from that of {two[0]}: file 0 of 3 has ")
    with pytest.raises(
        DataError, match=r"holds a part prepared with other settings or files:\n  the corpus: .*0\.jsonl changed"
    ):
        prepare_partition(moved, tmp_path / "moved", 2, 2)
    with pytest.raises(DataError, match=r"--part: prepared with 2/2, now 1/2"):
        prepare_partition(moved, tmp_path / "moved", 1, 2)


def test_a_finished_partition_is_used_without_its_corpus_as_finished_data_is(
    config: DataConfig, two: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One consequence of what cannot be listed: refused where text is still to be read, told where it is not."""
    link = Path(str(config.path)) / "gone.jsonl"
    link.symlink_to(tmp_path / "nowhere")
    try:
        assert prepare_partition(config, two[0], 1, 2).files
        assert "gone.jsonl: " in caplog.text and "the corpus was not compared" in caplog.text
        same = config.model_copy(update={"path": f"{config.path}/."})
        assert prepare_partition(same, two[0], 1, 2).files, "the same folder, written in another way"
        with pytest.raises(DataError, match=r"gone\.jsonl"):
            prepare_partition(config, tmp_path / "new", 1, 2)
        for other in ({"path": str(tmp_path / "mistyped")}, {"duplicates": "keep"}):
            with pytest.raises(DataError, match=r"mistyped|gone\.jsonl"):
                prepare_partition(config.model_copy(update=other), two[0], 1, 2)
    finally:
        link.unlink()


def test_damaged_partitions_are_named(config: DataConfig, two: list[Path], tmp_path: Path) -> None:
    parts = [Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in two]
    units = [folder / "part" / "units" for folder in parts]
    index_file(units[0], 1).unlink()
    index = index_file(units[1], 0)
    index.write_bytes(index.read_bytes().replace(b"1", b"2", 1))
    found = _problems(config, parts, tmp_path / "out")
    assert len(found) == 2 and "No such file" in found[0] and "have changed since it was finished" in found[1]
    parts = [Path(shutil.copytree(folder, tmp_path / "again" / folder.name)) for folder in two]
    tokens = tokens_file(parts[1] / "part" / "units", 2, "train")
    content = bytearray(tokens.read_bytes())
    content[7] ^= 1
    tokens.write_bytes(content)
    with pytest.raises(DataError, match=f"{tokens}: unfinished preparation is damaged"):
        merge_partition_folders(config, tmp_path / "out", parts)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_unfinished_work_of_another_partition_is_not_resumed(
    config: DataConfig, two: list[Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(two[0], tmp_path / "one"))
    (folder / "part").rename(folder / "partial")
    with pytest.raises(DataError, match=r"finished work of an interrupted.*\n  --part: prepared with 1/2, now 2/2"):
        prepare_partition(config, folder, 2, 2)


def test_partitions_need_a_tokenizer_that_is_trained_first(config: DataConfig, tmp_path: Path) -> None:
    section = {"path": config.path, "unreadable_rows": 0.1, "validation": {"fraction": 0.1}}
    trained = DataConfig.model_validate(section | {"tokenizer": {"vocab_size": 300}})
    with pytest.raises(DataError, match=r"Train it first.*hlat data tokenizer RECIPE --to FOLDER"):
        prepare_partition(trained, tmp_path / "part", 1, 2)
    alone = prepare(trained, tmp_path / "out", workers=1)
    assert train_tokenizer(trained, tmp_path / "tokenizer").sha256 == alone.tokenizer.sha256
    with pytest.raises(DataError, match="exists already"):
        train_tokenizer(trained, tmp_path / "tokenizer")
    with pytest.raises(DataError, match="the recipe gives a tokenizer"):
        train_tokenizer(config, tmp_path / "other")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"^--to .*file is a file, so no data can be put there"):
        train_tokenizer(trained, tmp_path / "file" / "tokenizer")
