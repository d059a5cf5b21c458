"""Saving in real processes over gloo: states sharded by FSDP2, a failing disk on one rank, a killed rank."""

import errno
import os
import signal
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hlat.checkpoint import collect, restore
from hlat.checkpoint.format.filesystem import Disk
from hlat.checkpoint.protocol.reader import open_checkpoint
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.config.sections.model import ModelConfig
from hlat.model import Decoder, ModelShard, collect_local_parameters
from hlat.model.parameter_layout import parameter_layouts
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.errors import StorageError
from tests.support.checkpoint.failing_disks import FailingDisk
from tests.support.checkpoint.saved_states import assert_equal
from tests.support.checkpoint.stamped_parts import (
    Layout,
    Process,
    add_optimizer,
    config_of,
    expected,
    expected_local,
    processes,
    saved_tensors,
    stamp,
)
from tests.support.commands import forking
from tests.support.model.canonical import fuse


def start(world: int, work: Callable[..., None], folder: Path) -> list[Any]:
    """Run ``work(ranks, folder)`` in processes that have joined a process group."""
    folder.mkdir(exist_ok=True)
    members = [forking().Process(target=join, args=(rank, world, work, folder)) for rank in range(world)]
    for member in members:
        member.start()
    return members


def join(rank: int, world: int, work: Callable[..., None], folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    ranks = HostGroup(rank, world, dist.new_group(backend="gloo"))
    work(ranks, folder)
    ranks.barrier()
    dist.destroy_process_group()


def finish(members: list[Any]) -> list[int]:
    """Wait for all processes; return their exit codes."""
    for member in members:
        member.join(600)
        if member.is_alive():
            member.kill()
            member.join()
    return [member.exitcode for member in members]


def sharded(config: ModelConfig, part: ModelShard, mesh: DeviceMesh) -> tuple[Decoder, Process]:
    """Build a model shard under FSDP2, as training does."""
    with torch.device("meta"):
        model = Decoder(config, part)
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    return model, add_optimizer(collect_local_parameters(model))


def layout(name: str, config: ModelConfig, rank: int) -> tuple[Decoder, Process]:
    """Build the model shard and optimizer of one of four ranks, in one of the layouts below."""
    shards = torch.arange(4).view(2, 2)
    if name == "fsdp":
        return sharded(config, ModelShard(), DeviceMesh("cpu", torch.arange(4)))
    if name == "hsdp":
        return sharded(config, ModelShard(), DeviceMesh("cpu", shards, mesh_dim_names=("replicas", "shards")))
    if name == "tensor x fsdp":
        mesh = DeviceMesh("cpu", shards.T, mesh_dim_names=("tensor", "shards"))
        return sharded(config, ModelShard(rank % 2, 2), mesh["shards"])
    mesh = DeviceMesh("cpu", shards, mesh_dim_names=("pipeline", "shards"))
    ends = ModelShard(0, 1, range(2), head=False), ModelShard(0, 1, range(2, 3), embedding=False)
    return sharded(config, ends[rank // 2], mesh["shards"])


LAYOUTS = ["fsdp", "hsdp", "tensor x fsdp", "pipeline x fsdp"]


def save_and_exchange(ranks: HostGroup, folder: Path) -> None:
    """Save in each layout, and load in the next one."""
    config = config_of("tied")
    for index, name in enumerate(LAYOUTS):
        _, process = layout(name, config, ranks.rank)
        stamp(process, index)
        store = CheckpointStore(folder / name, 1, ranks=ranks)
        store.save(5, collect(config, process.held, process.optimizer), {"step": 5})
        assert_stamped(process, index)
    for index, name in enumerate(LAYOUTS):
        following = LAYOUTS[(index + 1) % len(LAYOUTS)]
        model, process = layout(following, config, ranks.rank)
        stamp(process, 99)
        newest = CheckpointStore(folder / name, 1, ranks=ranks).newest()
        restore(newest, config, process.held, process.optimizer)
        assert_stamped(process, index)
        assert_full_parameters(model, config, index)


def assert_stamped(process: Process, salt: int) -> None:
    for kind, parameter, tensor in saved_tensors(process):
        assert_equal({parameter.name: tensor}, {parameter.name: expected_local(kind, parameter, tensor, salt)})


def assert_full_parameters(model: Decoder, config: ModelConfig, salt: int) -> None:
    """Check the full parameters as FSDP2 gathers them: the rows must have been loaded in its order."""
    canonical = {name.removeprefix("model."): t for name, t in expected(config, salt).items() if name[:6] == "model."}
    if model.shard.tensor_count == 1:
        layouts = parameter_layouts(config, model.shard)
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            assert torch.equal(parameter.full_tensor().detach(), fuse(layouts[name], canonical)), name


def test_states_sharded_by_fsdp_are_saved_and_loaded_in_other_layouts(tmp_path: Path) -> None:
    """With uneven rows, replicas, and a tied head on another rank than its embedding."""
    assert finish(start(4, save_and_exchange, tmp_path / "run")) == [0] * 4
    config = config_of("tied")
    for index, name in enumerate(LAYOUTS):
        checkpoint = open_checkpoint(tmp_path / "run" / name / "step-00000005")
        saved = checkpoint.load("")
        assert saved.pop("optimizer.step") == 5
        assert_equal({k: v for k, v in saved.items() if not k.startswith("rng.")}, expected(config, index))
        (alone,) = processes(config_of("tied", coalesce=False), Layout())
        restore(checkpoint, config_of("tied", coalesce=False), alone.held, alone.optimizer)
        assert_stamped(alone, index)


def fail_on_rank_1(ranks: HostGroup, folder: Path) -> None:
    """Save with a full disk on rank 1, then again."""
    config = config_of("gqa")
    process = processes(config, Layout(tensor=2))[ranks.rank]
    stamp(process, 1)
    disk = FailingDisk(10**9, errno.ENOSPC)
    store = CheckpointStore(folder / "checkpoints", 9, disk=disk, ranks=ranks)
    if ranks.rank == 1:
        disk.at = len(disk.operations) + 3
    with pytest.raises(StorageError, match=r"^rank 1: cannot save the checkpoint step-00000001 .*No space left"):
        store.save(1, collect(config, process.held, process.optimizer), {})
    ranks.barrier()
    assert list(store.root.iterdir()) == []
    ranks.barrier()
    store.save(2, collect(config, process.held, process.optimizer), {})
    newest = store.newest()
    assert newest is not None and newest.step == 2
    stamp(process, 2)
    restore(newest, config, process.held, process.optimizer)
    assert_stamped(process, 1)


def test_a_full_disk_on_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    assert finish(start(2, fail_on_rank_1, tmp_path / "run")) == [0, 0]


class KillingDisk(Disk):
    """Disk that kills its process in the middle of a file."""

    def write(self, file: FileIO, data: memoryview) -> int:
        super().write(file, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


def get_killed_in_a_save(ranks: HostGroup, folder: Path) -> None:
    config = config_of("gqa")
    process = processes(config, Layout(stages=(1, 1, 1)))[ranks.rank]
    stamp(process, 1)
    store = CheckpointStore(folder / "checkpoints", 9, ranks=ranks)
    store.save(1, collect(config, process.held, process.optimizer), {})
    if ranks.rank == 1:
        store = CheckpointStore(folder / "checkpoints", 9, ranks=ranks, disk=KillingDisk())
    else:
        store = CheckpointStore(folder / "checkpoints", 9, ranks=ranks)
    try:
        store.save(2, collect(config, process.held, process.optimizer), {})
    except RuntimeError:  # the connection to rank 1 is closed
        os._exit(7)


def test_a_rank_killed_in_a_save_fails_it_on_all_ranks(tmp_path: Path) -> None:
    """The others fail without waiting for a timeout, and the run can resume from the earlier checkpoint."""
    codes = finish(start(3, get_killed_in_a_save, tmp_path / "run"))
    assert codes == [7, -signal.SIGKILL, 7]
    root = tmp_path / "run" / "checkpoints"
    assert not (root / "step-00000002").exists()
    newest = CheckpointStore(root, 9, on_damage=lambda *found: pytest.fail(str(found))).newest()
    assert newest is not None and newest.step == 1
    assert [path.name for path in root.iterdir()] == ["step-00000001"]
    assert expected(config_of("gqa"), 1).keys() <= newest.tensors.keys()
