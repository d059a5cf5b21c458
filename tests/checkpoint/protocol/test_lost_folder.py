"""A save whose run's folder goes away, at whatever instant, writes nothing into the folder left in its place."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from hlat.checkpoint.format import Disk, replicated_chunks
from hlat.checkpoint.protocol import CheckpointContent, CheckpointStore, SaveResult, save_with_retries
from hlat.runtime import StateLostError, StorageError
from hlat.runtime.distributed import HostGroup
from hlat.runtime.storage import LOCK_NAME, RunFolder
from tests.support.checkpoint.failing_disks import CountingDisk
from tests.support.checkpoint.saved_states import state
from tests.support.checkpoint.saving_ranks import Rank, assert_succeeded, run_ranks
from tests.support.checkpoint.thread_ranks import results_of, run_on_ranks

WORLD = 3


@contextmanager
def held(run: Path) -> Iterator[RunFolder]:
    descriptor = os.open(run / LOCK_NAME, os.O_RDWR | os.O_CREAT)
    try:
        yield RunFolder(run, descriptor, "a1")
    finally:
        os.close(descriptor)


def unmount(run: Path) -> None:
    """Leave an empty folder, as a mount point is."""
    run.rename(run.with_name("unmounted"))
    run.mkdir()


class Unmounting(CountingDisk):
    """A disk that goes away before one of its operations."""

    def __init__(self, run: Path, at: int) -> None:
        super().__init__()
        self._run, self._at = run, at

    def before(self, number: int, what: str) -> None:
        if number == self._at:
            unmount(self._run)


def content(step: int) -> CheckpointContent:
    files = {"tokenizer/tokenizer.json": Path(__file__)}
    return CheckpointContent(step, replicated_chunks(state(step)), {"step": step}, files)


def operations(tmp_path: Path) -> int:
    """Of opening a store and saving twice."""
    run = tmp_path / "counted"
    run.mkdir()
    disk = CountingDisk()
    with held(run) as folder:
        _train(disk, run, folder)
    return len(disk.operations)


def _train(disk: Disk, run: Path, folder: RunFolder) -> None:
    store = CheckpointStore(run / "checkpoints", 1, disk=disk, folder=folder)
    for step in (1, 2):
        one = content(step)
        store.save(step, one.chunks, one.meta, one.files)
        store.prune()


def test_whenever_it_goes_nothing_is_made_in_its_place(tmp_path: Path) -> None:
    count = operations(tmp_path)
    assert count > 40
    for at in range(1, count + 1):
        run = tmp_path / f"{at}" / "run"
        run.mkdir(parents=True)
        with held(run) as folder, pytest.raises(StorageError):
            _train(Unmounting(run, at), run, folder)
        assert not any(run.iterdir()), (at, sorted(run.rglob("*")))


def test_every_rank_is_told_and_none_tries_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()

    def never(seconds: float) -> bool:
        raise AssertionError("what is lost is not there a second later")

    def work(ranks: HostGroup) -> SaveResult:
        with held(run) as folder:
            store = CheckpointStore(run / "checkpoints", 9, ranks=ranks, folder=folder)
            ranks.run_on_rank0(lambda: unmount(run))
            with pytest.raises(StateLostError, match="the folder of this run is gone"):
                ranks.run_on_all(folder.check)
            return save_with_retries(store, content(1), 3, pytest.fail, never)

    for result in results_of(run_on_ranks(WORLD, work)):
        assert result.path is None and result.attempts == 1 and "the folder of this run is gone" in result.message
    assert not any(run.iterdir())


def lose_it_before_a_save(rank: Rank, pipe: Connection) -> None:
    rank.submit(1)
    assert rank.wait() is not None
    rank.runtime.ranks.run_on_rank0(lambda: unmount(rank.folder))
    rank.submit(2)
    outcome = rank.saver.agree_on_outcome() if list(rank.saver.reports(wait=True)) else None
    assert outcome is not None and outcome.result is not None and outcome.result.path is None
    assert "the folder of this run is gone" in outcome.result.message


@pytest.mark.parametrize("world", [1, 2])
def test_processes_that_save_beside_training_see_it_too(tmp_path: Path, world: int) -> None:
    """Before their trainers do, or after."""
    run = tmp_path / "run"
    run.mkdir()
    with run_ranks(world, lose_it_before_a_save, run) as (members, _):
        assert_succeeded(members)
    assert not any(run.iterdir())
    assert (tmp_path / "unmounted" / "checkpoints" / "step-00000001").is_dir()
