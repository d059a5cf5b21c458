"""Inputs of the cost model: one training step of a model, in one layout, with one software, on one kind of device.

    family of a chip -> ChipFamily: names under which its constants are looked up, the nearest first
    ModelShape, StepLayout, SoftwareProfile, DeviceSpec, OptimizerCost -> Workload (one step)
        -> WorkloadColumns (many steps: the same field names, one array per field)
            -> block_products, layer_weights, rank_weights: sizes that several formulas need

The cost formulas take columns, so that thousands of layouts cost a few array operations. Published runs, layouts of a
search and a layout given by the user are all computed by the same formulas.

Chips of a family share the constants of the time model. A family without published runs takes those of its nearest
relative, for a reason that a plan states, and its predictions get a wider range.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import inf
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

GPU, ALL = "gpu", "all"
"""Names of values that NVIDIA's families share, and that all share (constants.yaml)."""


@dataclass(frozen=True)
class ChipFamily:
    """A family of chips.

    Attributes:
        name: name in the hardware catalog.
        like: family whose constants it takes; empty for one with constants of its own.
        reason: why those; empty for one with constants of its own.
        spread: standard deviation of the logarithm of the step time that borrowed constants add.
        compiled: True if a compiler builds complete programs for its chips.
        nvidia: True for NVIDIA's, some of whose constants are shared.
        first_kernels: True if torch has no FlashAttention 2 for its chips.
    """

    name: str
    like: str = ""
    reason: str = ""
    spread: float = 0.0
    compiled: bool = False
    nvidia: bool = False
    first_kernels: bool = False

    @property
    def lookup(self) -> tuple[str, ...]:
        """Names under which its constants are found, the nearest first."""
        return tuple(filter(None, (self.name, self.like, GPU * self.nvidia, ALL)))


# The spread of a relative by the same maker: as far as the constants of ampere, hopper and blackwell are from each
# other, about a fifth. Of another maker's: as the prior of `products` for Trainium's compiler, 0.3.
_SAME_MAKER, _OTHER_MAKER = 0.2, 0.3
CHIP_FAMILIES = {
    family.name: family
    for family in (
        ChipFamily("ampere", nvidia=True),
        ChipFamily("hopper", nvidia=True),
        ChipFamily("blackwell", nvidia=True),
        ChipFamily("trainium", compiled=True),
        ChipFamily("tpu", compiled=True),
        ChipFamily("measured"),
        ChipFamily(
            "volta", "ampere", "tensor cores of the generations before", _SAME_MAKER, nvidia=True, first_kernels=True
        ),
        ChipFamily("graphics", "ampere", "the same tensor-core instructions, on GDDR memory", _SAME_MAKER, nvidia=True),
        ChipFamily("cdna", "hopper", "a GPU with the same kind of kernels, by another maker", _OTHER_MAKER),
        ChipFamily("xe", "ampere", "a GPU with the same kind of kernels, by another maker", _OTHER_MAKER),
        ChipFamily("gaudi", "tpu", "few large matrix units behind a graph compiler", _OTHER_MAKER, compiled=True),
    )
}
"""All families by name; ``measured`` is a machine measured by the user."""

FAMILIES = tuple(CHIP_FAMILIES)
"""Names of the families; columns of workloads hold their position here."""


def borrowed_constants(family: str) -> str:
    """Say whose constants a family without published runs takes, and why; empty for a family with its own."""
    found = CHIP_FAMILIES[family]
    if not found.like:
        return ""
    return f"no published run of this chip family ({family}) was used: constants of {found.like} ({found.reason})"


Column = NDArray[np.float64]
RecomputePolicy = Literal["none", "selective", "full"]
RECOMPUTE_POLICIES: tuple[RecomputePolicy, ...] = ("none", "selective", "full")

MATERIALIZED_SCORES, FLASH_ATTENTION_1, FLASH_ATTENTION_2, FLASH_ATTENTION_3 = range(4)
"""Attention kernels: scores written to memory; FlashAttention 1; 2; 3 and its equals (cuDNN, XLA, NKI)."""

FUSED_LOSS_BYTES = 20.0
"""Memory traffic of a loss in fused kernels per logit, forward and backward."""


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a decoder.

    ``gated``: three matrices in the feed-forward block instead of two. ``window``: tokens that a token attends to.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    gated: bool = True
    window: float = inf


