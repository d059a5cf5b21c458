"""What a time or a memory is asked about: one training step of a model, cut in one way, on one kind of device.

    Workload (numbers of one case) -> columns(many works) -> WorkloadColumns: the same names, one array per name

The formulas of this room take columns, so that thousands of layouts cost as much as a few array operations, and a
published run, a layout of a search and a user's own layout go through the very same lines.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]
RecomputePolicy = Literal["none", "selective", "full"]
RECOMPUTE_POLICIES: tuple[RecomputePolicy, ...] = ("none", "selective", "full")

FAMILIES = ("ampere", "hopper", "blackwell", "trainium", "tpu", "measured")
"""Chips that constants are common to; ``measured`` is a machine of the user's own."""

MATERIALIZED_SCORES, FLASH_ATTENTION_1, FLASH_ATTENTION_2, FLASH_ATTENTION_3 = range(4)
"""Attention kernels: scores in memory; FlashAttention of 2022; of 2023; of 2024 (version 3, cuDNN, XLA, NKI)."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder in numbers. ``gated``: three matrices in the feed-forward half, not two."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    gated: bool = True


@dataclass(frozen=True)
class StepLayout:
    """How a step is cut: degrees, ZeRO stage, micro-batches, recomputation.

    Attributes:
        tensor, pipeline, context, data: degrees.
        virtual: stages per pipeline rank.
        zero: ZeRO stage, 0 to 3.
        micro_batch: sequences per pass.
        global_batch: sequences per step.
        sequence: tokens per sequence.
        sequence_parallel: whether what lies between blocks is cut over the tensor group.
        recompute: the policy of activation checkpointing.
        split_backward: whether the schedule takes backward passes apart (zero bubble).
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


@dataclass(frozen=True)
class SoftwareProfile:
    """What the program does that a time depends on.

    Attributes:
        attention: one of the kernels above.
        fused: whether what is not a product runs in fused kernels (a compiler, Transformer Engine).
        eager: whether the host starts every kernel by itself, and may be too slow for small ones.
        overlaps_tensor: whether tensor-parallel traffic overlaps with the products that it belongs to.
        overlaps_data: whether the traffic of data parallelism overlaps with passes.
        overlaps_context: whether the exchange of keys and values overlaps with attention.
        eight_bit: whether products of blocks are computed in fp8.
        early_stop: whether recomputing a block ends before its last product, whose result nobody needs.
        gradient_bytes: of a gradient on its way to other ranks.
    """

    attention: int = FLASH_ATTENTION_2
    fused: bool = False
    eager: bool = True
    overlaps_tensor: bool = False
    overlaps_data: bool = True
    overlaps_context: bool = False
    eight_bit: bool = False
    early_stop: bool = False
    gradient_bytes: int = 4


@dataclass(frozen=True)
class DeviceSpec:
    """One torch device and where it stands. FLOP per second, bytes, bytes per second.

    Attributes:
        family: one of ``FAMILIES``.
        peak, peak_eight_bit: of products in 16 and 8 bits; the latter 0 where there is none.
        reached, reached_eight_bit: the share of it that large products reach.
        units: processors that tiles of a product are dealt out to.
        memory_bytes, memory_rate: of the device.
        link_rate: that it sends over the fast links; ``domain`` devices share them.
        network_rate: that an instance of ``per_instance`` devices sends to others.
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


@dataclass(frozen=True)
class Workload:
    """One case."""

    shape: ModelShape
    split: StepLayout
    software: SoftwareProfile
    device: DeviceSpec


_PARTS = {"shape": ModelShape, "split": StepLayout, "software": SoftwareProfile, "device": DeviceSpec}
_CODES: dict[str, tuple[str, ...]] = {"recompute": RECOMPUTE_POLICIES, "family": FAMILIES}


class WorkloadColumns:
    """Many works: every field of their parts as an array of floats; words as their place in the tuples above."""

    def __init__(self, works: Sequence[Workload]) -> None:
        self._columns: dict[str, Column] = {}
        for part, kind in _PARTS.items():
            # Works of a search share shape, software and device: each object is read once.
            rows, places = _distinct([getattr(work, part) for work in works])
            for field in fields(kind):
                codes = _CODES.get(field.name)
                values = [getattr(row, field.name) for row in rows]
                numbers = [codes.index(value) for value in values] if codes is not None else values
                self._columns[field.name] = np.array(numbers, dtype=np.float64)[places]

    def __getattr__(self, name: str) -> Column:
        try:
            return self.__dict__["_columns"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(name) from None

    def __len__(self) -> int:
        return len(self.layers)

    def take(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> "WorkloadColumns":
        """Some of them."""
        taken = WorkloadColumns.__new__(WorkloadColumns)
        taken._columns = {name: column[rows] for name, column in self._columns.items()}
        return taken

    @property
    def micro_batches(self) -> Column:
        """ComputeTimes per step of a data-parallel rank."""
        return np.maximum(1.0, self.global_batch / (self.micro_batch * self.data))

    @property
    def tokens(self) -> Column:
        """Of a micro-batch, on a rank."""
        return self.micro_batch * self.sequence / self.context

    @property
    def shards(self) -> Column:
        """Ranks that the state may be sharded over."""
        return self.data * self.context

    @property
    def world(self) -> Column:
        """Processes."""
        return self.tensor * self.pipeline * self.context * self.data

    def __getstate__(self) -> dict[str, Column]:
        return self._columns

    def __setstate__(self, state: dict[str, Column]) -> None:
        self._columns = state


def _distinct(parts: list[object]) -> tuple[list[object], NDArray[np.intp]]:
    seen: dict[int, int] = {}
    rows: list[object] = []
    places = np.empty(len(parts), dtype=np.intp)
    for index, part in enumerate(parts):
        if id(part) not in seen:
            seen[id(part)] = len(rows)
            rows.append(part)
        places[index] = seen[id(part)]
    return rows, places


def layer_weights(columns: WorkloadColumns) -> Column:
    """Weights of the products of one layer on a rank."""
    queries, keys = columns.heads * columns.head_dim, columns.kv_heads * columns.head_dim
    attention = columns.hidden * (2 * queries + 2 * keys)
    feed_forward = (2 + columns.gated) * columns.hidden * columns.inner
    weights: Column = (attention + feed_forward) / columns.tensor
    return weights


def rank_weights(columns: WorkloadColumns) -> Column:
    """Weights that the rank with the most of them holds, its end of the model included."""
    ends = np.where(columns.pipeline > 1, 1.0, 2.0) * columns.vocab * columns.hidden / columns.tensor
    weights: Column = np.ceil(columns.layers / columns.pipeline) * layer_weights(columns) + ends
    return weights
