"""If the run folder disappears at any time during a save, nothing is written to the folder left in its place."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from hlat.checkpoint.format.filesystem import Disk
from hlat.checkpoint.format.tensor_files import replicated_chunks
from hlat.checkpoint.protocol.commit import CheckpointContent
from hlat.checkpoint.protocol.store import CheckpointStore, SaveResult, save_with_retries
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.errors import StateLostError, StorageError
from hlat.runtime.storage.run_folder import LOCK_NAME, RunFolder
from tests.support.checkpoint.failing_disks import CountingDisk
from tests.support.checkpoint.saved_states import state
from tests.support.checkpoint.saving_ranks import Rank, assert_succeeded, run_ranks
from tests.support.checkpoint.thread_ranks import results_of, run_on_ranks

WORLD = 3


@contextmanager
def lock_run_folder(run: Path) -> Iterator[RunFolder]:
    descriptor = os.open(run / LOCK_NAME, os.O_RDWR | os.O_CREAT)
    try:
        yield RunFolder(run, descriptor, "a1")
    finally:
        os.close(descriptor)


def unmount(run: Path) -> None:
    """Move the run folder away and leave an empty folder, like an unmounted mount point."""
    run.rename(run.with_name("unmounted"))
    run.mkdir()


class UnmountingDisk(CountingDisk):
    """Disk that disappears before one of its operations."""

    def __init__(self, run: Path, at: int) -> None:
        super().__init__()
        self._run, self._at = run, at

    def before(self, number: int, what: str) -> None:
        if number == self._at:
            unmount(self._run)


def content(step: int) -> CheckpointContent:
    files = {"tokenizer/tokenizer.json": Path(__file__)}
    return CheckpointContent(step, replicated_chunks(state(step)), {"step": step}, files)


def count_operations(tmp_path: Path) -> int:
    """Count the operations of opening a store and saving twice."""
    run = tmp_path / "counted"
    run.mkdir()
    disk = CountingDisk()
    with lock_run_folder(run) as folder:
        _train(disk, run, folder)
    return len(disk.operations)


def _train(disk: Disk, run: Path, folder: RunFolder) -> None:
    store = CheckpointStore(run / "checkpoints", 1, disk=disk, folder=folder)
    for step in (1, 2):
        saved = content(step)
        store.save(step, saved.chunks, saved.meta, saved.files)
        store.prune()


def test_nothing_is_created_in_place_of_a_lost_run_folder(tmp_path: Path) -> None:
    count = count_operations(tmp_path)
    assert count > 40
    for at in range(1, count + 1):
        run = tmp_path / f"{at}" / "run"
        run.mkdir(parents=True)
        with lock_run_folder(run) as folder, pytest.raises(StorageError):
            _train(UnmountingDisk(run, at), run, folder)
        assert not any(run.iterdir()), (at, sorted(run.rglob("*")))


def test_a_lost_run_folder_is_reported_on_all_ranks_without_retry(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()

    def never(seconds: float) -> bool:
        raise AssertionError("a lost folder does not return after a pause")

    def work(ranks: HostGroup) -> SaveResult:
        with lock_run_folder(run) as folder:
            store = CheckpointStore(run / "checkpoints", 9, ranks=ranks, folder=folder)
            ranks.run_on_rank0(lambda: unmount(run))
            with pytest.raises(StateLostError, match="the folder of this run is gone"):
                ranks.run_on_all(folder.check)
            return save_with_retries(store, content(1), 3, pytest.fail, never)

    for result in results_of(run_on_ranks(WORLD, work)):
        assert result.path is None and result.attempts == 1 and "the folder of this run is gone" in result.message
    assert not any(run.iterdir())


def lose_the_folder_before_a_save(rank: Rank, pipe: Connection) -> None:
    rank.submit(1)
    assert rank.wait() is not None
    rank.runtime.ranks.run_on_rank0(lambda: unmount(rank.folder))
    rank.submit(2)
    outcome = rank.saver.agree_on_outcome() if list(rank.saver.reports(wait=True)) else None
    assert outcome is not None and outcome.result is not None and outcome.result.path is None
    assert "the folder of this run is gone" in outcome.result.message


@pytest.mark.parametrize("world", [1, 2])
def test_saver_processes_report_a_lost_run_folder(tmp_path: Path, world: int) -> None:
    """On one rank and on several."""
    run = tmp_path / "run"
    run.mkdir()
    with run_ranks(world, lose_the_folder_before_a_save, run) as (members, _):
        assert_succeeded(members)
    assert not any(run.iterdir())
    assert (tmp_path / "unmounted" / "checkpoints" / "step-00000001").is_dir()
