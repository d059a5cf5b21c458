"""Inputs of the cost model: one training step of a model, in one layout, with one software, on one kind of device.

    family of a chip -> ChipFamily: names under which its constants are looked up, the nearest first
    ModelShape, StepLayout, SoftwareProfile, DeviceSpec, OptimizerCost -> Workload (one step)
        -> WorkloadColumns (many steps: the same field names, one array per field)
            -> block_products, layer_weights, rank_weights: sizes that several formulas need

The cost formulas take columns, so that thousands of layouts cost a few array operations. The same formulas compute
published runs, layouts of a search and a layout given by the user.

Chips of a family share the constants of the time model. A family without published runs takes those of its nearest
relative. A plan states why, and its predictions get a wider range.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import inf
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

ALL = "all"
"""Name of values that all families share (constants.yaml)."""


@dataclass(frozen=True)
class ChipFamily:
    """A family of chips, and whose constants it takes."""

    name: str  # in the hardware catalog
    like: str = ""  # family whose constants it takes; empty for its own
    reason: str = ""  # why those
    spread: float = 0.0  # standard deviation of the log of the step time that borrowed constants add
    compiled: bool = False  # a compiler builds complete programs for its chips
    first_kernels: bool = False  # torch has no FlashAttention 2 for its chips
    own_products: bool = False  # published runs gave the rate of its products, and nothing else

    @property
    def lookup(self) -> tuple[str, ...]:
        """Names under which its constants are found, the nearest first."""
        return tuple(filter(None, (self.name, self.like, ALL)))


# The spread of a relative by the same maker: as far as the constants of ampere, hopper and blackwell are from each
# other, about a fifth. Of another maker's: as the prior of `products` for Trainium's compiler, 0.3.
_SAME_MAKER, _OTHER_MAKER = 0.2, 0.3
CHIP_FAMILIES = {
    family.name: family
    for family in (
        ChipFamily("ampere"),
        ChipFamily("hopper"),
        ChipFamily("blackwell"),
        ChipFamily("trainium", compiled=True),
        ChipFamily("tpu", compiled=True),
        ChipFamily("measured"),
        ChipFamily(
            "volta",
            "ampere",
            "tensor cores of the generations before",
            _SAME_MAKER,
            first_kernels=True,
            own_products=True,
        ),
        ChipFamily("graphics", "ampere", "the same tensor-core instructions, on GDDR memory", _SAME_MAKER),
        ChipFamily(
            "cdna", "hopper", "a GPU with the same kind of kernels, by another maker", _OTHER_MAKER, own_products=True
        ),
        ChipFamily("xe", "ampere", "a GPU with the same kind of kernels, by another maker", _OTHER_MAKER),
        ChipFamily("gaudi", "tpu", "few large matrix units behind a graph compiler", _OTHER_MAKER, compiled=True),
    )
}
"""All families by name; ``measured`` is a machine measured by the user."""

FAMILIES = tuple(CHIP_FAMILIES)
"""Names of the families; columns of workloads hold their position here."""


def borrowed_constants(family: str) -> str:
    """Say whose constants a family takes, and why; empty for one with its own."""
    found = CHIP_FAMILIES[family]
    if not found.like:
        return ""
    fitted = "only the rate of products was" if found.own_products else "none were"
    return f"constants of {found.like} chips: {fitted} fitted to {family} chips ({found.reason})"


Column = NDArray[np.float64]
RecomputePolicy = Literal["none", "selective", "full"]
RECOMPUTE_POLICIES: tuple[RecomputePolicy, ...] = ("none", "selective", "full")

MATERIALIZED_SCORES, FLASH_ATTENTION_1, FLASH_ATTENTION_2, FLASH_ATTENTION_3 = range(4)
"""Attention kernels: scores written to memory; FlashAttention 1; 2; 3 and its equals (cuDNN, XLA, NKI)."""

FUSED_LOSS_BYTES = 20.0
"""Memory traffic of a loss in fused kernels per logit, forward and backward."""


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a decoder that step times depend on."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    gated: bool = True  # three matrices in the feed-forward block instead of two
    window: float = inf  # tokens that a token attends to


@dataclass(frozen=True)
class StepLayout:
    """Layout of a step: degrees, ZeRO stage, micro-batches, recomputation."""

    tensor: int
    pipeline: int
    context: int
    data: int
    virtual: int  # stages per pipeline rank
    zero: int  # ZeRO stage, 0 to 3
    micro_batch: float  # sequences, of a data-parallel rank
    global_batch: int  # sequences per step
    sequence: int  # tokens
    sequence_parallel: bool  # activations between blocks are sharded over the tensor group
    recompute: RecomputePolicy  # activation checkpointing policy
    split_backward: bool = False  # gradients of inputs and of weights are separate passes (zero bubble)
    # Backward waits for the inputs of attention and feed-forward to be gathered again. False for programs that hide
    # this gather behind a product: the constants of the time model include theirs.
    gathers_again: bool = False
    replicas: int = 1  # copies of the sharded state (hybrid sharding); their gradients are summed once per step


@dataclass(frozen=True)
class SoftwareProfile:
    """Properties of a training framework that step times depend on."""

    attention: int = FLASH_ATTENTION_2  # kernel, one of the four above
    attention_forward: float = 1.0  # time of its passes, relative to the constants of that kernel
    attention_backward: float = 1.0
    composed: bool = False  # norms and rotations are separate operations, as in eager code
    eager: bool = True  # the host launches every kernel itself, and may be too slow for small ones
    overlaps_data: bool = True  # data-parallel communication overlaps with passes
    eight_bit: bool = False  # the matrix products of decoder blocks run in fp8
    gradient_bytes: int = 4  # per element in a reduction
    loss_bytes: float = FUSED_LOSS_BYTES  # memory traffic per logit, forward and backward
    pads_rows: bool = False  # a compiler pads matrices whose rows are not multiples of 16 bytes
    adds_apart: bool = False  # own kernels add gradients of weights to the sums of the step, not the products


@dataclass(frozen=True)
class DeviceSpec:
    """Rates of one torch device and of its links, in FLOP/s, bytes and bytes per second."""

    family: str  # one of FAMILIES
    peak: float  # FLOP/s of matrix products in 16 bits
    peak_eight_bit: float  # 0 if not supported
    reached: float  # share of the peak that large products reach
    reached_eight_bit: float
    memory_bytes: float
    memory_rate: float
    link_rate: float  # sent by the device over the fast links
    domain: int  # devices that share fast links
    network_rate: float  # sent by an instance to others
    per_instance: int  # devices
    per_chip: int = 1  # devices
    # Relative to the family's constants; not 1 where these are a relative's, whose large products reach another share
    # of the peak.
    attention_rate: float = 1.0
    hop: float = 0.0  # latency of a step of a collective inside an instance, in seconds; 0 for the family's constant
    network_hop: float = 0.0  # the same between instances
    direct_bytes: float = 0.0  # below, a collective sends to all ranks at once; 0 if it is always a ring
    doubling_bytes: float = 0.0  # below, its distances double; 0 if it is always a ring


@dataclass(frozen=True)
class OptimizerCost:
    """Cost of the optimizer, all ranks together."""

    update_bytes: float = 30.0  # read and written per parameter
    matrix_flops: float = 0.0  # of updates of whole matrices, per layer
    matrix_message: float = 0.0  # bytes of a layer's whole matrices, gathered and returned; 0 if none is needed


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
        # Read by __getattr__, so that formulas name a field of any section as columns.field.
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

    def take(self, rows: NDArray[np.bool_] | NDArray[np.intp], **changed: Column) -> "WorkloadColumns":
        """Workloads in the given rows (mask or indices), with the ``changed`` fields."""
        # Not __init__, which reads workloads.
        taken = WorkloadColumns.__new__(WorkloadColumns)
        taken._columns = {name: column[rows] for name, column in self._columns.items()} | changed
        return taken

    def varied(self, name: str, values: Column) -> "WorkloadColumns":
        """The first workload, once for each value of one of its fields."""
        return self.take(np.zeros(len(values), dtype=np.intp), **{name: values})

    @property
    def micro_batches(self) -> Column:
        """Number in a step of a data-parallel rank, at least 1."""
        return np.maximum(1.0, self.global_batch / (self.micro_batch * self.data))

    @property
    def tokens(self) -> Column:
        """Tokens of a micro-batch on one rank."""
        return self.micro_batch * self.sequence / self.context

    @property
    def shards(self) -> Column:
        """Ranks that state may be sharded over: those of one replica."""
        return self.data * self.context / self.replicas

    @property
    def world(self) -> Column:
        return self.tensor * self.pipeline * self.context * self.data


def _deduplicate(objects: list[Any]) -> tuple[list[Any], NDArray[np.intp]]:
    """The distinct objects, by identity, and for each of ``objects`` its index among them."""
    distinct = {id(item): item for item in objects}
    index_by_id = {identity: index for index, identity in enumerate(distinct)}
    return list(distinct.values()), np.array([index_by_id[id(item)] for item in objects], dtype=np.intp)


def block_products(columns: WorkloadColumns) -> tuple[tuple[Column, Column], ...]:
    """Return (output, input) width on one tensor rank of a block's products: qkv, output, gate and up, down."""
    queries = columns.heads * columns.head_dim / columns.tensor
    # A kv head is never split: with fewer than tensor ranks, each rank has one.
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
    """Elements of the weight matrices on the fullest rank, with its embedding or head (or both)."""
    ends = np.where(columns.pipeline > 1, 1.0, 2.0) * columns.vocab * columns.hidden / columns.tensor
    weights: Column = np.ceil(columns.layers / columns.pipeline) * layer_weights(columns) + ends
    return weights
