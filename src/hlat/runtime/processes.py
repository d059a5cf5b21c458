"""Joining the other processes of a run, and leaving them.

RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    --> a store, where every process says that it has arrived
    --> the default process group: collectives on the device (gloo, nccl, neuron)
    --> the control group: talk on the CPU (``Ranks``)

One process needs none of this and pays for none of it. For each process the cost grows with the number of processes
and no faster: three store operations, and one connection per peer and group (``benchmarks/startup.py``).
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hlat.runtime.allocator import keep_freed_memory
from hlat.runtime.device import choose_device, refused_kernel, set_arithmetic
from hlat.runtime.errors import LaunchError
from hlat.runtime.place import Place, place
from hlat.runtime.ranks import Ranks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ARRIVAL = timedelta(minutes=10)
"""How long a process waits for the others to arrive: a scheduler may start them minutes apart."""

# The control group waits while rank 0 alone prepares the data, which may take hours. A peer that died does not cost
# this time: its connections close, and gloo reports that at once.
_CONTROL = timedelta(days=1)

# Savers wait for each other while the slowest of them writes its part, and their trainers can do without them.
_BESIDE = timedelta(minutes=30)

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "neuron": "neuron"}

_joins: Counter[tuple[str, int]] = Counter()  # by store: a process that joins again must not meet its old names there


@dataclass(frozen=True)
class Runtime:
    """This process's place in the run."""

    device: torch.device
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    ranks: Ranks = field(default_factory=Ranks)
    meeting: str = ""  # where at the store its processes met; those beside them meet below it


def start(device: str = "auto", deterministic: bool = True) -> Runtime:
    """Pick the device of this process, make its arithmetic reproducible, and join the other processes if there are any.

    Args:
        device: a device type (cpu, cuda, neuron) or auto: the accelerator that torch finds, else the CPU.
        deterministic: refuse kernels that may give other bits each time.

    Raises:
        LaunchError: the asked type is not present on this machine, or the processes do not find each other.
    """
    here = place()
    chosen = choose_device(device, here)
    set_arithmetic(chosen, deterministic)
    if chosen.type == "cpu":  # where tensors are memory of the C library
        keep_freed_memory()
    if here.world == 1:
        return Runtime(chosen)
    ranks = _join(chosen, here)
    return Runtime(chosen, here.rank, here.world, here.local_rank, ranks, _meeting(*_address()))


def join_beside(name: str, meeting: str, here: Place) -> Ranks:
    """Join a world of processes of which one stands beside each process of a run.

    Args:
        name: of that world: there may be several.
        meeting: that of the run.
        here: of the process that this one stands beside.

    Raises:
        LaunchError: they do not find each other.
    """
    if here.world == 1:
        return Ranks()
    address, port = _address()
    store = _arrive(_reach(address, port, here.rank, hosts=False), f"{meeting}/{name}", here)
    with _connecting(here):
        dist.init_process_group("gloo", store=store, rank=here.rank, world_size=here.world, timeout=_BESIDE)
    return Ranks(here.rank, here.world, dist.group.WORLD)


def finish(runtime: Runtime) -> None:
    """Wait for the others, so that none sees a connection close while it works, and leave."""
    if runtime.world > 1:
        runtime.ranks.barrier()
        dist.destroy_process_group()


def abandon(runtime: Runtime) -> None:
    """Leave after an error: nobody is waited for, and the others see the connections close."""
    # Destroying a group of an accelerator waits for the collectives that were started, which a peer may never join:
    # there the end of the process closes the connections.
    if runtime.world > 1 and runtime.device.type == "cpu":
        dist.destroy_process_group()


