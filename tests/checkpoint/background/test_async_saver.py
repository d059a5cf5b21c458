"""Asynchronous saving: the checkpoint has the submitted state, whichever process is killed; there is only one copy."""

import errno
import os
import resource
import signal
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest

from hlat.checkpoint.async_saver import AsyncSaver, SlowStorage
from hlat.checkpoint.format.filesystem import Disk
from hlat.checkpoint.protocol.reader import open_checkpoint
from hlat.checkpoint.protocol.store import FailedAttempt, SaveResult, save_with_retries
from hlat.runtime.helper_process import HelperProcess
from tests.support.checkpoint.saving_ranks import (
    BlockedDisk,
    BlockedTiers,
    HalfwayDisk,
    Rank,
    Script,
    WaitingDisk,
    assert_is_full_state,
    assert_succeeded,
    is_locked,
    reopen,
    run_ranks,
    wait_until,
)

# Two ranks do all that one does, and agree on it; the two longest tests have one in the default suite.
WORLDS = [pytest.param(1, marks=pytest.mark.slow), 2]
ALONE = [1, pytest.param(2, marks=pytest.mark.slow)]
HANG_SECONDS = 600.0  # no busy machine lets a saver wait for so long; clocks are set ahead


def train_during_a_save(rank: Rank, pipe: Connection) -> None:
    """Change the live state several times, while a part of the checkpoint is written, and until all of it is."""
    for step in range(1, 4):
        rank.submit(step)
        later, reports = 100 * step, []
        while not reports:
            later += 1
            rank.train_to(later)
            if later == 100 * step + 3:
                rank.runtime.ranks.barrier()
                (rank.folder / f"go-{step}").touch()
            reports = list(rank.saver.reports(wait=False))
        outcome = rank.saver.agree_on_outcome()
        assert outcome.result is not None and not outcome.lost and outcome.pending is None
        assert outcome.result.path == rank.store.root / f"step-{step:08d}" and outcome.result.attempts == 1
        assert later >= 100 * step + 3, "several steps were trained during the save"


@pytest.mark.parametrize("world", ALONE)
def test_the_checkpoint_has_the_submitted_state_although_training_continues(tmp_path: Path, world: int) -> None:
    with run_ranks(world, train_during_a_save, tmp_path, HalfwayDisk) as (members, _):
        assert_succeeded(members)
    assert reopen(tmp_path).steps() == [1, 2, 3]
    for step in range(1, 4):
        assert_is_full_state(open_checkpoint(tmp_path / "checkpoints" / f"step-{step:08d}"), step)


def save_without_pause(rank: Rank, pipe: Connection) -> None:
    """Each save waits for the one before it, so there is never a second buffer."""
    for step in range(1, 5):
        rank.wait()
        assert rank.store.steps() == list(range(1, step)), "the previous checkpoints are durable"
        rank.submit(step)
        assert len(rank.store.steps()) < step, "this checkpoint cannot be written yet"
        # The saver maps the buffer when it receives the message, which may be later on a busy machine.
        assert count_buffers(os.getpid()) == 1 and count_buffers(rank.process.pid) <= 1
        rank.runtime.ranks.barrier()
        (rank.folder / f"go-{step}").touch()
    rank.wait()
    assert count_buffers(rank.process.pid) == 1
    # Another stage prepares again, and the end of the run closes the saver: neither leaves memory behind.
    rank.saver.prepare(rank.content(4).chunks)
    assert list(rank.saver.reports(wait=False)) == []
    rank.saver.agree_on_outcome()  # the buffer is allocated
    assert count_buffers(os.getpid()) == 1 and count_open_buffers() == 2, "Python's mapping has a descriptor of its own"
    rank.saver.close()
    assert count_buffers(os.getpid()) == count_open_buffers() == 0


def count_open_buffers() -> int:
    """Count the staging buffers of which this process has a descriptor."""
    return sum("memfd:hlat" in os.path.realpath(link) for link in Path("/proc/self/fd").iterdir())


def count_buffers(pid: int) -> int:
    """Count the staging buffers that a process has mapped."""
    return sum("memfd:hlat" in region.path for region in psutil.Process(pid).memory_maps(grouped=False))


@pytest.mark.parametrize("world", ALONE)
def test_a_slow_disk_delays_saves_and_there_is_only_one_buffer(tmp_path: Path, world: int) -> None:
    with run_ranks(world, save_without_pause, tmp_path, HalfwayDisk) as (members, _):
        assert_succeeded(members)
    assert_is_full_state(reopen(tmp_path).newest(), 4)


