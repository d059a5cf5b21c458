"""Snapshots of real processes are copied to the next machine over gloo, so that losing a machine loses no data."""

import shutil
from pathlib import Path

import pytest
import torch

from hlat.checkpoint.format.tensor_files import TensorChunk
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.checkpoint.run_id import RunId
from hlat.checkpoint.snapshots import SnapshotTier
from hlat.runtime.distributed.join import Runtime
from tests.support.distributed.workers import Pool

ROWS = 3_000_001  # float64: the snapshot of each rank is larger than a chunk of the exchange


def tensor(step: int) -> torch.Tensor:
    return torch.arange(ROWS, dtype=torch.float64).add_(step)


def tier_of(runtime: Runtime, folder: Path, per_machine: int) -> SnapshotTier:
    (folder / "run").mkdir(parents=True, exist_ok=True)
    owner = RunId(folder / "run", "run")
    return SnapshotTier(str(folder / "machine{node}"), runtime.ranks, owner, runtime.rank // per_machine)


def write(runtime: Runtime, folder: Path, per_machine: int, steps: list[int]) -> None:
    tier = tier_of(runtime, folder, per_machine)
    size = -(-ROWS // runtime.world)
    first = runtime.rank * size
    for step in steps:
        rows = tensor(step)[first : first + size]
        blocks = [TensorChunk("model.rows", (ROWS,), (first,), (rows,))]
        tier.write(step, blocks, {"step": step})


def promote(runtime: Runtime, folder: Path, per_machine: int) -> int | None:
    store = CheckpointStore(folder / "run" / "checkpoints", keep_last=2, ranks=runtime.ranks)
    tier = tier_of(runtime, folder, per_machine)
    step = tier.promote(store, store.newest_step())
    newest = store.newest()
    assert newest is not None and torch.equal(newest.read(["model.rows"])["model.rows"], tensor(newest.step))
    return step


@pytest.mark.parametrize(("world", "per_machine"), [(4, 2), (3, 1), (3, 2)])
def test_losing_a_machine_loses_no_data(pool: Pool, tmp_path: Path, world: int, per_machine: int) -> None:
    for lost in range(-(-world // per_machine)):
        folder = tmp_path / str(lost)
        pool.run(world, write, folder, per_machine, [1, 2])
        shutil.rmtree(folder / f"machine{lost}")
        assert pool.run(world, promote, folder, per_machine) == [2] * world
