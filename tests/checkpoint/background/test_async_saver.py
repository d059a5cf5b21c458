"""Saving beside training: what is written is what there was, whatever is killed, and at most one copy of it exists."""

import errno
import os
import resource
import signal
import socket
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from hlat.checkpoint.background import run_saver
from hlat.checkpoint.background.saver_process import BufferMessage, SaverSettings
from hlat.checkpoint.format import Disk
from hlat.checkpoint.protocol import FailedAttempt, SaveResult, open_checkpoint, save_with_retries
from hlat.runtime import RankInfo
from hlat.runtime.distributed import HelperProcess, start_helper
from tests.support.checkpoint.saving_ranks import (
    HeldDisk,
    HeldTiers,
    Rank,
    Script,
    SlowDisk,
    assert_whole,
    is_locked,
    ranks,
    reopened,
    succeeded,
    wait_until,
)

WORLDS = [1, 2]


def train_on_while_it_is_written(rank: Rank, pipe: Connection) -> None:
    """The live state changes all the time until the checkpoint is there."""
    for step in range(1, 4):
        rank.submit(step)
        later, notes = 100 * step, []
        while not notes:
            later += 1
            rank.go_to(later)
            notes = list(rank.saver.reports(wait=False))
        settled = rank.saver.agree_on_outcome()
        assert settled.result is not None and not settled.lost and settled.pending is None
        assert settled.result.path == rank.store.root / f"step-{step:08d}" and settled.result.attempts == 1
        assert later > 100 * step + 1, "it was trained while it was written"


@pytest.mark.parametrize("world", WORLDS)
def test_what_is_written_is_the_state_that_was_submitted(tmp_path: Path, world: int) -> None:
    with ranks(world, train_on_while_it_is_written, tmp_path, SlowDisk) as (members, _):
        succeeded(members)
    assert reopened(tmp_path).steps() == [1, 2, 3]
    for step in range(1, 4):
        assert_whole(open_checkpoint(tmp_path / "checkpoints" / f"step-{step:08d}"), step)


def save_as_fast_as_it_goes(rank: Rank, pipe: Connection) -> None:
    """A save waits for the one before it: there is never a second copy."""
    for step in range(1, 5):
        rank.wait()
        assert rank.store.steps() == list(range(1, step)), "the one before it is durable"
        rank.submit(step)
        assert len(rank.store.steps()) < step, "and this one is not yet"
        # The saver maps the memory when it hears of it, which on a busy machine is later.
        assert copies_in(os.getpid()) == 1 and copies_in(rank.process.pid) <= 1
    rank.wait()
    assert copies_in(rank.process.pid) == 1


def copies_in(pid: int) -> int:
    """How many stretches of nameless memory a process has mapped."""
    return sum("memfd:hlat" in region.path for region in psutil.Process(pid).memory_maps(grouped=False))


@pytest.mark.parametrize("world", WORLDS)
def test_a_slow_disk_holds_up_saves_and_does_not_pile_up_copies(tmp_path: Path, world: int) -> None:
    with ranks(world, save_as_fast_as_it_goes, tmp_path, SlowDisk) as (members, _):
        succeeded(members)
    assert_whole(reopened(tmp_path).newest(), 4)


def submit_and_stay(rank: Rank, pipe: Connection) -> None:
    rank.submit(1)
    signal.pause()


@pytest.mark.parametrize("world", WORLDS)
def test_a_checkpoint_becomes_whole_although_its_trainers_are_killed(tmp_path: Path, world: int) -> None:
    """And nobody else may begin before that."""
    with ranks(world, submit_and_stay, tmp_path, HeldDisk) as (members, _):
        wait_until(lambda: len(list(tmp_path.glob("writing-*"))) == world)
        for member in members:
            member.kill()
            member.join()
        assert is_locked(tmp_path) and not list(tmp_path.glob("checkpoints/step-*"))
        (tmp_path / "go").touch()
        wait_until(lambda: not is_locked(tmp_path))
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert_whole(reopened(tmp_path).newest(), 1)


def submit_to_a_saver_that_sleeps(rank: Rank, pipe: Connection) -> None:
    """It has not begun with what was ordered when the trainer is gone."""
    os.kill(rank.process.pid, signal.SIGSTOP)
    rank.submit(1)
    pipe.send(rank.process.pid)
    signal.pause()


