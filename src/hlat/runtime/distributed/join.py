"""Joining the other processes of a run, and leaving them.

RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    --> a store, where every process says that it has arrived
    --> the default process group: collectives on the device (gloo, nccl, neuron)
    --> the control group: talk on the CPU (``HostGroup``)

One process needs none of this and pays for none of it. For each process the cost grows with the number of processes
and no faster: three store operations, and one connection per peer and group (``benchmarks/startup.py``).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hlat.runtime.backend import choose_device, configure_numerics, keep_freed_memory, nondeterministic_kernel_error
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.distributed.rendezvous import Rendezvous, rendezvous_helpers, rendezvous_ranks
from hlat.runtime.distributed.signed_store import SignedStore
from hlat.runtime.distributed.waiting import call_interruptibly
from hlat.runtime.errors import LaunchError
from hlat.runtime.rank_env import RankInfo, rank_info

# The control group waits while rank 0 alone prepares the data, which may take hours. A peer that died does not cost
# this time: its connections close, and gloo reports that at once.
_CONTROL = timedelta(days=1)

# Savers wait for each other while the slowest of them writes its part, and their trainers can do without them.
_BESIDE = timedelta(minutes=30)

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "neuron": "neuron"}

_stores: list[SignedStore] = []  # of the worlds that this process is in: torch keeps their inside only


@dataclass(frozen=True)
class Runtime:
    """This process's place in the run."""

    device: torch.device
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    ranks: HostGroup = field(default_factory=HostGroup)
    rendezvous: Rendezvous = field(default_factory=Rendezvous)  # where its processes met; those beside them meet below it


def join_run(device: str = "auto", deterministic: bool = True, folder: Path | None = None) -> Runtime:
    """Pick the device of this process, make its arithmetic reproducible, and join the other processes if there are any.

    Args:
        device: a device type (cpu, cuda, neuron) or auto: the accelerator that torch finds, else the CPU.
        deterministic: refuse kernels that may give other bits each time.
        folder: one that all processes share: the run's secret is kept there while they meet, where the launcher gave
            none. Without either, every process that reaches the store may join.

    Raises:
        LaunchError: the asked type is not present on this machine, or the processes do not find each other.
        StorageError: the folder cannot be written.
    """
    here = rank_info()
    chosen = choose_device(device, here)
    configure_numerics(chosen, deterministic)
    if chosen.type == "cpu":  # where tensors are memory of the C library
        keep_freed_memory()
    if here.world == 1:
        return Runtime(chosen)
    ranks, meeting = _join(chosen, here, folder)
    return Runtime(chosen, here.rank, here.world, here.local_rank, ranks, meeting)


def join_helpers(name: str, meeting: Rendezvous, here: RankInfo) -> HostGroup:
    """Join a world of processes of which one stands beside each process of a run.

    Args:
        name: of that world: there may be several.
        meeting: that of the run.
        here: of the process that this one stands beside.

    Raises:
        LaunchError: they do not find each other.
    """
    if here.world == 1:
        return HostGroup()
    store = _kept(rendezvous_helpers(name, meeting, here))
    with _connecting(here):
        call_interruptibly(lambda: _connect("gloo", store, here, _BESIDE))
    return HostGroup(here.rank, here.world, dist.group.WORLD)


def leave_run(runtime: Runtime) -> None:
    """Wait for the others, so that none sees a connection close while it works, and leave."""
    if runtime.world > 1:
        runtime.ranks.barrier()
        dist.destroy_process_group()


def abandon_run(runtime: Runtime) -> None:
    """Leave after an error: nobody is waited for, and the others see the connections close."""
    # Destroying a group of an accelerator waits for the collectives that were started, which a peer may never join:
    # there the end of the process closes the connections.
    if runtime.world > 1 and runtime.device.type == "cpu":
        dist.destroy_process_group()


@contextmanager
def joined_run(device: str = "auto", deterministic: bool = True, folder: Path | None = None) -> Iterator[Runtime]:
    """``join_run``, and at the end ``leave_run``, or ``abandon_run`` where an exception passes.

    Raises:
        LaunchError, StorageError: as ``join_run``; or torch refused a kernel within the block because it is not
            deterministic.
    """
    runtime = join_run(device, deterministic, folder)
    try:
        yield runtime
    except BaseException as error:
        abandon_run(runtime)
        if (refusal := nondeterministic_kernel_error(error)) is not None:
            raise refusal from error
        raise
    leave_run(runtime)


def _join(device: torch.device, here: RankInfo, folder: Path | None) -> tuple[HostGroup, Rendezvous]:
    if dist.is_initialized():
        raise LaunchError(
            "this process has joined a run already: leave that with hlat.runtime.distributed.join.leave_run first."
        )
    backend = _BACKENDS.get(device.type)
    if backend is None:
        message = f"run.device={device.type}: torch has no way for several processes to compute on such devices."
        raise LaunchError(f"{message} Use run.device=cpu, or one process.")
    signed, meeting = rendezvous_ranks(here, folder)
    # Accelerators' backends ask the store from threads of their own, at any time, where Python may be gone already.
    store = _kept(signed) if backend == "gloo" else signed.plain

    def connect() -> Any:
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)  # which a thread does not take over from another
        _connect(backend, store, here)
        return dist.new_group(backend="gloo", timeout=_CONTROL)

    with _connecting(here):
        control = call_interruptibly(connect)
    assert control is not None, "every rank is in the control group"
    return HostGroup(here.rank, here.world, control), meeting


def _connect(backend: str, store: Store, here: RankInfo, timeout: timedelta | None = None) -> None:
    # Not bound to the device: NCCL would then cut later groups out of this one, for which every rank has to call,
    # and ours are made by their members only.
    dist.init_process_group(backend, store=store, rank=here.rank, world_size=here.world, timeout=timeout)


def _kept(store: SignedStore) -> SignedStore:
    """Keep a store as long as groups may be made in it."""
    _stores[:] = [store]
    return store


@contextmanager
def _connecting(here: RankInfo) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        message = (
            f"the {here.world} processes arrived, but rank {here.rank} cannot connect to the others ({_line(error)})."
        )
        remedy = "Check that the machines reach each other; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network."
        raise LaunchError(f"{message} {remedy}") from error


def _line(error: Exception) -> str:
    """The first line of a message: torch's C++ errors carry a stack after it."""
    return str(error).strip().partition("\n")[0]
