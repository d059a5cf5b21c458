"""Join the other processes of a run, check that all are about to do the same, and leave them; or simulate one rank.

    RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
        --> rendezvous: a store where every process announces itself
        --> the default process group: collectives on the device
        --> the control group: small values on the CPU (``HostGroup``)  --> Runtime

    facts (recipe, code, data: field -> value) --8-byte hash--> all-gather --equal?--> continue
                                               --differ: one rank per hash sends its values--> error everywhere

    rank, world --fake_rank: torch's FakeTensorMode, torch's process group "fake"--> Runtime, without the other ranks

A single process skips all of this. Otherwise the cost per process grows linearly with the number of processes: three
store operations, and one connection per peer and group (``benchmarks/startup.py``).

Processes that disagree do not fail by themselves: they deadlock, or train something that nobody asked for.

The program of a simulated rank is the real one: every tensor has its shape, dtype, strides and storage, but no data,
and collectives complete at once. It must not read values on the device. Values on the host, such as the tokens of a
batch, are created and read within ``host_values``.
"""

import hashlib
import json
import platform
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup

from hlat.runtime.backend.code_folders import damaged_code_error, use_compile_cache
from hlat.runtime.backend.device import configure_numerics, device_error, find_device_type, select_device
from hlat.runtime.backend.faults import HangLimits
from hlat.runtime.backend.table import backend_of, interface_variables
from hlat.runtime.distributed.host_collectives import HostGroup, call_interruptibly, format_ranks
from hlat.runtime.distributed.rendezvous import Rendezvous, SignedStore, rendezvous_helpers, rendezvous_ranks
from hlat.runtime.errors import LaunchError, first_line
from hlat.runtime.process import RankInfo, rank_info
from hlat.runtime.terminal import listed
from hlat.runtime.version import VERSION

# The control group waits while rank 0 alone prepares the data, and savers while the slowest of them writes its shard:
# both may take hours. A dead peer is detected sooner: its connections close, and gloo reports that at once.
_CONTROL_TIMEOUT = timedelta(days=1)

_NO_LIMITS = HangLimits()

_stores: list[SignedStore] = []  # torch keeps no reference to the Python objects
_patience: list[timedelta | None] = [None]  # of the run that this process has joined


@dataclass(frozen=True)
class Runtime:
    """Device and rank of this process in its run."""

    device: torch.device  # device that the process computes on
    rank: int = 0  # global rank
    world: int = 1
    local_rank: int = 0  # rank on this machine
    ranks: HostGroup = field(default_factory=HostGroup)  # all processes of the run, for values on the CPU
    # name and key of the rendezvous; helper processes use them for their own rendezvous
    rendezvous: Rendezvous = field(default_factory=Rendezvous)


def join_run(
    device: str = "auto",
    deterministic: bool = True,
    folder: Path | None = None,
    compile_cache: str | None = None,
    limits: HangLimits = _NO_LIMITS,
) -> Runtime:
    """Choose the device of this process, configure its numerics, and join the other processes.

    All processes share ``folder``, which holds the run's secret during the rendezvous if the launcher set none. Without
    either, every process that reaches the store may join.

    Raises:
        LaunchError: no such device, the rendezvous failed, or no safe folder for compiled code.
        StorageError: the folder cannot be written.
    """
    here = rank_info()
    device_type = find_device_type(device)
    configure_numerics(device_type, deterministic)
    backend_of(device_type).configure_process()
    use_compile_cache(device_type, compile_cache, here.rank)
    if here.world == 1:
        return Runtime(select_device(device_type, here))
    backend_of(device_type).configure_collectives(limits)
    _patience[:] = [limits.patience]
    chosen, ranks, rendezvous = _join(device_type, here, folder)
    return Runtime(chosen, here.rank, here.world, here.local_rank, ranks, rendezvous)


def join_helpers(name: str, rendezvous: Rendezvous, here: RankInfo) -> HostGroup:
    """Join a world, called ``name``, of one helper process per process of a run; LaunchError if that fails."""
    if here.world == 1:
        return HostGroup()
    store = _keep_store(rendezvous_helpers(name, rendezvous, here))
    with _connecting(here):
        call_interruptibly(lambda: _connect("gloo", store, here, _CONTROL_TIMEOUT))
    return HostGroup(here.rank, here.world, dist.group.WORLD)