@dataclass(frozen=True)
class StepLayout:
    """Layout of a step: degrees, ZeRO stage, micro-batches, recomputation.

    Attributes:
        tensor, pipeline, context, data: parallel degrees.
        virtual: stages per pipeline rank.
        zero: ZeRO stage, 0 to 3.
        micro_batch: sequences per micro-batch of a data-parallel rank.
        global_batch: sequences per step.
        sequence: tokens per sequence.
        sequence_parallel: True if activations between blocks are sharded over the tensor group.
        recompute: activation checkpointing policy.
        split_backward: True if the schedule computes gradients of inputs and weights in separate passes (zero bubble).
        gathers_again: True if backward waits for the inputs of attention and feed-forward to be gathered again. False
            for programs that hide this gather behind a product; the constants of the time model include theirs.
        replicas: copies of the sharded state (hybrid sharding); gradients are summed across them once per step.
    """

    tensor: int
    pipeline: int
    context: int
    data: int
    virtual: int
    zero: int
    micro_batch: float
    global_batch: int
    sequence: int
    sequence_parallel: bool
    recompute: RecomputePolicy
    split_backward: bool = False
    gathers_again: bool = False
    replicas: int = 1


@dataclass(frozen=True)
class SoftwareProfile:
    """Properties of a training framework that step times depend on.

    Attributes:
        attention: attention kernel, one of the four above.
        attention_forward, attention_backward: time of its passes, relative to the constants of that kernel.
        fused: True if pointwise operations run in fused kernels (a compiler, Transformer Engine).
        composed: True if norms and rotations are composed of separate operations, as in eager code in Python.
        eager: True if the host launches every kernel itself, and may be too slow for small ones.
        overlaps_data: True if data-parallel communication overlaps with passes.
        eight_bit: True if the matrix products of decoder blocks run in fp8.
        early_stop: True if recomputation of a block stops before its last product, whose result is not needed.
        gradient_bytes: bytes per gradient element in a reduction.
        loss_bytes: memory traffic of the loss per logit, forward and backward: 20 bytes in fused kernels.
        pads_rows: True if a compiler pads matrices whose rows are not multiples of 16 bytes.
        adds_apart: True if kernels of their own add gradients of weights to the sums of the step, not the products.
    """

    attention: int = FLASH_ATTENTION_2
    attention_forward: float = 1.0
    attention_backward: float = 1.0
    fused: bool = False
    composed: bool = False
    eager: bool = True
    overlaps_data: bool = True
    eight_bit: bool = False
    early_stop: bool = False
    gradient_bytes: int = 4
    loss_bytes: float = FUSED_LOSS_BYTES
    pads_rows: bool = False
    adds_apart: bool = False


@dataclass(frozen=True)
class DeviceSpec:
    """Rates of one torch device and of its links, in FLOP/s, bytes and bytes per second.

    Attributes:
        family: chip family, one of ``FAMILIES``.
        peak, peak_eight_bit: peak rate of matrix products in 16 and 8 bits; the latter is 0 if not supported.
        reached, reached_eight_bit: share of that peak that large products reach.
        attention: rate of attention kernels, relative to what the constants of the family say; other than 1 where these
            are a relative's, of which large products reach another share of the peak.
        units: processors (streaming multiprocessors) over which the tiles of a product are distributed.
        memory_bytes, memory_rate: capacity and bandwidth of the device's memory.
        link_rate: bytes per second that the device sends over the fast links.
        domain: devices that share fast links.
        network_rate: bytes per second that an instance sends to other instances.
        per_instance: devices per instance.
        per_chip: devices per chip.
        hop, network_hop: latency in seconds of a step of a collective inside an instance and between instances; 0 for
            the constant of the family.
        direct_bytes, doubling_bytes: sizes of messages below which a collective sends to all ranks at once, and below
            which its distances double; 0 if it is always a ring.
    """

    family: str
    peak: float
    peak_eight_bit: float
    reached: float
    reached_eight_bit: float
    units: int
    memory_bytes: float
    memory_rate: float
    link_rate: float
    domain: int
    network_rate: float
    per_instance: int
    per_chip: int = 1
    attention_rate: float = 1.0
    hop: float = 0.0
    network_hop: float = 0.0
    direct_bytes: float = 0.0
    doubling_bytes: float = 0.0


@dataclass(frozen=True)
class OptimizerCost:
    """Cost of the optimizer, all ranks together.

    Attributes:
        update_bytes: bytes of memory read and written per parameter.
        matrix_flops: FLOPs of updates of whole matrices, per layer.
        matrix_message: bytes of all whole matrices of a layer, gathered and returned; 0 if none is needed whole.
    """

    update_bytes: float = 30.0
    matrix_flops: float = 0.0
    matrix_message: float = 0.0


