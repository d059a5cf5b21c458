"""Machines in one process: each rank a thread, each machine a folder of its own, which can be lost."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from hlat.checkpoint.format import Disk, TensorChunk
from hlat.checkpoint.protocol import Checkpoint, CheckpointStore
from hlat.checkpoint.tiers import RunId
from hlat.checkpoint.tiers.snapshots import SnapshotTier
from hlat.runtime.distributed import HostGroup
from tests.support.checkpoint.saved_states import assert_equal, state
from tests.support.checkpoint.thread_ranks import all_done, on_ranks

T = TypeVar("T")

Machines = tuple[int, ...]
"""The machine of each rank."""


def blocks_of(step: int, rank: int, world: int) -> list[TensorChunk]:
    """What a rank has of the state of a step: rows of some tensors, and all of others."""
    blocks = []
    for name, tensor in state(step).items():
        shape = tuple(tensor.shape)
        if name.startswith("rng") or tensor.ndim == 0:
            blocks.append(TensorChunk(name, shape, (0,) * tensor.ndim, (tensor,), replicated=True))
            continue
        size = -(-shape[0] // world)
        rows = tensor[min(rank * size, shape[0]) : min((rank + 1) * size, shape[0])]
        if rows.shape[0] or (shape[0] == 0 and rank == 0):
            blocks.append(TensorChunk(name, shape, (rank * size if shape[0] else 0, *[0] * (tensor.ndim - 1)), (rows,)))
    return blocks


def meta_of(step: int) -> dict[str, object]:
    return {"step": step, "text": f"é{step}"}


class Place:
    """Where a run and its machines keep things."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.run_dir.mkdir(exist_ok=True)
        self.damaged: list[tuple[str, list[str]]] = []
        self.tokenizer = folder / "tokenizer.json"
        self.tokenizer.write_text('{"a": 1}')

    @property
    def pattern(self) -> str:
        return str(self.folder / "machine{node}")

    def machine(self, number: int) -> Path:
        return self.folder / f"machine{number}"

    def lose(self, number: int) -> None:
        """A machine is gone, with what was on it."""
        shutil.rmtree(self.machine(number))

    def parts(self, pattern: str = "**/rank-*") -> list[Path]:
        """Folders of parts, of all machines."""
        found = (path for path in self.folder.glob(f"machine*/{pattern}") if path.is_dir())
        return sorted(path for path in found if path.suffix != ".bad")

    def tier(self, ranks: HostGroup, machines: Machines, copies: bool = True, disk: Disk | None = None) -> SnapshotTier:
        def report(path: Path | str, problems: list[str]) -> None:
            self.damaged.append((str(path), problems))

        owner = RunId(self.run_dir, "run")
        return SnapshotTier(
            self.pattern, ranks, owner, machines[ranks.rank], copies=copies, on_damage=report, disk=disk
        )

    def write(self, tier: SnapshotTier, ranks: HostGroup, step: int) -> str:
        files = {"tokenizer/tokenizer.json": self.tokenizer} if ranks.is_first else {}
        return tier.write(step, blocks_of(step, ranks.rank, ranks.world), meta_of(step), files)

    def snapshot(self, machines: Machines, *steps: int, copies: bool = True) -> list[str]:
        """A run on these machines writes snapshots of some steps."""

        def work(ranks: HostGroup) -> list[str]:
            tier = self.tier(ranks, machines, copies)
            return [self.write(tier, ranks, step) for step in steps]

        return self.run(machines, work)[0]

    def promote(self, machines: Machines, copies: bool = True) -> tuple[int | None, Checkpoint | None]:
        """A run on these machines starts: the step that was promoted, and the newest checkpoint then."""

        def work(ranks: HostGroup) -> tuple[int | None, Checkpoint | None]:
            store = CheckpointStore(self.run_dir / "checkpoints", keep_last=2, ranks=ranks)
            step = self.tier(ranks, machines, copies).promote(store, store.newest_step())
            return step, store.newest()

        return self.run(machines, work)[0]

    def run(self, machines: Machines, work: Callable[[HostGroup], T]) -> list[T]:
        return all_done(on_ranks(len(machines), work))


def assert_is_state_of(checkpoint: Checkpoint | None, step: int) -> None:
    """The checkpoint is whole, and all of that step."""
    assert checkpoint is not None and checkpoint.step == step
    assert checkpoint.meta == meta_of(step)
    assert (checkpoint.path / "tokenizer" / "tokenizer.json").read_text() == '{"a": 1}'
    loaded: dict[str, torch.Tensor] = checkpoint.load("")
    assert_equal(loaded, state(step))
