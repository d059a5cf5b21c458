"""A run's folder that is gone, or has another in its place, is told from one that is slow or came back."""

import os
import shutil
from pathlib import Path

import pytest

from hlat.runtime import StateLostError, StorageError
from hlat.runtime.storage import (
    EARLIER_ATTEMPT_ENV,
    ID_NAME,
    LOCK_NAME,
    EarlierAttempt,
    RunFolder,
    hold_run_folder,
    open_run_folder,
    read_run_id,
)


def made(path: Path, number: str = "a1") -> RunFolder:
    path.mkdir(parents=True)
    (path / ID_NAME).write_text(number)
    return RunFolder(path, os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT), number)


def gone(path):
    shutil.rmtree(path)


def renamed(path):
    path.rename(path.with_name("elsewhere"))


def emptied(path):
    """As the mount point of a file system that has been unmounted."""
    shutil.rmtree(path)
    path.mkdir()


def a_file(path):
    shutil.rmtree(path)
    path.write_text("")


def another_run(path):
    shutil.rmtree(path)
    os.close(made(path, "b2").descriptor)


def unlocked(path):
    """A second run would lock the folder too."""
    (path / LOCK_NAME).unlink()


def locked_again(path):
    unlocked(path)
    (path / ID_NAME).write_text("b2")
    (path / LOCK_NAME).touch()


@pytest.mark.parametrize("lose", [gone, renamed, emptied, a_file, another_run, locked_again])
def test_what_is_no_longer_the_folder_of_the_run_is_lost(tmp_path, lose):
    folder = made(tmp_path / "run")
    folder.check()
    lose(folder.path)
    with pytest.raises(StateLostError, match=r"run: the folder of this run is gone.*run the same command"):
        folder.check()


@pytest.mark.parametrize("come_back", ["copied", "unlocked"])
def test_a_folder_without_the_lock_that_is_held_is_no_place_to_write_but_the_run_is_not_lost(tmp_path, come_back):
    """Another attempt locks it, and goes on."""
    folder = made(tmp_path / "run")
    if come_back == "copied":
        shutil.copytree(folder.path, tmp_path / "copy")
        shutil.rmtree(folder.path)
        (tmp_path / "copy").rename(folder.path)
    else:
        unlocked(folder.path)
    with pytest.raises(StorageError, match="mounted anew or copied") as error:
        folder.check()
    assert error.value.retryable
    open_run_folder(folder.path, EarlierAttempt(40, "a1"))


def test_a_disk_that_does_not_answer_loses_nothing(tmp_path, monkeypatch):
    """It is away for a while: whoever writes hears that, and tries again."""
    folder = made(tmp_path / "run")

    def refuse(path: Path) -> os.stat_result:
        raise OSError(107, "Transport endpoint is not connected", str(path))

    monkeypatch.setattr(os, "stat", refuse)
    folder.check()


def test_a_first_attempt_makes_the_folder_and_a_later_one_never(tmp_path):
    path = tmp_path / "runs" / "mine"
    open_run_folder(path)
    assert path.is_dir() and read_run_id(path) is None
    open_run_folder(path, EarlierAttempt(0, ""))  # which ended before the folder had a number
    shutil.rmtree(tmp_path / "runs")
    with pytest.raises(StateLostError, match="no new run is begun"):
        open_run_folder(path, EarlierAttempt(0, "a1"))
    assert not (tmp_path / "runs").exists()


def test_a_disk_that_does_not_answer_the_next_attempt_may_answer_the_one_after(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / ID_NAME).mkdir()  # reading it is an error that is not "there is none"
    with pytest.raises(StorageError, match="cannot be read: Is a directory") as error:
        open_run_folder(path, EarlierAttempt(0, "a1"))
    assert error.value.retryable


@pytest.mark.parametrize("left", [EarlierAttempt(400, "a1"), EarlierAttempt(0, "")])
def test_what_an_attempt_left_is_read_by_the_next(left):
    assert EarlierAttempt.read({EARLIER_ATTEMPT_ENV: left.variable()}) == left
    assert EarlierAttempt.read({}) is None


def test_a_rank_that_does_not_see_the_folder_says_so(tmp_path):
    with (
        pytest.raises(StorageError, match=r"rank 3 on .* does not see .* all machines of the run share"),
        hold_run_folder(tmp_path / "run", None, 3),
    ):
        pass


def test_a_lock_that_was_waited_for_while_the_folder_went_is_noticed(tmp_path):
    folder = made(tmp_path / "run")
    gone(folder.path)
    with pytest.raises(StateLostError), hold_run_folder(folder.path, folder.descriptor, 0):
        pass
