"""Saving in real processes that are killed or interrupted during saves, and on disks that are really full.

Child processes come from a fork server that has imported torch, so starting one takes milliseconds.
"""

import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from hlat.checkpoint.format.filesystem import Disk
from hlat.checkpoint.format.tensor_files import replicated_chunks
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.runtime.errors import StorageError
from tests.support.checkpoint.saved_states import assert_is_step, save
from tests.support.commands import forking


@contextmanager
def child(work: Callable[..., None], *arguments: Any) -> Iterator[tuple[Any, Connection]]:
    """Run ``work(pipe, *arguments)`` in a process; yield the process and the connection it sends on."""
    here, there = forking().Pipe(duplex=False)
    process = forking().Process(target=work, args=(there, *arguments))
    process.start()
    there.close()
    try:
        yield process, here
    finally:
        if process.is_alive():
            process.kill()
        process.join()
        here.close()


def received(pipe: Connection) -> list[Any]:
    """Read everything that the process has sent before its end."""
    messages = []
    try:
        while True:
            messages.append(pipe.recv())
    except EOFError:
        return messages


def no_damage(folder: Path, problems: list[str]) -> None:
    raise AssertionError(f"{folder}: {problems}")


def save_and_prune_for_ever(pipe: Connection, root: Path) -> None:
    store = CheckpointStore(root, 2, 5, on_damage=no_damage)
    newest = store.newest()
    step = newest.step if newest else 0
    while True:
        step += 1
        save(store, step)
        pipe.send(step)
        store.prune()


def kill_repeatedly(root: Path, kills: int, rng: random.Random) -> None:
    """Resume from the newest checkpoint and get killed at a random time, repeatedly; nothing may be lost."""
    for _ in range(kills):
        with child(save_and_prune_for_ever, root) as (process, pipe):
            assert pipe.poll(600)
            time.sleep(rng.uniform(0, 0.05))
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            done = max(received(pipe))
        store = CheckpointStore(root, 2, 5, on_damage=no_damage)
        newest = store.newest()
        assert newest is not None and newest.step in (done, done + 1)
        assert_is_step(newest, newest.step)
        assert {path.name for path in root.iterdir()} == {f"step-{step:08d}" for step in store.steps()}


def test_a_process_killed_at_random_times_loses_nothing(tmp_path: Path) -> None:
    kill_repeatedly(tmp_path / "checkpoints", 8, random.Random(0))


@pytest.mark.slow
def test_a_process_killed_at_many_random_times_loses_nothing(tmp_path: Path) -> None:
    kill_repeatedly(tmp_path / "checkpoints", 500, random.Random(1))


class SlowDisk(Disk):
    """Disk slow enough for a save to be interrupted in any of its phases."""

    def write(self, file: FileIO, data: memoryview) -> int:
        time.sleep(0.004)
        return super().write(file, data[: max(1, len(data) // 4)])


def save_until_interrupted(pipe: Connection, root: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    store = CheckpointStore(root, 9, disk=SlowDisk())
    step = 0
    try:
        while True:
            step += 1
            pipe.send(step)
            save(store, step)
    except KeyboardInterrupt:
        pipe.send(sorted(path.name for path in root.iterdir()))


def test_an_interrupt_leaves_no_incomplete_checkpoint(tmp_path: Path) -> None:
    rng = random.Random(0)
    for attempt in range(10):
        root = tmp_path / str(attempt)
        with child(save_until_interrupted, root) as (process, pipe):
            assert pipe.poll(600)
            time.sleep(rng.uniform(0.02, 0.3))
            os.kill(process.pid, signal.SIGINT)
            process.join(600)
            *begun, left = received(pipe)
        assert process.exitcode == 0
        complete = [f"step-{step:08d}" for step in begun]
        assert left in (complete, complete[:-1]), "only complete checkpoints are left when the process exits"
        newest = CheckpointStore(root, 9, on_damage=no_damage).newest()
        if newest is not None:
            assert_is_step(newest, len(left))


class HopefulDisk(Disk):
    """Disk that reports free space it does not have, as if another process filled it after the check."""

    def free_bytes(self, path: Path) -> int:
        return 1 << 60


BIG = replicated_chunks({"model.big": torch.zeros(1 << 20, dtype=torch.float32)})  # 4 MiB


def save_too_much(root: Path, disk: Disk | None = None) -> str:
    store = CheckpointStore(root, 9, disk=disk, on_damage=no_damage)
    save(store, 1)
    with pytest.raises(StorageError) as caught:
        store.save(2, BIG, {})
    assert [path.name for path in root.iterdir()] == ["step-00000001"]
    assert_is_step(store.newest(), 1)
    save(store, 3)  # a small checkpoint still fits
    assert_is_step(store.newest(), 3)
    return str(caught.value)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 3 MiB."""
    target = tmp_path / "disk"
    target.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(target)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(
            f"cannot mount a file system here ({mounted.stderr.strip()}); the file size limit is tested instead"
        )
    yield target
    subprocess.run(["umount", str(target)], check=True)


@pytest.mark.parametrize("disk", [Disk(), HopefulDisk()], ids=["found by the check", "found while writing"])
def test_a_full_disk_fails_the_save_with_advice(small_disk: Path, disk: Disk) -> None:
    message = save_too_much(small_disk / "checkpoints", disk)
    assert str(small_disk / "checkpoints") in message
    assert "bytes)" in message and "checkpoint.keep_last" in message and "run.dir" in message


def save_above_the_file_size_limit(pipe: Connection, root: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    pipe.send(save_too_much(root))


def test_a_file_size_limit_fails_the_save_with_advice(tmp_path: Path) -> None:
    with child(save_above_the_file_size_limit, tmp_path / "checkpoints") as (process, pipe):
        message = pipe.recv()
        process.join(600)
    assert "File too large" in message and "ulimit -f" in message


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    """Root can write to any folder, so a file in place of the folder causes the error."""
    (tmp_path / "run").write_text("")
    with pytest.raises(StorageError, match="cannot keep checkpoints"):
        CheckpointStore(tmp_path / "run" / "checkpoints", 1)
