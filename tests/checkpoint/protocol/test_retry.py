"""A failed save is retried after pauses that double, up to a limit. The clock is simulated."""

import errno
from pathlib import Path

import pytest

from hlat.checkpoint.format.tensor_files import replicated_chunks
from hlat.checkpoint.protocol.commit import CheckpointContent
from hlat.checkpoint.protocol.store import CheckpointStore, FailedAttempt, SaveResult, save_with_retries
from hlat.runtime.distributed.host_collectives import HostGroup
from tests.support.checkpoint.failing_disks import CountingDisk
from tests.support.checkpoint.saved_states import assert_is_step, save, state
from tests.support.checkpoint.thread_ranks import results_of, run_on_ranks


class FirstOperationFails(CountingDisk):
    """Disk on which the first operation of some saves fails, and removals of old checkpoints if ``keeps`` is set."""

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


class Recorder:
    """Recorder of failed attempts and pauses."""

    def __init__(self, ends_after: int = 99) -> None:
        self.failures: list[FailedAttempt] = []
        self.pauses: list[float] = []
        self._ends_after, self._now = ends_after, 0.0

    def pause(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        self._now += seconds
        return len(self.pauses) < self._ends_after

    def save(self, store: CheckpointStore, step: int, retries: int) -> SaveResult:
        return save_with_retries(store, content(step), retries, self.failures.append, self.pause, lambda: self._now)


@pytest.mark.parametrize("failed", range(6))
def test_a_failed_save_is_retried_after_1_2_4_seconds(tmp_path: Path, failed: int) -> None:
    store, recorder = CheckpointStore(tmp_path, 3, disk=FirstOperationFails(failed)), Recorder()
    result = recorder.save(store, 4, retries=3)
    attempts = min(failed + 1, 4)
    assert recorder.pauses == [1, 2, 4][: attempts - 1] and result.seconds == sum(recorder.pauses)
    assert [failure.attempts for failure in recorder.failures] == list(range(1, attempts))
    assert all(failure.step == 4 and "No space left" in failure.message for failure in recorder.failures)
    assert (result.step, result.attempts) == (4, attempts)
    if failed < 4:
        assert result.path == tmp_path / "step-00000004" and result.message == ""
        assert_is_step(store.newest(), 4)
    else:
        assert result.path is None and "No space left" in result.message and not any(tmp_path.iterdir())


def test_retries_end_when_pause_returns_false(tmp_path: Path) -> None:
    store, recorder = CheckpointStore(tmp_path, 3, disk=FirstOperationFails(9)), Recorder(ends_after=2)
    result = recorder.save(store, 4, retries=9)
    assert result.path is None and result.attempts == 2 and recorder.pauses == [1, 2]


def test_a_failed_removal_of_old_checkpoints_is_no_failure_of_the_save(tmp_path: Path) -> None:
    store, recorder = CheckpointStore(tmp_path, 1, disk=FirstOperationFails(0, keeps=True)), Recorder()
    save(store, 1)
    result = recorder.save(store, 2, retries=3)
    assert result.path == tmp_path / "step-00000002" and result.attempts == 1 and recorder.pauses == []
    assert "cannot remove an old checkpoint" in result.message and store.steps() == [1, 2]


def test_all_ranks_retry_alike(tmp_path: Path) -> None:
    """If the disk of rank 1 fails, all ranks retry equally often."""

    def work(ranks: HostGroup) -> tuple[SaveResult, list[float]]:
        disk = FirstOperationFails(9 if ranks.rank == 1 else 0)
        disk.before = lambda number, what: fail_fsync(disk, what)  # type: ignore[method-assign]
        store, recorder = CheckpointStore(tmp_path, 3, disk=disk, ranks=ranks), Recorder()
        disk.saves = 2 if ranks.rank == 1 else 0
        return recorder.save(store, 4, retries=3), recorder.pauses

    def fail_fsync(disk: FirstOperationFails, what: str) -> None:
        if what.startswith("fsync folder .staging-step") and disk.saves > 0:
            disk.saves -= 1
            raise OSError(errno.ENOSPC, "No space left on device", what)

    results = results_of(run_on_ranks(3, work))
    assert [pauses for _, pauses in results] == [[1, 2]] * 3
    assert {result for result, _ in results} == {results[0][0]} and results[0][0].attempts == 3
    assert_is_step(CheckpointStore(tmp_path, 3).newest(), 4)
