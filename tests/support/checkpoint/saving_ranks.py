"""Ranks with saver processes: real processes over gloo, each running the script of a test.

The state is sharded among them, and all of its bits depend on the step, so an inconsistent copy, or one of another
step, is detected. Tests can block the disks that savers write to.
"""

import fcntl
import os
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

from hlat.checkpoint import step_of_path
from hlat.checkpoint.async_saver import AsyncSaver, run_saver
from hlat.checkpoint.format.filesystem import Disk
from hlat.checkpoint.format.tensor_files import TensorChunk, replicated_chunks
from hlat.checkpoint.protocol.commit import CheckpointContent
from hlat.checkpoint.protocol.reader import Checkpoint
from hlat.checkpoint.protocol.store import CheckpointStore, SaveResult
from hlat.checkpoint.tiers import TierEvent
from hlat.config.sections.operation import CheckpointConfig
from hlat.runtime.distributed.join import Runtime, joined_run
from hlat.runtime.helper_process import HelperProcess, start_helper
from hlat.runtime.process import rank_info
from hlat.runtime.progress import blocking_call
from hlat.runtime.storage.run_folder import hold_run_folder
from hlat.training.start import run_lock
from tests.support.checkpoint.saved_states import assert_equal, state
from tests.support.commands import forking
from tests.support.launch.ports import free_port

LONG = 600.0  # seconds: only what hangs takes so long, on any machine
ROWS = 24_000  # of 16 bytes each: more than a file's write buffer on each rank


@dataclass
class Rank:
    """Arguments of a script: one rank with its saver."""

    runtime: Runtime
    store: CheckpointStore
    process: HelperProcess
    saver: AsyncSaver
    live: dict[str, torch.Tensor]  # the state being trained
    folder: Path

    def train_to(self, step: int) -> None:
        """Train to another step: overwrite the live tensors in place."""
        for name, tensor in full_state(step).items():
            local = tensor if name not in SHARDED else tensor[self._rows]
            if name in self.live:
                self.live[name].copy_(local)
            else:
                self.live[name] = local.clone()

    @property
    def _rows(self) -> slice:
        share = ROWS // self.runtime.world
        return slice(self.runtime.rank * share, (self.runtime.rank + 1) * share)

    def content(self, step: int) -> CheckpointContent:
        """Checkpoint content with the live state."""
        chunks = replicated_chunks({name: tensor for name, tensor in self.live.items() if name not in SHARDED})
        for name in SHARDED:
            chunks.append(TensorChunk(name, (ROWS, 4), (self._rows.start, 0), (self.live[name],)))
        return CheckpointContent(step, chunks, {"step": step}, {})

    def submit(self, step: int) -> None:
        """Train to a step and submit its state."""
        self.train_to(step)
        self.saver.submit(self.content(step))

    def hurry(self, seconds: float) -> None:
        """Let the clock that the saver's silence is measured with be ahead by so many seconds."""
        self.process._progress._clock = lambda: time.monotonic() + seconds

    def wait(self) -> SaveResult | None:
        """Wait for the result of the last save, and check that all ranks agree on it."""
        results = [report for report in self.saver.reports(wait=True) if isinstance(report, SaveResult)]
        outcome = self.saver.agree_on_outcome()
        assert not outcome.lost, outcome.lost
        assert [result.path for result in results] == ([] if outcome.result is None else [outcome.result.path])
        return outcome.result


SHARDED = ("model.cut", "optimizer.exp_avg.cut")

Script = Callable[[Rank, Connection], None]


def full_state(step: int) -> dict[str, torch.Tensor]:
    """Full state of a step, with the sharded tensors."""
    generator = torch.Generator().manual_seed(1000 + step)
    return {**state(step), **{name: torch.randn(ROWS, 4, generator=generator) for name in SHARDED}}


def assert_is_full_state(checkpoint: Checkpoint | None, step: int) -> None:
    """Check that a checkpoint has exactly the full state of a step."""
    assert checkpoint is not None and checkpoint.step == step
    assert_equal(checkpoint.load(""), full_state(step))


class BlockedDisk(Disk):
    """Disk that creates a file ``writing-<pid>`` and waits for a file ``go`` before it creates a file."""

    def create(self, path: Path) -> FileIO:
        folder = path.parent.parent.parent
        (folder / f"writing-{os.getpid()}").touch()
        wait_until((folder / "go").exists)
        return super().create(path)