@dataclass(frozen=True)
class Workload:
    """One step: model, layout, software, device and optimizer."""

    shape: ModelShape
    layout: StepLayout
    software: SoftwareProfile
    device: DeviceSpec
    optimizer: OptimizerCost = OptimizerCost()


_CODES: dict[str, tuple[str, ...]] = {"recompute": RECOMPUTE_POLICIES, "family": FAMILIES}


class WorkloadColumns:
    """Many workloads: each field as an array of float64. Strings become their index in the tuples above."""

    def __init__(self, workloads: Sequence[Workload]) -> None:
        self._columns: dict[str, Column] = {}
        for section in fields(Workload):
            # The workloads of a search share their shape, software and device: each object is read once.
            distinct, indices = _deduplicate([getattr(workload, section.name) for workload in workloads])
            for field in fields(distinct[0]):  # those of published runs have more than hlat's own
                codes = _CODES.get(field.name)
                values = [getattr(row, field.name) for row in distinct]
                numbers = [codes.index(value) for value in values] if codes is not None else values
                self._columns[field.name] = np.array(numbers, dtype=np.float64)[indices]

    def __getattr__(self, name: str) -> Column:
        try:
            return self.__dict__["_columns"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(name) from None

    def __len__(self) -> int:
        return len(self.layers)

    def take(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> "WorkloadColumns":
        """The workloads in the given rows (mask or indices)."""
        taken = WorkloadColumns.__new__(WorkloadColumns)
        taken._columns = {name: column[rows] for name, column in self._columns.items()}
        return taken

    def varied(self, name: str, values: Column) -> "WorkloadColumns":
        """The first workload, once for each value of one of its fields."""
        varied = self.take(np.zeros(len(values), dtype=np.intp))
        varied._columns[name] = values
        return varied

    @property
    def micro_batches(self) -> Column:
        """Micro-batches per step of a data-parallel rank, at least 1."""
        return np.maximum(1.0, self.global_batch / (self.micro_batch * self.data))

    @property
    def tokens(self) -> Column:
        """Tokens of a micro-batch on one rank."""
        return self.micro_batch * self.sequence / self.context

    @property
    def shards(self) -> Column:
        """Ranks that parameters, gradients and optimizer state may be sharded over: those of one replica."""
        return self.data * self.context / self.replicas

    @property
    def world(self) -> Column:
        """World size."""
        return self.tensor * self.pipeline * self.context * self.data


def _deduplicate(objects: list[Any]) -> tuple[list[Any], NDArray[np.intp]]:
    """The distinct objects, by identity, and for each of ``objects`` its index among them."""
    index_by_id: dict[int, int] = {}
    distinct: list[Any] = []
    indices = np.empty(len(objects), dtype=np.intp)
    for position, item in enumerate(objects):
        if id(item) not in index_by_id:
            index_by_id[id(item)] = len(distinct)
            distinct.append(item)
        indices[position] = index_by_id[id(item)]
    return distinct, indices


def block_products(columns: WorkloadColumns) -> tuple[tuple[Column, Column], ...]:
    """Return (output, input) width on one tensor rank of a block's products: qkv, output, gate and up, down.

    A kv head is never split: with fewer kv heads than tensor ranks, each rank has one.
    """
    queries = columns.heads * columns.head_dim / columns.tensor
    keys = np.maximum(columns.kv_heads / columns.tensor, 1.0) * columns.head_dim
    intermediate = columns.intermediate / columns.tensor
    return (
        (queries + 2 * keys, columns.hidden),
        (columns.hidden, queries),
        (intermediate * (1 + columns.gated), columns.hidden),
        (columns.hidden, intermediate),
    )


def layer_weights(columns: WorkloadColumns) -> Column:
    """Elements of the weight matrices of one layer on one tensor rank."""
    weights: Column = sum((rows * width for rows, width in block_products(columns)), np.zeros(len(columns)))
    return weights


def rank_weights(columns: WorkloadColumns) -> Column:
    """Elements of the weight matrices on the fullest rank, with its embedding or head (both without a pipeline)."""
    ends = np.where(columns.pipeline > 1, 1.0, 2.0) * columns.vocab * columns.hidden / columns.tensor
    weights: Column = np.ceil(columns.layers / columns.pipeline) * layer_weights(columns) + ends
    return weights
