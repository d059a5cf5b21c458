"""Collectives of the test device: a process group in Python, as torch-neuronx has, on gloo and the same memory."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from tests.support.neuron import device_module
from tests.support.neuron.rules import holds

COLLECTIVES: Counter[str] = Counter()
"""Collectives of this process since ``clear``: name and dtype -> number."""

_started: list[int] = []  # 1 once this process has a default group


def register() -> None:
    """Register the backend of collectives."""
    dist.Backend.register_backend("neuron", _create, extended_api=True, devices=["neuron"])


def _create(options: Any, _: Any) -> "NeuronGroup":
    ranks = options.global_ranks_in_group or range(options.group_size)
    kind = NeuronGroup if holds("send") else SendingGroup
    return kind(options.store, options.group_rank, options.group_size, options.timeout, list(ranks))


def is_aligned(ranks: list[int]) -> bool:
    """Return True if ranks are a regular pattern, and its translations divide all ranks into such groups."""
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    regular = ranks == list(range(ranks[0], ranks[0] + stride * len(ranks), stride))
    return regular and ranks[0] % (stride * len(ranks)) < stride


class NeuronGroup(ProcessGroup):
    """Collectives with the limits of the public beta."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any, ranks: list[int]) -> None:
        super().__init__(rank, size)
        assert not holds("groups") or is_aligned(ranks), f"neuron [groups]: ranks {ranks} are no aligned group"
        self._is_default = not _started
        if not _started:
            started = device_module.native().stand_in_is_initialized()
            assert not (holds("start-order") and started), (
                "neuron [start-order]: the runtime must not be started before init_process_group"
            )
            device_module.assign_local_device()
            _started.append(1)
        self._ranks = ranks
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._name = ""

    # Names that torch asks for

    def getBackendName(self) -> str:
        """Name of the backend."""
        return "neuron"

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """Name of the group."""
        return self._name

    def _get_backend(self, device: torch.device) -> "NeuronGroup":
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("neuron")]

    # Collectives

    def _see(self, name: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        for tensor in tensors:
            assert tensor.device.type == "neuron", f"neuron: {name} got a tensor on {tensor.device}"
            if holds("int64-collectives") and tensor.dtype == torch.int64:
                raise RuntimeError(f"neuron [int64-collectives]: {name} got int64")
        COLLECTIVES[f"{name} {str(tensors[0].dtype).removeprefix('torch.')}"] += 1
        with torch.no_grad():
            return [torch.ops.hlat_stand_in.on_host(tensor) for tensor in tensors]

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """All-reduce."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        opts = dist.AllreduceOptions() if opts is None else opts
        mean = opts.reduceOp == dist.ReduceOp.AVG
        seen = self._see("all_reduce", tensors)
        if not mean:
            return self._gloo.allreduce(seen, opts)
        plain = dist.AllreduceOptions()
        plain.reduceOp = dist.ReduceOp.SUM
        work = self._gloo.allreduce(seen, plain)
        work.wait()
        for each in seen:
            each.div_(self.size())
        return work

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """All-reduce of several tensors."""
        plain = dist.AllreduceOptions()
        plain.reduceOp = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        works = [self.allreduce([tensor], plain) for tensor in tensors]
        for work in works:
            work.wait()
        return works[-1]

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        """Broadcast: all others are set to zero, and all are summed."""
        root = opts.rootRank if opts is not None else 0
        if not holds("broadcast"):
            return self._gloo.broadcast(self._see("broadcast", list(tensors)), opts)
        seen = self._see("broadcast", list(tensors))
        if self.rank() != root:
            for each in seen:
                each.zero_()
        return self._gloo.allreduce(seen, dist.AllreduceOptions())

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """All-gather into one tensor."""
        seen = self._see("all_gather", [output, input])
        return self._gloo._allgather_base(*seen, *(() if opts is None else (opts,)))

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        return self.all_gather_single(output, input, opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """All-gather of several tensors."""
        works = [self.all_gather_single(out, given) for out, given in zip(outputs, inputs, strict=True)]
        for work in works:
            work.wait()
        return works[-1]

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """All-gather into a list."""
        seen = self._see("all_gather", [inputs[0], *outputs[0]])
        return self._gloo.allgather([seen[1:]], [seen[0]], *(() if opts is None else (opts,)))

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """Reduce-scatter of one tensor."""
        out, given = self._see("reduce_scatter", [output, input])
        opts = dist.ReduceScatterOptions() if opts is None else opts
        mean = opts.reduceOp == dist.ReduceOp.AVG
        if mean:
            opts = dist.ReduceScatterOptions()
            opts.reduceOp = dist.ReduceOp.SUM
        work = self._gloo._reduce_scatter_base(out, given, opts)
        if mean:
            work.wait()
            out.div_(self.size())
        return work

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single(output, input, opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Reduce-scatter of several tensors with the same trailing shape."""
        shapes = {tuple(given.shape[1:]) for given in inputs}
        if holds("coalesced") and len(shapes) > 1:
            raise ValueError(f"neuron [coalesced]: trailing shapes differ: {shapes}")
        works = [self.reduce_scatter_single(out, given, opts) for out, given in zip(outputs, inputs, strict=True)]
        for work in works:
            work.wait()
        return works[-1]

    def reduce_scatter_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Refuse, unless allowed."""
        if holds("coalesced"):
            raise NotImplementedError("neuron [coalesced]: reduce_scatter_coalesced")
        return self.reduce_scatter_single_coalesced(outputs, inputs, opts)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, out_splits: Any, in_splits: Any, opts: Any = None
    ) -> Any:
        """All-to-all of one tensor."""
        if holds("equal-splits"):
            unequal = len({*out_splits}) > 1 or len({*in_splits}) > 1
            consecutive = self._ranks == list(range(self._ranks[0], self._ranks[0] + len(self._ranks)))
            if unequal or not consecutive:
                raise NotImplementedError(f"neuron [equal-splits]: splits {in_splits}, ranks {self._ranks}")
        out, given = self._see("all_to_all", [output, input])
        return self._gloo.alltoall_base(
            out, given, list(out_splits), list(in_splits), *(() if opts is None else (opts,))
        )

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks of the default group."""
        if holds("barrier") and not self._is_default:
            raise NotImplementedError("neuron [barrier]: on another group than the default one")
        return self._gloo.barrier(*(() if opts is None else (opts,)))

    def shutdown(self) -> None:
        """Close the connections."""


class SendingGroup(NeuronGroup):
    """A release with send and receive."""

    def send(self, tensors: Any, rank: int, tag: int = 0) -> Any:
        """Send a tensor."""
        return self._gloo.send(self._see("send", list(tensors)), rank, tag)

    def recv(self, tensors: Any, rank: int, tag: int = 0) -> Any:
        """Receive a tensor."""
        return self._gloo.recv(self._see("recv", list(tensors)), rank, tag)


def clear() -> dict[str, int]:
    """Return the collectives since the last call."""
    found = dict(COLLECTIVES)
    COLLECTIVES.clear()
    return found
