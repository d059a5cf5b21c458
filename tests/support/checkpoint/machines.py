"""Simulated machines in one process: a thread per rank, and a folder per machine, which can be lost."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from hlat.checkpoint.format.filesystem import Disk
from hlat.checkpoint.format.tensor_files import TensorChunk
from hlat.checkpoint.protocol.reader import Checkpoint
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.checkpoint.run_id import RunId
from hlat.checkpoint.snapshots import SnapshotTier
from hlat.runtime.distributed.host_collectives import HostGroup
from tests.support.checkpoint.saved_states import assert_equal, state
from tests.support.checkpoint.thread_ranks import results_of, run_on_ranks

T = TypeVar("T")

Machines = tuple[int, ...]
"""Machine number of each rank."""


def chunks_of(step: int, rank: int, world: int) -> list[TensorChunk]:
    """Chunks of a rank, of the state of a step: its rows of sharded tensors, and all of the replicated ones."""
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


class Cluster:
    """The run folder and the local folders of simulated machines."""

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
        """Remove a machine's folder."""
        shutil.rmtree(self.machine(number))

    def parts(self, pattern: str = "**/rank-*") -> list[Path]:
        """List the folders of rank parts on all machines."""
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
        return tier.write(step, chunks_of(step, ranks.rank, ranks.world), meta_of(step), files)

    def snapshot(self, machines: Machines, *steps: int, copies: bool = True) -> list[str]:
        """Write snapshots of some steps, in a run on these machines."""

        def work(ranks: HostGroup) -> list[str]:
            tier = self.tier(ranks, machines, copies)
            return [self.write(tier, ranks, step) for step in steps]

        return self.run(machines, work)[0]

    def promote(self, machines: Machines, copies: bool = True) -> tuple[int | None, Checkpoint | None]:
        """Start a run on these machines; return the promoted step, and the newest checkpoint after that."""

        def work(ranks: HostGroup) -> tuple[int | None, Checkpoint | None]:
            store = CheckpointStore(self.run_dir / "checkpoints", keep_last=2, ranks=ranks)
            step = self.tier(ranks, machines, copies).promote(store, store.newest_step())
            return step, store.newest()

        return self.run(machines, work)[0]

    def run(self, machines: Machines, work: Callable[[HostGroup], T]) -> list[T]:
        return results_of(run_on_ranks(len(machines), work))


def assert_is_state_of_step(checkpoint: Checkpoint | None, step: int) -> None:
    """Check that the checkpoint is valid and has the state of one step only."""
    assert checkpoint is not None and checkpoint.step == step
    assert checkpoint.meta == meta_of(step)
    assert (checkpoint.path / "tokenizer" / "tokenizer.json").read_text() == '{"a": 1}'
    loaded: dict[str, torch.Tensor] = checkpoint.load("")
    assert_equal(loaded, state(step))