def submit_and_wait(rank: Rank, pipe: Connection) -> None:
    rank.submit(1)
    signal.pause()


@pytest.mark.parametrize("world", WORLDS)
def test_a_checkpoint_is_completed_after_training_was_killed(tmp_path: Path, world: int) -> None:
    """The run stays locked until the checkpoint is complete."""
    with run_ranks(world, submit_and_wait, tmp_path, BlockedDisk) as (members, _):
        wait_until(lambda: len(list(tmp_path.glob("writing-*"))) == world)
        for member in members:
            member.kill()
            member.join()
        assert is_locked(tmp_path) and not list(tmp_path.glob("checkpoints/step-*"))
        (tmp_path / "go").touch()
        wait_until(lambda: not is_locked(tmp_path))
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert_is_full_state(reopen(tmp_path).newest(), 1)


def submit_to_a_stopped_saver(rank: Rank, pipe: Connection) -> None:
    """Submit a state to a saver process that is stopped, and wait to be killed."""
    os.kill(rank.process.pid, signal.SIGSTOP)
    rank.submit(1)
    pipe.send(rank.process.pid)
    signal.pause()


@pytest.mark.parametrize("world", WORLDS)
def test_a_request_that_no_saver_had_read_is_written_after_training_was_killed(tmp_path: Path, world: int) -> None:
    with run_ranks(world, submit_to_a_stopped_saver, tmp_path) as (members, pipes):
        savers = [pipe.recv() for pipe in pipes]
        for member in members:
            member.kill()
            member.join()
        for saver in savers:
            os.kill(saver, signal.SIGCONT)
        wait_until(lambda: not is_locked(tmp_path))
    assert_is_full_state(reopen(tmp_path).newest(), 1)


def submit_during_an_upload(rank: Rank, pipe: Connection) -> None:
    """Submit a state while the saver uploads the previous checkpoint, work that it may leave undone."""
    rank.submit(1)
    rank.wait()
    wait_until(lambda: len(list(rank.folder.glob("uploading-*"))) == rank.runtime.world)
    rank.submit(2)
    pipe.send("submitted")
    signal.pause()


@pytest.mark.parametrize("world", WORLDS)
def test_a_request_during_an_upload_is_written_after_training_was_killed(tmp_path: Path, world: int) -> None:
    with run_ranks(world, submit_during_an_upload, tmp_path, tiers=BlockedTiers(tmp_path)) as (members, pipes):
        assert [pipe.recv() for pipe in pipes] == ["submitted"] * world
        for member in members:
            member.kill()
            member.join()
        (tmp_path / "go").touch()
        wait_until(lambda: not is_locked(tmp_path))
    assert_is_full_state(reopen(tmp_path).newest(), 2)


def kill_saver_of_rank_1(number: int, saver: HelperProcess) -> None:
    """Kill a saver before it has joined the others."""
    if number == 1:
        os.kill(saver.pid, signal.SIGKILL)
        saver.wait()


def learn_of_the_lost_saver(rank: Rank, pipe: Connection) -> None:
    """Expect the loss at once, although the other savers' rendezvous timeout is half an hour."""
    outcome = rank.saver.agree_on_outcome()
    assert outcome.lost[1] == f"ended with exit code {-signal.SIGKILL}" and outcome.result is None
    rank.runtime.ranks.run_on_all(rank.saver.kill)


def test_a_saver_killed_before_the_savers_have_joined_is_reported_at_once(tmp_path: Path) -> None:
    with run_ranks(2, learn_of_the_lost_saver, tmp_path, at_start=kill_saver_of_rank_1) as (members, _):
        assert_succeeded(members)


def test_a_saver_that_fails_before_its_work_is_lost_not_the_run() -> None:
    saver = object.__new__(AsyncSaver)
    failed = Mock(side_effect=RuntimeError("a helper process failed:\nImportError: no module"))
    saver._lost, saver._process = "", SimpleNamespace(receive=failed, kill=lambda: None)
    assert list(saver._receive(lambda: None)) == []
    assert saver._lost == "ended with exit code 1: ImportError: no module"


