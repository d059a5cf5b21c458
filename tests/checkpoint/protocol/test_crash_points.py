"""Law 4, exhaustively: the protocol is stopped before every single operation on the disk, or that operation fails.

In every case, a restart finds a valid checkpoint that is at most one save old, and no other files.
"""

import errno
import shutil
import threading
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from hlat.checkpoint.format import tensor_files
from hlat.checkpoint.format.filesystem import Disk
from hlat.checkpoint.format.tensor_files import replicated_chunks
from hlat.checkpoint.protocol.reader import verify_checkpoint
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.runtime.errors import StorageError
from tests.support.checkpoint.failing_disks import CountingDisk, FailingDisk, Forgets, PowerLoss, PowerLossDisk
from tests.support.checkpoint.saved_states import assert_is_step, save


def no_damage(folder: Path, problems: list[str]) -> None:
    raise AssertionError(f"{folder}: {problems}")


def open_store(root: Path, disk: Disk | None = None) -> CheckpointStore:
    return CheckpointStore(root, keep_last=2, disk=disk, on_damage=no_damage)


def save_step_3(root: Path, disk: Disk, tokenizer: Path) -> None:
    """Save a third checkpoint."""
    save(open_store(root, disk), 3, {"tokenizer/tokenizer.json": tokenizer})


def save_step_2_again(root: Path, disk: Disk, tokenizer: Path) -> None:
    """Save the second checkpoint again, replacing the existing one."""
    save(open_store(root, disk), 2, {"tokenizer/tokenizer.json": tokenizer})


def save_step_3_and_prune(root: Path, disk: Disk, tokenizer: Path) -> None:
    """Save a third checkpoint, then remove the first."""
    store = open_store(root, disk)
    save(store, 3)
    store.prune()


# The third begins with the operations of the first, which the slow suite runs alone.
SCENARIOS = [pytest.param(save_step_3, marks=pytest.mark.slow), save_step_2_again, save_step_3_and_prune]
Scenario = Callable[[Path, Disk, Path], None]


@pytest.fixture
def make_folders(tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """Function that makes a folder with checkpoints 1 and 2, and the file to be saved with the third."""
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


def count_operations(scenario: Scenario, make_folders: Callable[[str], tuple[Path, Path]]) -> list[str]:
    root, tokenizer = make_folders("count")
    disk = CountingDisk()
    scenario(root, disk, tokenizer)
    return disk.operations


def assert_is_valid(root: Path) -> int:
    """Restart: check that the newest checkpoint is valid, at most one save old, and that there are no leftovers."""
    store = open_store(root)
    newest = store.newest()
    assert newest is not None and newest.step in (2, 3)
    assert_is_step(newest, newest.step)
    assert {path.name for path in root.iterdir()} <= {f"step-{step:08d}" for step in (1, 2, 3)}
    for folder in root.iterdir():
        assert verify_checkpoint(folder) == [], "older checkpoints are valid too, or do not exist"
    return newest.step


@pytest.mark.parametrize("forgets", get_args(Forgets))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_crash_before_any_operation_leaves_valid_checkpoints_only(
    scenario: Scenario, forgets: Forgets, make_folders: Callable[[str], tuple[Path, Path]]
) -> None:
    operations = count_operations(scenario, make_folders)
    found = []
    for at in range(1, len(operations) + 2):
        root, tokenizer = make_folders(f"stop-{at}")
        disk = PowerLossDisk(at, root.parent / "shelter", forgets)
        with pytest.raises(PowerLoss):
            scenario(root, disk, tokenizer)
            disk.sync_folder(root.parent)  # one more operation, so that the crash also happens after the last one
        found.append(assert_is_valid(root))
        save(open_store(root), 3)  # the run continues
        assert assert_is_valid(root) == 3
    if scenario is not save_step_2_again:
        assert sorted(found) == found and set(found) == {2, 3}, (
            "before the commit point the old checkpoint, after it the new one"
        )


@pytest.mark.parametrize(
    ("code", "stays"),
    [
        (errno.EIO, False),
        (errno.ENOSPC, True),
        pytest.param(errno.EROFS, True, marks=pytest.mark.slow),
        pytest.param(errno.EDQUOT, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_failure_of_any_operation_leaves_valid_checkpoints_only(
    scenario: Scenario, code: int, stays: bool, make_folders: Callable[[str], tuple[Path, Path]]
) -> None:
    operations = count_operations(scenario, make_folders)
    for at in range(1, len(operations) + 1):
        root, tokenizer = make_folders(f"refuse-{at}")
        with pytest.raises(StorageError) as caught:
            scenario(root, FailingDisk(at, code, stays), tokenizer)
        assert str(root) in str(caught.value) and "What would work" in str(caught.value), operations[at - 1]
        assert (root / "step-00000002").exists(), "it exists even without a restart"
        assert not list(root.glob(".staging-*")) or "rm" in operations[at - 1] or "unlink" in operations[at - 1]
        assert_is_valid(root)
        save(open_store(root), 3)
        assert assert_is_valid(root) == 3


def lose_power_after_save(root: Path, disk: PowerLossDisk) -> None:
    save(open_store(root, disk), 3)
    disk.at = len(disk.operations) + 1
    with pytest.raises(PowerLoss):
        disk.sync_folder(root.parent)


def test_a_protocol_without_folder_sync_would_fail(make_folders: Callable[[str], tuple[Path, Path]]) -> None:
    """Check of the test itself: a power loss after ``save`` then removes the new checkpoint."""

    class NoFolderSync(PowerLossDisk):
        def sync_folder(self, path: Path) -> None:
            if path == root.parent:
                super().sync_folder(path)

    root, _ = make_folders("unsynced")
    lose_power_after_save(root, NoFolderSync(10**9, root.parent / "shelter", forgets="everything"))
    assert open_store(root).steps() == [1, 2]


def test_a_protocol_without_file_sync_would_fail(make_folders: Callable[[str], tuple[Path, Path]]) -> None:
    """Check of the test itself: a power loss after ``save`` then leaves a checkpoint with empty files."""

    class NoFileSync(PowerLossDisk):
        def sync_file(self, file: FileIO) -> None:
            pass

    root, _ = make_folders("unsynced")
    lose_power_after_save(root, NoFileSync(10**9, root.parent / "shelter", forgets="everything"))
    assert open_store(root).steps() == [1, 2, 3]
    assert verify_checkpoint(root / "step-00000003")


def test_an_error_in_one_file_stops_writing_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing stops soon on a full disk: the other files end with the tensor being written."""
    stop = threading.Event()
    monkeypatch.setattr(tensor_files, "threading", SimpleNamespace(Event=lambda: stop))

    class OneFileFails(Disk):
        def __init__(self) -> None:
            self.later_writes = 0

        def write(self, file: FileIO, data: memoryview) -> int:
            if "optimizer" in str(file.name):
                raise OSError(errno.EIO, "broken")
            assert stop.wait(600), "the thread with the error sets the flag"
            self.later_writes += 1
            return super().write(file, data)

    disk = OneFileFails()
    tensors = {f"model.{index}": torch.zeros(100_000) for index in range(50)} | {"optimizer.a": torch.zeros(100_000)}
    with pytest.raises(StorageError, match="broken"):
        CheckpointStore(tmp_path / "checkpoints", 1, disk=disk).save(1, replicated_chunks(tensors), {})
    assert disk.later_writes <= 4, "the rest of one tensor: zip header, data, zip directory"
    assert list((tmp_path / "checkpoints").iterdir()) == []
