"""A save is tried again, after pauses that double, and given up: a policy, so nobody waits here."""

import errno
from pathlib import Path

import pytest

from hlat.checkpoint.format import replicated_chunks
from hlat.checkpoint.protocol import CheckpointContent, CheckpointStore, FailedAttempt, SaveResult, save_with_retries
from hlat.runtime.distributed import HostGroup
from tests.support.checkpoint.failing_disks import CountingDisk
from tests.support.checkpoint.saved_states import assert_is_step, save, state
from tests.support.checkpoint.thread_ranks import results_of, run_on_ranks


class FailingFsyncDisk(CountingDisk):
    """Refuses the first operation of so many saves, and removals of old checkpoints if asked to."""

    def __init__(self, saves: int, keeps: bool = False) -> None:
        super().__init__()
        self.saves, self.keeps = saves, keeps

    def before(self, number: int, what: str) -> None:
        if what.startswith("mkdir .staging-step-") and self.saves > 0:
            self.saves -= 1
            raise OSError(errno.ENOSPC, "No space left on device", what)
        if self.keeps and ".trash-" in what:
            raise OSError(errno.EIO, "Input/output error", what)


def content(step: int) -> CheckpointContent:
    return CheckpointContent(step, replicated_chunks(state(step)), {"step": step, "text": f"é{step}"}, {})


class Told:
    """What was told, and how long the pauses were."""

    def __init__(self, ends_after: int = 99) -> None:
        self.refusals: list[FailedAttempt] = []
        self.pauses: list[float] = []
        self._ends_after, self._now = ends_after, 0.0

    def pause(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        self._now += seconds
        return len(self.pauses) < self._ends_after

    def save(self, store: CheckpointStore, step: int, retries: int) -> SaveResult:
        return save_with_retries(store, content(step), retries, self.refusals.append, self.pause, lambda: self._now)


@pytest.mark.parametrize("refused", range(6))
def test_tried_again_after_1_2_4_seconds(tmp_path: Path, refused: int) -> None:
    store, told = CheckpointStore(tmp_path, 3, disk=FailingFsyncDisk(refused)), Told()
    result = told.save(store, 4, retries=3)
    tries = min(refused + 1, 4)
    assert told.pauses == [1, 2, 4][: tries - 1] and result.seconds == sum(told.pauses)
    assert [refusal.attempts for refusal in told.refusals] == list(range(1, tries))
    assert all(refusal.step == 4 and "No space left" in refusal.message for refusal in told.refusals)
    assert (result.step, result.attempts) == (4, tries)
    if refused < 4:
        assert result.path == tmp_path / "step-00000004" and result.message == ""
        assert_is_step(store.newest(), 4)
    else:
        assert result.path is None and "No space left" in result.message and not any(tmp_path.iterdir())


def test_not_tried_again_where_nobody_wants_it_any_more(tmp_path: Path) -> None:
    store, told = CheckpointStore(tmp_path, 3, disk=FailingFsyncDisk(9)), Told(ends_after=2)
    result = told.save(store, 4, retries=9)
    assert result.path is None and result.attempts == 2 and told.pauses == [1, 2]


def test_old_ones_that_cannot_be_removed_do_not_make_the_new_one_a_failure(tmp_path: Path) -> None:
    store, told = CheckpointStore(tmp_path, 1, disk=FailingFsyncDisk(0, keeps=True)), Told()
    save(store, 1)
    result = told.save(store, 2, retries=3)
    assert result.path == tmp_path / "step-00000002" and result.attempts == 1 and told.pauses == []
    assert "cannot remove an old checkpoint" in result.message and store.steps() == [1, 2]


def test_the_same_on_every_rank(tmp_path: Path) -> None:
    """The disk of rank 1 refuses: all of them try again, as often."""

    def work(ranks: HostGroup) -> tuple[SaveResult, list[float]]:
        disk = FailingFsyncDisk(9 if ranks.rank == 1 else 0)
        disk.before = lambda number, what: refuse(disk, what)  # type: ignore[method-assign]
        store, told = CheckpointStore(tmp_path, 3, disk=disk, ranks=ranks), Told()
        disk.saves = 2 if ranks.rank == 1 else 0
        return told.save(store, 4, retries=3), told.pauses

    def refuse(disk: FailingFsyncDisk, what: str) -> None:
        if what.startswith("fsync folder .staging-step") and disk.saves > 0:
            disk.saves -= 1
            raise OSError(errno.ENOSPC, "No space left on device", what)

    results = results_of(run_on_ranks(3, work))
    assert [pauses for _, pauses in results] == [[1, 2]] * 3
    assert {result for result, _ in results} == {results[0][0]} and results[0][0].attempts == 3
    assert_is_step(CheckpointStore(tmp_path, 3).newest(), 4)