def lose_a_saver_in_a_save(rank: Rank, pipe: Connection) -> None:
    """Save the submitted state on the ranks, after the last rank's saver was killed while all savers wrote."""
    rank.submit(1)
    assert pipe.recv() == "killed"
    rank.train_to(77)
    assert not any(isinstance(report, SaveResult) for report in rank.saver.reports(wait=True))
    outcome = rank.saver.agree_on_outcome()
    last = rank.runtime.world - 1
    assert outcome.lost[last] == f"ended with exit code {-signal.SIGKILL}" and outcome.result is None
    rank.runtime.ranks.run_on_all(rank.saver.kill)
    assert not psutil.pid_exists(rank.process.pid)
    rank.store.clean_up()
    assert outcome.pending is not None
    save_with_retries(rank.store, outcome.pending, 0, lambda failure: None)
    pipe.send(list(outcome.lost))


@pytest.mark.parametrize("world", WORLDS)
def test_the_ranks_save_the_state_that_a_killed_saver_was_writing(tmp_path: Path, world: int) -> None:
    with run_ranks(world, lose_a_saver_in_a_save, tmp_path, BlockedDisk) as (members, pipes):
        wait_until(lambda: len(list(tmp_path.glob("writing-*"))) == world)
        [saver] = psutil.Process(members[-1].pid).children()
        saver.kill()
        for pipe in pipes:
            pipe.send("killed")
        (tmp_path / "go").touch()
        lost = [pipe.recv() for pipe in pipes]
        assert_succeeded(members)
    assert all(found == lost[0] and world - 1 in found for found in lost), "all ranks agree on the lost savers"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert_is_full_state(reopen(tmp_path).newest(), 1)


def wait_for_a_slow_disk(rank: Rank, pipe: Connection) -> None:
    """Let the disk answer only once the wait is reported, which is after the time limit of a hang."""
    rank.submit(1)
    wait_until((rank.folder / f"writing-{rank.process.pid}").exists)
    rank.hurry(HANG_SECONDS + 1)
    reports = []
    for report in rank.saver.reports(wait=True):
        reports.append(type(report))
        if isinstance(report, SlowStorage):
            assert report.seconds > HANG_SECONDS
            rank.hurry(0.0)
            (rank.folder / "go").touch()
    assert reports == [SlowStorage, SaveResult]
    outcome = rank.saver.agree_on_outcome()
    assert not outcome.lost and outcome.result is not None


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_saver_that_waits_for_its_disk_is_no_hang(tmp_path: Path, world: int) -> None:
    with run_ranks(world, wait_for_a_slow_disk, tmp_path, WaitingDisk, hang_seconds=HANG_SECONDS) as (members, _):
        assert_succeeded(members)
    assert_is_full_state(reopen(tmp_path).newest(), 1)


def save_for_a_stopped_saver(rank: Rank, pipe: Connection) -> None:
    """Stop the last rank's saver while it waits for its disk: nobody would ever continue it."""
    rank.submit(1)
    if rank.runtime.rank == rank.runtime.world - 1:
        wait_until((rank.folder / f"writing-{rank.process.pid}").exists)
        os.kill(rank.process.pid, signal.SIGSTOP)
        rank.hurry(HANG_SECONDS + 1)
    list(rank.saver.reports(wait=True))
    outcome = rank.saver.agree_on_outcome()
    assert outcome.lost[rank.runtime.world - 1].startswith("was stopped by a signal for ") and outcome.result is None
    rank.runtime.ranks.run_on_all(rank.saver.kill)
    rank.store.clean_up()
    assert outcome.pending is not None
    save_with_retries(rank.store, outcome.pending, 0, lambda failure: None)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stopped_saver_is_killed_and_its_state_is_saved(tmp_path: Path, world: int) -> None:
    disk = partial(waiting_disk_of_the_last, world)
    with run_ranks(world, save_for_a_stopped_saver, tmp_path, disk, hang_seconds=HANG_SECONDS) as (members, _):
        assert_succeeded(members)
    assert_is_full_state(reopen(tmp_path).newest(), 1)


def waiting_disk_of_the_last(world: int) -> Disk:
    """Create the disk of a saver, which never answers on the last rank."""
    return WaitingDisk() if int(os.environ["RANK"]) == world - 1 else Disk()


def lose_an_idle_saver(rank: Rank, pipe: Connection) -> None:
    rank.submit(1)
    assert rank.wait() is not None
    if rank.runtime.rank == 0:
        os.kill(rank.process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, rank.process.pid, os.WEXITED | os.WNOWAIT)
    assert list(rank.saver.reports(wait=True)) == []
    rank.runtime.ranks.barrier()
    outcome = rank.saver.agree_on_outcome()
    assert list(outcome.lost) == [0] and outcome.pending is None and outcome.result is None
    rank.saver.kill()


