"""Forks of a run: what is shared, what is kept, what is refused, and what is left when a fork is killed."""

import errno
import json
import math
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path

import pytest

from hlat.checkpoint import CheckpointStore, fork_run, verify_checkpoint
from hlat.checkpoint.fork import Fork
from hlat.checkpoint.format.filesystem import Disk
from hlat.checkpoint.protocol.commit import TRASH_PREFIX, rename_into_place
from hlat.config import load_recipe
from hlat.reporting import family_lines, read_overview, report_page
from hlat.runtime.errors import CheckpointError, StorageError
from hlat.runtime.storage.run_folder import KEPT_PREFIX, forks_of, is_kept
from hlat.training.start import run_lock
from tests.support.checkpoint.failing_disks import CountingDisk, FailingDisk, PowerLoss

MORE = ("training.steps=60",)


@pytest.fixture
def trunk(finished: Path, tmp_path: Path) -> Path:
    """A finished run with checkpoints of steps 30 and 40."""
    return Path(shutil.copytree(finished, tmp_path / "trunk"))


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(KEPT_PREFIX))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def used_bytes(*folders: Path) -> int:
    """Bytes of all files, those with several names once."""
    stats = (path.stat() for folder in folders for path in folder.rglob("*") if path.is_file())
    return sum({stat.st_ino: stat.st_size for stat in stats}.values())


def test_ten_decays_of_one_trunk_share_its_state_and_leave_it_as_it_is(trunk: Path, tmp_path: Path) -> None:
    with run_lock(trunk):  # it trains
        before = content(trunk)
        made = [fork_run(f"{trunk}@30", tmp_path / f"decay-{n}", (f"training.steps={40 + n}",)) for n in range(1, 11)]
        assert content(trunk) == before
    step = trunk / "checkpoints/step-00000030"
    folders = [fork.folder for fork in made]
    assert used_bytes(trunk, *folders) < used_bytes(trunk) + 10 * 0.1 * used_bytes(step)
    for number, fork in enumerate(made, 1):
        assert (fork.step, fork.way, fork.parent) == (30, "hard link", trunk)
        assert [(change.path, change.new) for change in fork.changes] == [("training.steps", 40 + number)]
        assert verify_checkpoint(fork.folder / "checkpoints" / step.name) == []
        recipe = load_recipe(fork.folder / "recipe.yaml")
        assert recipe == fork.recipe and recipe.run_dir == fork.folder and recipe.run.name == f"decay-{number}"
        assert recipe.prepared_dir == load_recipe(trunk / "recipe.yaml").prepared_dir
    assert sorted(forks_of(trunk)) == sorted((30, folder) for folder in folders)
    event = json.loads((folders[0] / "events.jsonl").read_text())
    assert event["parent"] == {"folder": str(trunk), "id": (trunk / ".run-id").read_text(), "step": 30}
    ids = {(folder / ".run-id").read_text() for folder in (trunk, *folders)}
    assert len(ids) == 11


def test_the_family_is_shown(trunk: Path, tmp_path: Path) -> None:
    fork = fork_run(str(trunk), tmp_path / "fork", ("training.steps=50",))
    shown, parent = read_overview(fork.folder), read_overview(trunk)
    assert shown.status.state == "forked"
    line = f"forked from {trunk} at step 40, with training.steps: 40 -> 50"
    assert [*family_lines(shown.parent, shown.forks)] == [line]
    assert [*family_lines(parent.parent, parent.forks)] == [f"forks: {fork.folder} at step 40"]
    assert parent.to_dict()["forks"] == [{"step": 40, "folder": str(fork.folder)}]
    assert f"forks: {fork.folder} at step 40" in report_page([trunk])
    assert line.replace(">", "&gt;") in report_page([fork.folder])
    shutil.rmtree(fork.folder)
    assert read_overview(trunk).forks == () and is_kept(trunk / "checkpoints/step-00000040")


class _Marking(Disk):
    """A fork marks a checkpoint while the run removes it, before or after the folder has its new name."""

    def rename(self, source: Path, target: Path) -> None:
        if target.name.startswith(TRASH_PREFIX):
            (source / f"{KEPT_PREFIX}1").touch()
        super().rename(source, target)


def test_rotation_leaves_what_a_fork_was_made_from(trunk: Path, tmp_path: Path) -> None:
    fork_run(f"{trunk}@30", tmp_path / "fork")
    store = CheckpointStore(trunk / "checkpoints", keep_last=1)
    assert store.prune() == [] and store.steps() == [30, 40]


def test_a_step_that_is_saved_again_after_a_rollback_keeps_its_marks(trunk: Path, tmp_path: Path) -> None:
    fork_run(f"{trunk}@30", tmp_path / "fork")
    step, again = trunk / "checkpoints/step-00000030", trunk / "checkpoints/.staging-again"
    shutil.copytree(step, again, ignore=shutil.ignore_patterns(f"{KEPT_PREFIX}*"))
    rename_into_place(Disk(), again, step)
    assert forks_of(trunk) == [(30, tmp_path / "fork")] and verify_checkpoint(step) == []


def test_a_mark_that_comes_while_rotation_removes_the_checkpoint_keeps_it(trunk: Path) -> None:
    CheckpointStore(trunk / "checkpoints", keep_last=1, disk=_Marking()).prune()
    step = trunk / "checkpoints/step-00000030"
    assert verify_checkpoint(step) == []
    step.rename(step.with_name(TRASH_PREFIX + step.name))  # killed between the renames
    assert CheckpointStore(trunk / "checkpoints", keep_last=1).steps() == [30, 40]


