"""Ranks with savers beside them: real processes over gloo, each running a script of a test.

The state that they save is cut among them, and every bit of it depends on the step: a copy that is torn, or is of
another step, is seen. Disks that savers write to can be held up from outside.
"""

import fcntl
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from hlat.checkpoint.background import AsyncSaver, run_saver
from hlat.checkpoint.format import Disk, TensorChunk, replicated_chunks
from hlat.checkpoint.protocol import Checkpoint, CheckpointContent, CheckpointStore, SaveResult
from hlat.checkpoint.tiers import TierEvent
from hlat.config.sections import CheckpointConfig
from hlat.runtime import rank_info
from hlat.runtime.distributed import HelperProcess, Runtime, joined_run, start_helper
from hlat.runtime.storage import hold_run_folder
from hlat.training.process import run_lock
from tests.support.checkpoint.saved_states import assert_equal, state

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "torch",
        "hlat.checkpoint",
        "hlat.training",
        "tests.support.checkpoint.saved_states",
        "tests.support.checkpoint.saving_ranks",
    ]
)

ROWS = 24_000  # of 16 bytes: more than a file's write buffer, on each rank


@dataclass
class Rank:
    """What a script works with."""

    runtime: Runtime
    store: CheckpointStore
    process: HelperProcess
    saver: AsyncSaver
    live: dict[str, torch.Tensor]  # the state that is trained on
    folder: Path

    def go_to(self, step: int) -> None:
        """Train: the live tensors become those of another step, in place."""
        for name, tensor in whole(step).items():
            part = tensor if name not in CUT else tensor[self._rows]
            if name in self.live:
                self.live[name].copy_(part)
            else:
                self.live[name] = part.clone()

    @property
    def _rows(self) -> slice:
        share = ROWS // self.runtime.world
        return slice(self.runtime.rank * share, (self.runtime.rank + 1) * share)

    def content(self, step: int) -> CheckpointContent:
        """The live state, as it is saved."""
        blocks = replicated_chunks({name: tensor for name, tensor in self.live.items() if name not in CUT})
        for name in CUT:
            blocks.append(TensorChunk(name, (ROWS, 4), (self._rows.start, 0), (self.live[name],)))
        return CheckpointContent(step, blocks, {"step": step}, {})

    def submit(self, step: int) -> None:
        """Train until a step and save it."""
        self.go_to(step)
        self.saver.submit(self.content(step))

    def wait(self) -> SaveResult | None:
        """The result of the save submitted last, on all ranks alike."""
        heard = [note for note in self.saver.reports(wait=True) if isinstance(note, SaveResult)]
        settled = self.saver.agree_on_outcome()
        assert not settled.lost, settled.lost
        assert [note.path for note in heard] == ([] if settled.result is None else [settled.result.path])
        return settled.result


CUT = ("model.cut", "optimizer.exp_avg.cut")

Script = Callable[[Rank, Connection], None]


def whole(step: int) -> dict[str, torch.Tensor]:
    """The state of a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    return {**state(step), **{name: torch.randn(ROWS, 4, generator=generator) for name in CUT}}


def assert_whole(checkpoint: Checkpoint | None, step: int) -> None:
    """A checkpoint is exactly the state of a step."""
    assert checkpoint is not None and checkpoint.step == step
    assert_equal(checkpoint.load(""), whole(step))


class HeldDisk(Disk):
    """Says, by a file beside the checkpoints, that a rank's saver is writing; goes on when a file ``go`` is there."""

    def create(self, path: Path) -> FileIO:
        folder = path.parent.parent.parent
        (folder / f"writing-{os.getpid()}").touch()
        wait_until((folder / "go").exists)
        return super().create(path)


@dataclass(frozen=True)
class HeldTiers:
    """An object store, as settings and as what is opened by them, that takes nothing before a file ``go`` is there."""

    folder: Path
    config: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(remote="s3://bucket/runs"))

    def open(self, *_: object) -> "HeldTiers":
        return self

    def upload(self) -> Iterator[TierEvent]:
        (self.folder / f"uploading-{os.getpid()}").touch()
        wait_until((self.folder / "go").exists)
        return iter(())


class SlowDisk(Disk):
    """Writes a little at a time."""

    def write(self, file: FileIO, data: memoryview) -> int:
        time.sleep(0.002)
        return super().write(file, data[: max(1, len(data) // 8)])


@contextmanager
def ranks(
    world: int,
    script: Script,
    folder: Path,
    make_disk: Callable[[], Disk] = Disk,
    retries: int = 0,
    tiers: Any = None,
    at_start: Callable[[int, HelperProcess], None] | None = None,
) -> Iterator[tuple[list[Any], list[Connection]]]:
    """Run a script on so many ranks; the processes, and what their scripts send.

    Args:
        at_start: does something to the saver of a rank before the savers have met; the script is then the first to ask.
    """
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = int(server.getsockname()[1])
    pairs = [SERVER.Pipe() for _ in range(world)]
    members = [
        SERVER.Process(
            target=_rank,
            args=(number, world, port, folder, script, make_disk, retries, tiers, at_start, pairs[number][1]),
        )
        for number in range(world)
    ]
    for member in members:
        member.start()
    for _, theirs in pairs:
        theirs.close()
    try:
        yield members, [ours for ours, _ in pairs]
    finally:
        for member in members:
            member.join(60)
            if member.is_alive():
                member.kill()
                member.join()


def _rank(
    number: int,
    world: int,
    port: int,
    folder: Path,
    script: Script,
    make_disk: Callable[[], Disk],
    retries: int,
    tiers: Any,
    at_start: Callable[[int, HelperProcess], None] | None,
    pipe: Connection,
) -> None:
    values = {"RANK": number, "WORLD_SIZE": world, "LOCAL_RANK": number, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in values.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    here = rank_info()
    process = start_helper(partial(run_saver, here=here, make_disk=make_disk))
    if at_start is not None:
        at_start(number, process)
    with run_lock(folder) if number == 0 else nullcontext() as lock, joined_run("cpu") as runtime:
        runtime.ranks.barrier()  # the lock is there
        with hold_run_folder(folder, lock, number) as held:
            store = CheckpointStore(folder / "checkpoints", 99, ranks=runtime.ranks, folder=held)
            saver = AsyncSaver(process, runtime, store, retries, tiers)
            rank = Rank(runtime, store, process, saver, {}, folder)
            rank.go_to(0)
            saver.prepare(rank.content(0).chunks)
            assert at_start is not None or rank.wait() is None
            script(rank, pipe)
    process.close()
    process.wait()


def succeeded(members: list[Any]) -> None:
    """See that every rank came to the end of its script."""
    for member in members:
        member.join(60)
    assert [member.exitcode for member in members] == [0] * len(members)


def is_locked(folder: Path) -> bool:
    """Whether somebody holds the lock of a run."""
    with (folder / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def wait_until(happened: Callable[[], bool]) -> None:
    """Wait; the bound is there for a test that would otherwise never end."""
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in a minute"
        time.sleep(0.01)


def reopened(folder: Path) -> CheckpointStore:
    """The checkpoints, as the next attempt finds them; no damage may be found."""

    def damaged(path: Path, problems: list[str]) -> None:
        raise AssertionError(f"{path}: {problems}")

    return CheckpointStore(folder / "checkpoints", 99, on_damage=damaged)