@pytest.mark.parametrize("world", WORLDS)
def test_a_saver_killed_between_saves_is_reported(tmp_path: Path, world: int) -> None:
    with run_ranks(world, lose_an_idle_saver, tmp_path) as (members, _):
        assert_succeeded(members)
    assert_is_full_state(reopen(tmp_path).newest(), 1)


class FailingFsyncDisk(Disk):
    """Disk whose fsync of the staging folder fails, for a number of saves."""

    def __init__(self, saves: int) -> None:
        self.saves = saves

    def sync_folder(self, path: Path) -> None:
        if ".staging-" in path.name and self.saves > 0:
            self.saves -= 1
            (path.parent.parent / f"refused-{self.saves}").touch()
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        super().sync_folder(path)


def failing_disk(rank: int, saves: int) -> Disk:
    """Create the disk of a saver, which fails only on the given rank."""
    return FailingFsyncDisk(saves if int(os.environ["RANK"]) == rank else 0)


def expect_one_retry(rank: Rank, pipe: Connection) -> None:
    rank.submit(1)
    reports = list(rank.saver.reports(wait=True))
    failure, result = reports
    assert isinstance(failure, FailedAttempt) and failure.attempts == 1 and "No space left on device" in failure.message
    if rank.runtime.world > 1:
        assert failure.message.startswith("rank 1: ")
    assert isinstance(result, SaveResult) and result.attempts == 2 and result.seconds >= 1
    outcome = rank.saver.agree_on_outcome()
    assert outcome.result is not None and (outcome.result.path, outcome.result.attempts) == (result.path, 2)


@pytest.mark.parametrize("world", WORLDS)
def test_a_failed_save_is_retried(tmp_path: Path, world: int) -> None:
    with run_ranks(world, expect_one_retry, tmp_path, partial(failing_disk, world - 1, 1), retries=2) as (
        members,
        _,
    ):
        assert_succeeded(members)
    assert_is_full_state(reopen(tmp_path).newest(), 1)


def submit_and_forward_reports(rank: Rank, pipe: Connection) -> None:
    rank.submit(1)
    while not (reports := list(rank.saver.reports(wait=False))):
        pass
    pipe.send(reports)
    signal.pause()


@pytest.mark.parametrize("world", WORLDS)
def test_a_save_is_not_retried_after_training_was_killed(tmp_path: Path, world: int) -> None:
    """The pauses of nine retries are 243 seconds."""
    disk = partial(failing_disk, 0, 99)
    with run_ranks(world, submit_and_forward_reports, tmp_path, disk, retries=9) as (members, pipes):
        assert pipes[0].poll(600)
        for member in members:
            member.kill()
            member.join()
        wait_until(lambda: not is_locked(tmp_path))
        assert list((tmp_path / "checkpoints").iterdir()) == []
        assert len(list(tmp_path.glob("refused-*"))) < 10, "no attempt follows without a pause"


def fail_to_create_the_buffer(rank: Rank, pipe: Connection) -> None:
    """Fail at once, on the last rank only: all ranks continue without savers."""
    if rank.runtime.rank == rank.runtime.world - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    expect_no_savers(rank)


def fail_to_allocate_the_buffer(rank: Rank, pipe: Connection) -> None:
    """Fail while the pages are allocated, on the last rank only."""

    def raise_no_space(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if rank.runtime.rank == rank.runtime.world - 1:
        os.posix_fallocate = raise_no_space
    expect_no_savers(rank)


def expect_no_savers(rank: Rank) -> None:
    rank.saver.prepare(rank.content(0).chunks)
    outcome = rank.saver.agree_on_outcome()
    assert list(outcome.lost) == [rank.runtime.world - 1]
    assert "not enough memory for a copy of the state" in outcome.lost[rank.runtime.world - 1]
    rank.saver.kill()


@pytest.mark.parametrize("script", [fail_to_create_the_buffer, fail_to_allocate_the_buffer])
@pytest.mark.parametrize("world", WORLDS)
def test_lack_of_memory_for_the_buffer_is_reported_on_all_ranks(tmp_path: Path, world: int, script: Script) -> None:
    with run_ranks(world, script, tmp_path) as (members, _):
        assert_succeeded(members)