class WaitingDisk(BlockedDisk):
    """Disk whose creation of a file waits for a file ``go``, as a call of a disk that does not answer."""

    def create(self, path: Path) -> FileIO:
        with blocking_call():
            return super().create(path)


@dataclass(frozen=True)
class BlockedTiers:
    """Tier settings, and the tiers opened from them, whose uploads wait for a file ``go``."""

    folder: Path
    config: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(remote="s3://bucket/runs"))

    def open(self, *_: object) -> "BlockedTiers":
        return self

    def upload(self) -> Iterator[TierEvent]:
        (self.folder / f"uploading-{os.getpid()}").touch()
        wait_until((self.folder / "go").exists)
        return iter(())


class HalfwayDisk(Disk):
    """Disk that writes few bytes at a time, and waits after the first of a file for a file ``go-<step>``."""

    def write(self, file: FileIO, data: memoryview) -> int:
        path = Path(os.fsdecode(file.name))
        written = super().write(file, data[: max(1, len(data) // 8)])
        wait_until((path.parent.parent.parent / f"go-{step_of_path(path)}").exists)
        return written


@contextmanager
def run_ranks(
    world: int,
    script: Script,
    folder: Path,
    make_disk: Callable[[], Disk] = Disk,
    retries: int = 0,
    tiers: Any = None,
    at_start: Callable[[int, HelperProcess], None] | None = None,
    hang_seconds: float | None = None,
) -> Iterator[tuple[list[Any], list[Connection]]]:
    """Run a script on ``world`` ranks; yield the processes, and the connections that their scripts send on.

    Args:
        world: number of ranks.
        script: function to be run on every rank.
        folder: run folder.
        make_disk: creates the disk of a saver.
        retries: number of retries of a save.
        tiers: tier settings of the savers.
        at_start: called with rank and saver before the savers have joined; if given, the first wait is left to the
            script.
        hang_seconds: time limit of savers without a sign of life.
    """
    port, pairs = free_port(), [forking().Pipe() for _ in range(world)]
    members = [
        forking().Process(
            target=_rank,
            args=(
                number,
                world,
                port,
                folder,
                script,
                make_disk,
                retries,
                tiers,
                at_start,
                hang_seconds,
                pairs[number][1],
            ),
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
            member.join(LONG)
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
    hang_seconds: float | None,
    pipe: Connection,
) -> None:
    values = {"RANK": number, "WORLD_SIZE": world, "LOCAL_RANK": number, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in values.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    here = rank_info()
    process = start_helper(partial(run_saver, rank_info=here, make_disk=make_disk))
    if at_start is not None:
        at_start(number, process)
    with run_lock(folder) if number == 0 else nullcontext() as lock, joined_run("cpu") as runtime:
        runtime.ranks.barrier()  # rank 0 has locked the run folder
        with hold_run_folder(folder, lock, number) as held:
            store = CheckpointStore(folder / "checkpoints", 99, ranks=runtime.ranks, folder=held)
            saver = AsyncSaver(process, runtime, store, retries, tiers, hang_seconds)
            rank = Rank(runtime, store, process, saver, {}, folder)
            rank.train_to(0)
            saver.prepare(rank.content(0).chunks)
            assert at_start is not None or rank.wait() is None
            script(rank, pipe)
    process.close()
    process.wait()


def assert_succeeded(members: list[Any]) -> None:
    """Check that every rank has completed its script."""
    for member in members:
        member.join(LONG)
    assert [member.exitcode for member in members] == [0] * len(members)


def is_locked(folder: Path) -> bool:
    """True if a process holds the lock of a run."""
    with (folder / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def wait_until(happened: Callable[[], bool]) -> None:
    """Wait until a condition is true, for ten minutes at most."""
    deadline = time.monotonic() + LONG
    while not happened():
        assert time.monotonic() < deadline, "the condition did not become true within ten minutes"
        time.sleep(0.01)


def reopen(folder: Path) -> CheckpointStore:
    """Open the checkpoints as the next attempt would; fail if any is damaged."""

    def damaged(path: Path, problems: list[str]) -> None:
        raise AssertionError(f"{path}: {problems}")

    return CheckpointStore(folder / "checkpoints", 99, on_damage=damaged)
