"""A run's folder that is gone or replaced is distinguished from one that is slow or was mounted again."""

import os
import shutil
from pathlib import Path

import pytest

from hlat.runtime.errors import StateLostError, StorageError
from hlat.runtime.storage.run_folder import (
    EARLIER_ATTEMPT_ENV,
    ID_NAME,
    LOCK_NAME,
    EarlierAttempt,
    RunFolder,
    hold_run_folder,
    open_run_folder,
    read_run_id,
)


def make_folder(path: Path, number: str = "a1") -> RunFolder:
    path.mkdir(parents=True)
    (path / ID_NAME).write_text(number)
    return RunFolder(path, os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT), number)


def remove(path):
    shutil.rmtree(path)


def rename(path):
    path.rename(path.with_name("elsewhere"))


def empty(path):
    """Leave an empty folder, as the mount point of an unmounted file system."""
    shutil.rmtree(path)
    path.mkdir()


def replace_by_file(path):
    shutil.rmtree(path)
    path.write_text("")


def replace_by_other_run(path):
    shutil.rmtree(path)
    os.close(make_folder(path, "b2").descriptor)


def unlock(path):
    """Remove the lock file, so that a second run could lock the folder too."""
    (path / LOCK_NAME).unlink()


def replace_lock_and_id(path):
    unlock(path)
    (path / ID_NAME).write_text("b2")
    (path / LOCK_NAME).touch()


@pytest.mark.parametrize("lose", [remove, rename, empty, replace_by_file, replace_by_other_run, replace_lock_and_id])
def test_a_lost_or_replaced_folder_is_detected(tmp_path, lose):
    folder = make_folder(tmp_path / "run")
    folder.check()
    lose(folder.path)
    with pytest.raises(StateLostError, match=r"run: the folder of this run is gone.*run the same command"):
        folder.check()


@pytest.mark.parametrize("come_back", ["copied", "unlocked"])
def test_a_folder_without_this_runs_lock_is_not_written_but_not_lost(tmp_path, come_back):
    """Another attempt locks the folder, and resumes."""
    folder = make_folder(tmp_path / "run")
    if come_back == "copied":
        shutil.copytree(folder.path, tmp_path / "copy")
        shutil.rmtree(folder.path)
        (tmp_path / "copy").rename(folder.path)
    else:
        unlock(folder.path)
    with pytest.raises(StorageError, match="mounted again or copied") as error:
        folder.check()
    assert error.value.retryable
    open_run_folder(folder.path, EarlierAttempt(40, "a1"))


def test_a_temporary_error_of_the_disk_is_ignored(tmp_path, monkeypatch):
    """A temporary error is ignored: the code that writes reports it, and retries."""
    folder = make_folder(tmp_path / "run")

    def refuse(path: Path) -> os.stat_result:
        raise OSError(107, "Transport endpoint is not connected", str(path))

    monkeypatch.setattr(os, "stat", refuse)
    folder.check()


def test_only_a_first_attempt_creates_the_folder(tmp_path):
    path = tmp_path / "runs" / "mine"
    open_run_folder(path)
    assert path.is_dir() and read_run_id(path) is None
    open_run_folder(path, EarlierAttempt(0, ""))  # an attempt that ended before the folder had an id
    shutil.rmtree(tmp_path / "runs")
    with pytest.raises(StateLostError, match="no new run is begun"):
        open_run_folder(path, EarlierAttempt(0, "a1"))
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_read_is_retryable(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / ID_NAME).mkdir()  # reading it fails with another error than FileNotFoundError
    with pytest.raises(StorageError, match="cannot be read: Is a directory") as error:
        open_run_folder(path, EarlierAttempt(0, "a1"))
    assert error.value.retryable


@pytest.mark.parametrize("left", [EarlierAttempt(400, "a1"), EarlierAttempt(0, "")])
def test_an_attempt_reads_the_variable_of_the_earlier_one(left):
    assert EarlierAttempt.read({EARLIER_ATTEMPT_ENV: left.variable()}) == left
    assert EarlierAttempt.read({}) is None


def test_a_rank_that_does_not_see_the_folder_is_named(tmp_path):
    with (
        pytest.raises(StorageError, match=r"rank 3 on .* does not see .* all machines of the run share"),
        hold_run_folder(tmp_path / "run", None, 3),
    ):
        pass


def test_a_folder_removed_while_waiting_for_the_lock_is_detected(tmp_path):
    folder = make_folder(tmp_path / "run")
    remove(folder.path)
    with pytest.raises(StateLostError), hold_run_folder(folder.path, folder.descriptor, 0):
        pass