@pytest.mark.parametrize("world", WORLDS)
def test_what_was_ordered_is_written_although_nobody_had_begun_with_it(tmp_path: Path, world: int) -> None:
    with ranks(world, submit_to_a_saver_that_sleeps, tmp_path) as (members, pipes):
        savers = [pipe.recv() for pipe in pipes]
        for member in members:
            member.kill()
            member.join()
        for saver in savers:
            os.kill(saver, signal.SIGCONT)
        wait_until(lambda: not is_locked(tmp_path))
    assert_whole(reopened(tmp_path).newest(), 1)


def submit_while_it_is_uploaded(rank: Rank, pipe: Connection) -> None:
    """The saver is busy with what could be left undone: the copies of the checkpoint before."""
    rank.submit(1)
    rank.wait()
    wait_until(lambda: len(list(rank.folder.glob("uploading-*"))) == rank.runtime.world)
    rank.submit(2)
    pipe.send("submitted")
    signal.pause()


@pytest.mark.parametrize("world", WORLDS)
def test_what_was_ordered_during_an_upload_is_written(tmp_path: Path, world: int) -> None:
    with ranks(world, submit_while_it_is_uploaded, tmp_path, tiers=HeldTiers(tmp_path)) as (members, pipes):
        assert [pipe.recv() for pipe in pipes] == ["submitted"] * world
        for member in members:
            member.kill()
            member.join()
        (tmp_path / "go").touch()
        wait_until(lambda: not is_locked(tmp_path))
    assert_whole(reopened(tmp_path).newest(), 2)


def kill_the_last(number: int, saver: HelperProcess) -> None:
    """Before it has looked for the others."""
    if number == 1:
        os.kill(saver.pid, signal.SIGKILL)
        saver.wait()


def hear_that_one_has_gone(rank: Rank, pipe: Connection) -> None:
    """The other savers would look for it for half an hour; the ranks do not wait for that."""
    settled = rank.saver.agree_on_outcome()
    assert settled.lost[1] == f"ended with exit code {-signal.SIGKILL}" and settled.result is None
    rank.runtime.ranks.run_on_all(rank.saver.kill)


def test_a_saver_that_is_killed_before_they_have_met(tmp_path: Path) -> None:
    with ranks(2, hear_that_one_has_gone, tmp_path, at_start=kill_the_last) as (members, _):
        succeeded(members)


def lose_a_saver_in_a_save(rank: Rank, pipe: Connection) -> None:
    """The saver of the last rank is killed while all of them write; the ranks save what was submitted themselves."""
    rank.submit(1)
    assert pipe.recv() == "killed"
    rank.go_to(77)
    assert not any(isinstance(note, SaveResult) for note in rank.saver.reports(wait=True))
    settled = rank.saver.agree_on_outcome()
    last = rank.runtime.world - 1
    assert settled.lost[last] == f"ended with exit code {-signal.SIGKILL}" and settled.result is None
    rank.runtime.ranks.run_on_all(rank.saver.kill)
    assert not psutil.pid_exists(rank.process.pid)
    rank.store.clean_up()
    assert settled.pending is not None
    save_with_retries(rank.store, settled.pending, 0, lambda refusal: None)
    pipe.send(list(settled.lost))


@pytest.mark.parametrize("world", WORLDS)
def test_the_ranks_save_what_a_killed_saver_was_writing(tmp_path: Path, world: int) -> None:
    with ranks(world, lose_a_saver_in_a_save, tmp_path, HeldDisk) as (members, pipes):
        wait_until(lambda: len(list(tmp_path.glob("writing-*"))) == world)
        [saver] = psutil.Process(members[-1].pid).children()
        saver.kill()
        for pipe in pipes:
            pipe.send("killed")
        (tmp_path / "go").touch()
        lost = [pipe.recv() for pipe in pipes]
        succeeded(members)
    assert all(found == lost[0] and world - 1 in found for found in lost), "every rank knows the same"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert_whole(reopened(tmp_path).newest(), 1)


def lose_an_idle_saver(rank: Rank, pipe: Connection) -> None:
    rank.submit(1)
    assert rank.wait() is not None
    if rank.runtime.rank == 0:
        os.kill(rank.process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, rank.process.pid, os.WEXITED | os.WNOWAIT)
    assert list(rank.saver.reports(wait=True)) == []
    rank.runtime.ranks.barrier()
    settled = rank.saver.agree_on_outcome()
    assert list(settled.lost) == [0] and settled.pending is None and settled.result is None
    rank.saver.kill()


