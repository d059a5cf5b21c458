"""Law 4 by exhaustion: the protocol is stopped before every single operation on the disk, or that operation fails.

Whatever happens, a restart finds a checkpoint that is whole, verified, and at most one save old, and nothing else.
"""

import errno
import shutil
import threading
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import get_args

import pytest
import torch

from hlat.checkpoint.format import Disk, replicated_chunks
from hlat.checkpoint.protocol import CheckpointStore, verify
from hlat.runtime import StorageError
from tests.support.checkpoint.failing_disks import CountingDisk, FailingDisk, Forgets, PowerLoss, PowerLossDisk
from tests.support.checkpoint.saved_states import assert_is_step, save


def no_damage(folder: Path, problems: list[str]) -> None:
    raise AssertionError(f"{folder}: {problems}")


def open_store(root: Path, disk: Disk | None = None) -> CheckpointStore:
    return CheckpointStore(root, keep_last=2, disk=disk, on_damage=no_damage)


def save_next(root: Path, disk: Disk, tokenizer: Path) -> None:
    """A third checkpoint."""
    save(open_store(root, disk), 3, {"tokenizer/tokenizer.json": tokenizer})


def save_again(root: Path, disk: Disk, tokenizer: Path) -> None:
    """The second checkpoint once more, in the place of the one that is there."""
    save(open_store(root, disk), 2, {"tokenizer/tokenizer.json": tokenizer})


def save_and_prune(root: Path, disk: Disk, tokenizer: Path) -> None:
    """A third checkpoint, then the first is dropped."""
    store = open_store(root, disk)
    save(store, 3)
    store.prune()


SCENARIOS = [save_next, save_again, save_and_prune]
Scenario = Callable[[Path, Disk, Path], None]


@pytest.fixture
def prepared(tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """Makes folders that hold checkpoints 1 and 2, and the file to be saved with the third."""
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text('{"a": 1}')

    store = open_store(tmp_path / "template" / "checkpoints")
    for step in (1, 2):
        save(store, step)

    def make(name: str) -> tuple[Path, Path]:
        shutil.copytree(tmp_path / "template", tmp_path / name)
        (tmp_path / name / "shelter").mkdir()
        return tmp_path / name / "checkpoints", tokenizer

    return make


def count_operations(scenario: Scenario, prepared: Callable[[str], tuple[Path, Path]]) -> list[str]:
    root, tokenizer = prepared("count")
    disk = CountingDisk()
    scenario(root, disk, tokenizer)
    return disk.operations


def assert_is_valid(root: Path) -> int:
    """A restart: the newest checkpoint is whole, at most one save old, and no leftovers are in the folder."""
    store = open_store(root)
    newest = store.newest()
    assert newest is not None and newest.step in (2, 3)
    assert_is_step(newest, newest.step)
    assert {path.name for path in root.iterdir()} <= {f"step-{step:08d}" for step in (1, 2, 3)}
    for folder in root.iterdir():
        assert verify(folder) == [], "older ones too are whole, or do not exist"
    return newest.step


@pytest.mark.parametrize("forgets", get_args(Forgets))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_stopped_before_every_operation(
    scenario: Scenario, forgets: Forgets, prepared: Callable[[str], tuple[Path, Path]]
) -> None:
    operations = count_operations(scenario, prepared)
    found = []
    for at in range(1, len(operations) + 2):
        root, tokenizer = prepared(f"stop-{at}")
        disk = PowerLossDisk(at, root.parent / "shelter", forgets)
        with pytest.raises(PowerLoss):
            scenario(root, disk, tokenizer)
            disk.sync_folder(root.parent)  # one operation more, so that the end comes after the last one too
        found.append(assert_is_valid(root))
        save(open_store(root), 3)  # and the run goes on
        assert assert_is_valid(root) == 3
    if scenario is not save_again:
        assert sorted(found) == found and set(found) == {2, 3}, "before the instant the old one, after it the new one"


@pytest.mark.parametrize(
    ("code", "stays"), [(errno.EIO, False), (errno.ENOSPC, True), (errno.EROFS, True), (errno.EDQUOT, True)]
)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_operation_refused(
    scenario: Scenario, code: int, stays: bool, prepared: Callable[[str], tuple[Path, Path]]
) -> None:
    operations = count_operations(scenario, prepared)
    for at in range(1, len(operations) + 1):
        root, tokenizer = prepared(f"refuse-{at}")
        with pytest.raises(StorageError) as caught:
            scenario(root, FailingDisk(at, code, stays), tokenizer)
        assert str(root) in str(caught.value) and "What would work" in str(caught.value), operations[at - 1]
        assert (root / "step-00000002").exists(), "at once, without a restart"
        assert not list(root.glob(".staging-*")) or "rm" in operations[at - 1] or "unlink" in operations[at - 1]
        assert_is_valid(root)
        save(open_store(root), 3)
        assert assert_is_valid(root) == 3


def lose_power_after_save(root: Path, disk: PowerLossDisk) -> None:
    save(open_store(root, disk), 3)
    disk.at = len(disk.operations) + 1
    with pytest.raises(PowerLoss):
        disk.sync_folder(root.parent)


def test_a_protocol_without_folder_sync_would_be_found(prepared: Callable[[str], tuple[Path, Path]]) -> None:
    """The instrument works: the power loss after ``save`` then takes the new checkpoint away."""

    class NoFolderSync(PowerLossDisk):
        def sync_folder(self, path: Path) -> None:
            if path == root.parent:
                super().sync_folder(path)

    root, _ = prepared("unsynced")
    lose_power_after_save(root, NoFolderSync(10**9, root.parent / "shelter", forgets="everything"))
    assert open_store(root).steps() == [1, 2]


def test_a_protocol_without_file_sync_would_be_found(prepared: Callable[[str], tuple[Path, Path]]) -> None:
    """The instrument works: the power loss after ``save`` then leaves a checkpoint with empty files."""

    class NoFileSync(PowerLossDisk):
        def sync_file(self, file: FileIO) -> None:
            pass

    root, _ = prepared("unsynced")
    lose_power_after_save(root, NoFileSync(10**9, root.parent / "shelter", forgets="everything"))
    assert open_store(root).steps() == [1, 2, 3]
    assert verify(root / "step-00000003")


def test_an_error_in_one_file_stops_the_others(tmp_path: Path) -> None:
    """A full disk is not written to for minutes more: the other files end with the tensor they are at."""

    class OneFileFails(Disk):
        def __init__(self) -> None:
            self.failed = threading.Event()
            self.later_writes = 0

        def write(self, file: FileIO, data: memoryview) -> int:
            if "optimizer" in str(file.name):
                self.failed.set()
                raise OSError(errno.EIO, "broken")
            self.failed.wait(60)
            time.sleep(0.1)  # long enough for the other thread to get from its error to the signal
            self.later_writes += 1
            return super().write(file, data)

    disk = OneFileFails()
    tensors = {f"model.{index}": torch.zeros(100_000) for index in range(50)} | {"optimizer.a": torch.zeros(100_000)}
    with pytest.raises(StorageError, match="broken"):
        CheckpointStore(tmp_path / "checkpoints", 1, disk=disk).save(1, replicated_chunks(tensors), {})
    assert disk.later_writes <= 4, "the rest of one tensor: its header, its bytes, its directory"
    assert list((tmp_path / "checkpoints").iterdir()) == []