def device_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Create a group of ranks for collectives on devices; its members alone call this, in the same order."""
    group = call_interruptibly(
        # By default torch would give it the time of its library, not that of the group of all ranks.
        lambda: dist.new_group(list(ranks), timeout=_patience[0], use_local_synchronization=True)
    )
    assert isinstance(group, dist.ProcessGroup), "this rank is a member"
    return group


def leave_run(runtime: Runtime) -> None:
    """Leave the run when all ranks have come to this point."""
    if runtime.world > 1:
        # No rank may see a connection close while it works.
        runtime.ranks.barrier()
        dist.destroy_process_group()


def abandon_run(runtime: Runtime) -> None:
    """Leave the run after an error, without waiting; the other ranks see the connections close."""
    if runtime.world == 1:
        return
    collectives = backend_of(runtime.device).collectives
    assert collectives is not None, "several processes have joined"
    # Destroying a group with threads waits for pending collectives, which a peer may never join: there the connections
    # close when the process ends.
    if not collectives.has_threads:
        dist.destroy_process_group()


@contextmanager
def joined_run(
    device: str = "auto",
    deterministic: bool = True,
    folder: Path | None = None,
    compile_cache: str | None = None,
    limits: HangLimits = _NO_LIMITS,
) -> Iterator[Runtime]:
    """Join the run within the block: ``join_run``, then ``leave_run``, or ``abandon_run`` after an exception.

    Raises:
        LaunchError: as for ``join_run``; or torch refused a non-deterministic kernel, compiled code may be damaged, or
            a device's software reports what would fail again.
        StorageError: as for ``join_run``.
    """
    runtime = join_run(device, deterministic, folder, compile_cache, limits)
    try:
        yield runtime
    except BaseException as error:
        abandon_run(runtime)
        # A compiler that says why it failed has found no damaged code, which would cost the whole cache.
        if (refusal := device_error(error) or damaged_code_error(error)) is not None:
            raise refusal from error
        raise
    leave_run(runtime)


def _join(device_type: str, here: RankInfo, folder: Path | None) -> tuple[torch.device, HostGroup, Rendezvous]:
    if dist.is_initialized():
        raise LaunchError(
            "this process has already joined a run: leave it with hlat.runtime.distributed.join.leave_run first."
        )
    backend = backend_of(device_type)
    collectives = backend.collectives
    if collectives is None:
        message = f"run.device={device_type}: torch has no collective backend for such devices."
        raise LaunchError(f"{message} Use run.device=cpu, or one process.")
    signed, rendezvous = rendezvous_ranks(here, folder)
    # Threads of a library access the store even after Python has shut down: they need the plain one.
    store = signed.plain if collectives.has_threads else _keep_store(signed)

    device = None if backend.group_before_device else select_device(device_type, here)

    def connect() -> Any:
        if device is not None:
            backend.select(device)  # the choice is per thread
        _connect(collectives.name, store, here, _patience[0])
        return dist.new_group(backend="gloo", timeout=_CONTROL_TIMEOUT)

    with _connecting(here):
        control = call_interruptibly(connect)
    assert control is not None, "every rank is in the control group"
    return device or select_device(device_type, here), HostGroup(here.rank, here.world, control), rendezvous


def _connect(backend: str, store: Store, here: RankInfo, timeout: timedelta | None = None) -> None:
    # Not bound to the device: NCCL would then split later groups off this one, which every rank has to call,
    # while groups here are created by their members only.
    dist.init_process_group(backend, store=store, rank=here.rank, world_size=here.world, timeout=timeout)


def _keep_store(store: SignedStore) -> SignedStore:
    _stores[:] = [store]
    return store


@contextmanager
def _connecting(here: RankInfo) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        message = (
            f"the {here.world} processes joined the store, but rank {here.rank} cannot connect to the others "
            f"({first_line(error)})."
        )
        remedy = f"Check that the machines reach each other; {' and '.join(interface_variables())} name the network."
        raise LaunchError(f"{message} {remedy}") from error


Facts = Mapping[str, Mapping[str, Any]]  # section (recipe, code, data) -> item -> JSON value

_ABSENT = "not set"
_MAX_SHOWN = 20  # maximum number of differing items in a message


def check_consistent(ranks: HostGroup, facts: Facts) -> None:
    """Compare facts about the run across ranks. Collective; exchanges 8 bytes per rank if all agree.

    Raises:
        LaunchError: they differ. Every rank raises it, with each differing item and its values by rank.
    """
    if ranks.world == 1:
        return
    text = json.dumps(facts, sort_keys=True)
    own = hashlib.blake2b(text.encode(), digest_size=8).digest()
    hashes = ranks.all_gather(own)
    if len(set(hashes)) == 1:
        return
    senders = {found: hashes.index(found) for found in hashes}  # one rank per distinct hash sends its values
    texts = ranks.all_gather(text if senders[own] == ranks.rank else None)
    kinds = {rank: json.loads(texts[rank] or "{}") for rank in senders.values()}
    members = {rank: [member for member, found in enumerate(hashes) if senders[found] == rank] for rank in kinds}
    raise LaunchError(_disagreement(kinds, members))


def _disagreement(kinds: dict[int, dict[str, dict[str, Any]]], members: dict[int, list[int]]) -> str:
    items = {(section, item): None for kind in kinds.values() for section in kind for item in kind[section]}
    lines = []
    for section, item in items:
        values: dict[str, list[int]] = {}
        for rank, kind in kinds.items():
            values.setdefault(_shown(kind.get(section, {}), item), []).extend(members[rank])
        if len(values) > 1:
            holders = listed(f"{value} on {format_ranks(sorted(found))}" for value, found in values.items())
            lines.append(f"{section}: {item} is {holders}")
    head = "the processes of this run were started differently:"
    remedy = "Start all of them from the same recipe, overrides, data and installation."
    return f"{head}\n  {listed(lines, _MAX_SHOWN, chr(10) + '  ')}\n{remedy}"


def _shown(items: Mapping[str, Any], item: str) -> str:
    return _ABSENT if item not in items else json.dumps(items[item], ensure_ascii=False)


@cache
def code_identity() -> dict[str, str]:
    """Identify the code of this process: a hash of its sources, and the versions of hlat, torch and Python."""
    return {
        "source": _source_hash(Path(__file__).parents[2]),
        "hlat": VERSION,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def _source_hash(package: Path) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted([*package.rglob("*.py"), *package.rglob("*.[ch]")]):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(package).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


_FAKE = torch._C._TorchDispatchModeKey.FAKE


@contextmanager
def fake_rank(rank: int, world: int) -> Iterator[Runtime]:
    """Simulate one rank of a world within the block, without memory and the others; its device is a CPU.

    Raises:
        LaunchError: this process has already joined a run.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415  (real runs do not need it)
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415  (registers the backend)

    if dist.is_initialized():
        raise LaunchError("this process has already joined a run: a rehearsal needs a process of its own.")
    if world > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _keep_sent_tensors():
            yield Runtime(torch.device("cpu"), rank, world)
    finally:
        if world > 1:
            dist.destroy_process_group()
            _forget_meshes()


@contextmanager
def _keep_sent_tensors() -> Iterator[None]:
    send = ProcessGroup.send

    def keeping(group: ProcessGroup, tensors: list[torch.Tensor], *args: Any) -> dist.Work:
        # Real process groups keep sent tensors alive as long as the handle of the send.
        work = send(group, tensors, *args)
        weakref.finalize(work, list.clear, list(tensors)).atexit = False
        return work

    ProcessGroup.send = keeping  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ProcessGroup.send = send  # type: ignore[method-assign]


def _forget_meshes() -> None:
    # DTensor's cache remembers meshes, and would return those of this world in the next.
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # noqa: PLC0415

    _clear_sharding_prop_cache()


# Truthy if new tensors are created without memory; every operation of a model asks for it
in_fake_world = partial(torch._C._get_dispatch_mode, _FAKE)


@contextmanager
def host_values() -> Iterator[None]:
    """Create tensors with memory within the block, also in a fake world, for code that reads values on the host."""
    mode = torch._C._unset_dispatch_mode(_FAKE)
    try:
        yield
    finally:
        if mode is not None:
            torch._C._set_dispatch_mode(mode)