class _Other(Disk):
    """Disk on which files have one name, and may share their bytes."""

    def __init__(self, shares: bool) -> None:
        self._shares = shares

    def link(self, source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    def share(self, source: Path, file: FileIO) -> None:
        if not self._shares:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        file.write(source.read_bytes())


@pytest.mark.parametrize(("shares", "way"), [(True, "reference copy"), (False, "copy")])
def test_where_there_are_no_links_bytes_are_shared_or_copied(
    trunk: Path, tmp_path: Path, shares: bool, way: str
) -> None:
    fork = fork_run(f"{trunk}@30", tmp_path / "fork", disk=_Other(shares))
    assert fork.way == way and verify_checkpoint(tmp_path / "fork/checkpoints/step-00000030") == []


@pytest.mark.parametrize("disk", [Disk(), _Other(shares=False)], ids=["links", "copies"])
def test_a_damaged_file_is_no_part_of_a_fork(trunk: Path, tmp_path: Path, disk: Disk) -> None:
    file = trunk / "checkpoints/step-00000030/model__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    # A link reads nothing: a file of its size is compared with its checksum when the fork starts.
    file.write_bytes(data if isinstance(disk, _Other) else data[:-1])
    with pytest.raises(CheckpointError, match=r"model__0_0\.distcp is damaged"):
        fork_run(f"{trunk}@30", tmp_path / "fork", disk=disk)
    assert not [path for path in tmp_path.iterdir() if "fork" in path.name]


class _Dying(CountingDisk):
    """Disk whose process dies before operation number ``at``."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def before(self, number: int, what: str) -> None:
        if number >= self.at:
            raise PowerLoss


@pytest.mark.parametrize("make", [_Dying, pytest.param(FailingDisk, marks=pytest.mark.slow)])
def test_killed_before_any_operation_a_fork_is_whole_or_absent(
    trunk: Path, tmp_path: Path, make: Callable[[int], CountingDisk]
) -> None:
    """A folder left by a killed fork is removed by the next; the parent stays as it is."""
    before, to = content(trunk), tmp_path / "fork"
    whole, at, disk = 0, 0, CountingDisk()
    while at <= len(disk.operations):
        shutil.rmtree(to, ignore_errors=True)
        at += 1
        disk = make(at)
        with suppress(PowerLoss, StorageError):
            fork_run(f"{trunk}@30", to, disk=disk)
        assert content(trunk) == before
        if to.exists():
            whole += 1
            assert verify_checkpoint(to / "checkpoints/step-00000030") == []
            assert load_recipe(to / "recipe.yaml").run_dir == to
    assert at > 30 and 2 <= whole < at / 2, "dead after the rename, and not at all; of a link that fails a copy is made"
    shutil.rmtree(to, ignore_errors=True)
    fork_run(f"{trunk}@30", to)
    assert not [*tmp_path.glob(".fork-*")]


def test_the_rate_is_that_of_the_new_schedule(trunk: Path, tmp_path: Path) -> None:
    """The trunk is a cosine from 3e-3 after 5 steps to a tenth at step 40; wsd at step 31 of 50 is at its peak."""
    fork: Fork = fork_run(f"{trunk}@30", tmp_path / "fork", ("schedule.kind=wsd", "training.steps=50"))
    cosine = 0.5 + 0.5 * math.cos(math.pi * (31 - 5) / (40 - 5))
    assert fork.rates == (pytest.approx(3e-3 * (0.1 + 0.9 * cosine)), 3e-3)


@pytest.mark.parametrize(
    ("run", "overrides", "message"),
    [
        ("trunk@25", MORE, r"has no checkpoint of step 25\. The nearest are 30, 40\."),
        ("trunk@40", (), r"training\.steps: the fork would end at step 40, and begins after step 40"),
        ("trunk", ("model.layers=3", *MORE), r"model\.layers: saved with 2, now 3"),
        ("trunk", ("training.seed=4", "batch.global_batch=4", *MORE), r"batch\.global_batch: .*\n.*training\.seed: "),
        ("trunk", ("precision.mode=bf16", *MORE), r"precision\.mode: .*\n(.*\n)*.*checkpoint\.init_from"),
        ("trunk", ("run.dir=elsewhere", *MORE), r"run\.dir: elsewhere is not .*fork, the folder of the fork"),
        ("trunk/checkpoints/step-00000040", MORE, "is no run folder"),
        ("nothing@40", MORE, "no such folder"),
        ("s3://bucket/trunk@40", MORE, "is in an object store"),
    ],
)
def test_what_no_fork_can_be_made_of_is_refused(
    trunk: Path, tmp_path: Path, run: str, overrides: tuple[str, ...], message: str
) -> None:
    place = run if "://" in run else str(tmp_path / run)
    with pytest.raises(CheckpointError, match=message):
        fork_run(place, tmp_path / "fork", overrides)
    assert not (tmp_path / "fork").exists() and not any(map(is_kept, (trunk / "checkpoints").iterdir()))


def test_a_folder_that_exists_is_refused(trunk: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="exists already"):
        fork_run(str(trunk), trunk, MORE)


def test_a_fork_needs_an_object_store_of_its_own(trunk: Path, tmp_path: Path) -> None:
    url = "checkpoint.remote=s3://bucket/trunk"
    parent = fork_run(str(trunk), tmp_path / "parent", (url, *MORE))
    with pytest.raises(CheckpointError, match="has the parent's checkpoints"):
        fork_run(str(parent.folder), tmp_path / "fork")
    with pytest.raises(CheckpointError, match="s3://bucket/trunk may have it: copy step-00000030 from there"):
        fork_run(f"{parent.folder}@30", tmp_path / "fork")
    fork_run(str(parent.folder), tmp_path / "fork", ("checkpoint.remote=null",))