@contextmanager
def joined(device: str = "auto", deterministic: bool = True) -> Iterator[Runtime]:
    """``start``, and at the end ``finish``, or ``abandon`` where an exception passes.

    Raises:
        LaunchError: as ``start``; or torch refused a kernel within the block because it is not deterministic.
    """
    runtime = start(device, deterministic)
    try:
        yield runtime
    except BaseException as error:
        abandon(runtime)
        if (refusal := refused_kernel(error)) is not None:
            raise refusal from error
        raise
    finish(runtime)


def _join(device: torch.device, here: Place) -> Ranks:
    if dist.is_initialized():
        raise LaunchError("this process has joined a run already: leave that with hlat.runtime.finish first.")
    backend = _BACKENDS.get(device.type)
    if backend is None:
        message = f"run.device={device.type}: torch has no way for several processes to compute on such devices."
        raise LaunchError(f"{message} Use run.device=cpu, or one process.")
    store = _meet(here)
    with _connecting(here):
        # Not bound to the device: NCCL would then cut later groups out of this one, for which every rank has to call,
        # and ours are made by their members only.
        dist.init_process_group(backend, store=store, rank=here.rank, world_size=here.world)
        control = dist.new_group(backend="gloo", timeout=_CONTROL)
    assert control is not None, "every rank is in the control group"
    return Ranks(here.rank, here.world, control)


@contextmanager
def _connecting(here: Place) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        message = (
            f"the {here.world} processes arrived, but rank {here.rank} cannot connect to the others ({_line(error)})."
        )
        remedy = "Check that the machines reach each other; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network."
        raise LaunchError(f"{message} {remedy}") from error


def _meet(here: Place) -> "Store":
    """The store, once every process has arrived."""
    address, port = _address()
    server = _connect(address, port, here.rank)
    _joins[address, port] += 1
    return _arrive(server, _meeting(address, port), here)


def _address() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def _meeting(address: str, port: int) -> str:
    """The name of the world that this process joined last there."""
    return f"hlat/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_joins[address, port]}"


def _arrive(server: "Store", meeting: str, here: Place) -> "Store":
    """Wait for every process. Waiting here says who is missing; the backends could not."""
    store = dist.PrefixStore(meeting, server)  # type: ignore[attr-defined]
    if store.add(f"rank/{here.rank}", 1) > 1:
        message = f"two processes say that they are rank {here.rank} of {here.world}."
        raise LaunchError(f"{message} Give each its own RANK, and each run its own MASTER_PORT.")
    if store.add("arrived", 1) == here.world:
        store.set("complete", "")
    try:
        store.wait(["complete"], ARRIVAL)
    except RuntimeError as error:
        arrived, minutes = store.add("arrived", 0), ARRIVAL / timedelta(minutes=1)
        message = f"only {arrived} of {here.world} processes arrived within {minutes:g} minutes."
        remedy = "Check that all were started, with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
        raise LaunchError(f"{message} {remedy}") from error
    return store


@lru_cache(maxsize=1)  # kept when the groups are left: a slower peer would lose what it still needs
def _connect(address: str, port: int, rank: int) -> "Store":
    return _reach(address, port, rank, _hosts(rank))


def _reach(address: str, port: int, rank: int, hosts: bool) -> "Store":
    try:
        return dist.TCPStore(address, port, is_master=hosts, timeout=ARRIVAL, wait_for_workers=False)  # type: ignore[attr-defined]
    except (RuntimeError, ValueError, OSError) as error:
        what = "open the store of the run at" if hosts else "reach rank 0 at"
        message = f"rank {rank} cannot {what} MASTER_ADDR={address} MASTER_PORT={port} ({_line(error)})."
        remedy = (
            "Check that the address is that of rank 0's machine, and that the port is free and not behind a firewall."
        )
        raise LaunchError(f"{message} {remedy}") from error


def _hosts(rank: int) -> bool:
    """Whether this process opens the store: rank 0, unless the launcher has done so (torchrun, ``--nproc``)."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _line(error: Exception) -> str:
    """The first line of a message: torch's C++ errors carry a stack after it."""
    return str(error).strip().partition("\n")[0]