@pytest.mark.parametrize("world", WORLDS)
def test_a_saver_killed_between_saves(tmp_path: Path, world: int) -> None:
    with ranks(world, lose_an_idle_saver, tmp_path) as (members, _):
        succeeded(members)
    assert_whole(reopened(tmp_path).newest(), 1)


class RefusingDisk(Disk):
    """Refuses that a staging folder becomes durable, of so many saves."""

    def __init__(self, saves: int) -> None:
        self.saves = saves

    def sync_folder(self, path: Path) -> None:
        if ".staging-" in path.name and self.saves > 0:
            self.saves -= 1
            (path.parent.parent / f"refused-{self.saves}").touch()
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        super().sync_folder(path)


def refusing_on(rank: int, saves: int) -> Disk:
    """The disk of a saver, which refuses if it is that of this rank."""
    return RefusingDisk(saves if int(os.environ["RANK"]) == rank else 0)


def hear_of_refusals(rank: Rank, pipe: Connection) -> None:
    rank.submit(1)
    notes = list(rank.saver.reports(wait=True))
    refusal, result = notes
    assert isinstance(refusal, FailedAttempt) and refusal.attempts == 1 and "No space left on device" in refusal.message
    if rank.runtime.world > 1:
        assert refusal.message.startswith("rank 1: ")
    assert isinstance(result, SaveResult) and result.attempts == 2 and result.seconds >= 1
    settled = rank.saver.agree_on_outcome()
    assert settled.result is not None and (settled.result.path, settled.result.attempts) == (result.path, 2)


@pytest.mark.parametrize("world", WORLDS)
def test_a_refused_save_is_tried_again(tmp_path: Path, world: int) -> None:
    with ranks(world, hear_of_refusals, tmp_path, partial(refusing_on, world - 1, 1), retries=2) as (members, _):
        succeeded(members)
    assert_whole(reopened(tmp_path).newest(), 1)


def submit_and_say_what_is_refused(rank: Rank, pipe: Connection) -> None:
    rank.submit(1)
    while not (notes := list(rank.saver.reports(wait=False))):
        pass
    pipe.send(notes)
    signal.pause()


@pytest.mark.parametrize("world", WORLDS)
def test_nothing_is_tried_again_for_a_trainer_that_has_gone(tmp_path: Path, world: int) -> None:
    """The pauses of nine retries are 511 seconds."""
    disk = partial(refusing_on, 0, 99)
    with ranks(world, submit_and_say_what_is_refused, tmp_path, disk, retries=9) as (members, pipes):
        assert pipes[0].poll(60)
        for member in members:
            member.kill()
            member.join()
        wait_until(lambda: not is_locked(tmp_path))
        assert list((tmp_path / "checkpoints").iterdir()) == []
        assert len(list(tmp_path.glob("refused-*"))) < 10, "the pauses of those that are left out would end at once"


def have_no_memory(rank: Rank, pipe: Connection) -> None:
    """On the last rank only, at once: all of them do without savers."""
    if rank.runtime.rank == rank.runtime.world - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    do_without_savers(rank)


def run_out_of_memory(rank: Rank, pipe: Connection) -> None:
    """The same, but it is found out while the memory is fetched."""

    def refuse(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if rank.runtime.rank == rank.runtime.world - 1:
        os.posix_fallocate = refuse
    do_without_savers(rank)


def do_without_savers(rank: Rank) -> None:
    rank.saver.prepare(rank.content(0).chunks)
    settled = rank.saver.agree_on_outcome()
    assert list(settled.lost) == [rank.runtime.world - 1]
    assert "not enough memory for a copy of the state" in settled.lost[rank.runtime.world - 1]
    rank.saver.kill()


@pytest.mark.parametrize("script", [have_no_memory, run_out_of_memory])
@pytest.mark.parametrize("world", WORLDS)
def test_a_copy_that_finds_no_memory(tmp_path: Path, world: int, script: Script) -> None:
    with ranks(world, script, tmp_path) as (members, _):
        succeeded(members)


def test_savers_that_never_met_leave_with_their_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can have been ordered, and who waits for the run's lock is not to wait for them."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not answer
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": nobody.getsockname()[1]}.items():
            monkeypatch.setenv(name, str(value))
        saver = start_helper(partial(run_saver, here=RankInfo(rank=1, world=2), make_disk=Disk))
        saver.channel.send(SaverSettings("a-meeting", tmp_path, 1, None, 0))
        saver.channel.send(BufferMessage())  # which it does not receive before it has met the other one
        saver.close()
        assert saver.wait() == 1, "as one that has nothing to write; not when it gives up looking"
