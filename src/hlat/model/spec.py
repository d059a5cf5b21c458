"""The description of an architecture, tensor by tensor, and the shard of a model that one process builds.

    model section --architectures--> ModelSpec(embedding, block, norm, head, saved)
        --> row layouts and Hugging Face names, initial values, counts, gradient sums, activation bytes
    model section, ModelShard --> its layers; of each layer query heads, kv heads, intermediate columns, vocabulary rows
    axis, model section, ModelShard --axis_range--> first index, number of indices, size of the complete axis

A parameter of a module has one canonical (Hugging Face) tensor, or several that are fused. A tensor's axes say how
tensor parallelism shards it. A tensor that no axis shards is stored by every tensor rank, and has to state which ranks
compute different terms of its gradient. Everything that depends on the parameters of a model is a function of this
description, so that an architecture is described once.

A shard is defined by indices into the model only. It does not depend on the number of processes or on ranks.
"""

import math
from dataclasses import dataclass
from enum import Enum, auto

from hlat.config import ModelConfig


class Axis(Enum):
    """A dimension of a tensor, and how tensor parallelism shards it."""

    WIDTH = auto()  # width of the residual stream: not sharded
    HEAD = auto()  # width of one head: not sharded
    QUERIES = auto()  # all query heads: sharded by heads
    HEADS = auto()  # query heads, one number each: sharded by heads
    KEYS = auto()  # all key (or value) heads: sharded by heads; copied where there are more ranks than heads
    INNER = auto()  # intermediate columns of the feed-forward layer: sharded evenly
    VOCABULARY = auto()  # rows of the vocabulary: sharded in ranges whose sizes differ by at most one


# Axes that tensor parallelism shards
SHARDED = frozenset({Axis.QUERIES, Axis.HEADS, Axis.KEYS, Axis.INNER, Axis.VOCABULARY})


class GradientSum(Enum):
    """Ranks that compute different terms of a tensor's gradient, which have to be summed after backward."""

    NONE = auto()  # each rank computes the complete gradient of the rows that it stores
    SEQUENCE = auto()  # with sequence parallelism the tensor ranks: each has the term of its shard of the sequence
    TENSOR = auto()  # the tensor ranks: each has the term of its heads
    KEY_COPIES = auto()  # tensor ranks with copies of the same kv head: each has the term of its query heads
    # The first and the last pipeline stage, if the head is tied: the terms of the lookup and of the logits
    TIED = auto()


class Initial(Enum):
    """Distribution of a tensor's initial values."""

    NORMAL = auto()  # Normal(0, ``model.init_std``)
    RESIDUAL = auto()  # the same, scaled for projections into the residual stream if ``model.init_scaled_outputs``
    ONES = auto()
    ZEROS = auto()


class Component(Enum):
    """Component of the model that a tensor's parameters are counted under."""

    EMBEDDING = auto()
    ATTENTION = auto()
    FEED_FORWARD = auto()
    NORMS = auto()
    HEAD = auto()


class Fusion(Enum):
    """Interleaving of the tensors of a parameter: the number of groups of rows, each with rows of every tensor."""

    SINGLE = auto()  # one group
    KEY_HEADS = auto()  # one group per kv head
    GATE_UP = auto()  # ``gate_up_groups`` of the feed-forward layer


@dataclass(frozen=True)
class TensorSpec:
    """A canonical tensor.

    Raises:
        ValueError: the gradient sum does not follow from the axes.
    """

    name: str  # canonical; in a block without the prefix ``model.layers.N.``
    rows: Axis
    columns: Axis | None  # None for a vector
    component: Component  # that it is counted under
    initial: Initial = Initial.NORMAL
    gradient_sum: GradientSum = GradientSum.NONE  # ranks whose terms of the gradient are summed
    is_added: bool = False  # its result is what half of a block adds to the residual stream

    def __post_init__(self) -> None:
        if self.gradient_sum not in self._possible_sums():
            names = ", ".join(sorted(possible.name for possible in self._possible_sums()))
            raise ValueError(f"{self.name}: gradient_sum {self.gradient_sum.name} is wrong for its axes; use {names}")

    def _possible_sums(self) -> set[GradientSum]:
        axes = {self.rows, self.columns}
        # Every tensor rank stores it, so it must be said which of them have different terms of its gradient.
        if not axes & SHARDED:
            return {GradientSum.SEQUENCE, GradientSum.TENSOR}
        if Axis.KEYS in axes:
            return {GradientSum.KEY_COPIES}
        return {GradientSum.NONE, GradientSum.TIED} if Axis.VOCABULARY in axes else {GradientSum.NONE}

    @property
    def replicated(self) -> bool:
        """True if every tensor rank stores all of it."""
        return not {self.rows, self.columns} & SHARDED

    @property
    def is_random(self) -> bool:
        """True if its initial values are random, else they are all the same."""
        return self.initial in (Initial.NORMAL, Initial.RESIDUAL)

    @property
    def is_bias(self) -> bool:
        return self.columns is None and self.component is not Component.NORMS

    @property
    def is_hidden_matrix(self) -> bool:
        """True for a matrix of an attention or feed-forward layer, between hidden activations."""
        return self.columns is not None and self.component in (Component.ATTENTION, Component.FEED_FORWARD)

    @property
    def is_product(self) -> bool:
        # An embedding is only looked up.
        return self.columns is not None and self.component is not Component.EMBEDDING


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter of a module: one canonical tensor, or several that are fused.

    Raises:
        ValueError: the gradients of its tensors are summed over different ranks, although not by rows.
    """

    name: str  # in the module; in a block without the prefix ``layers.N.``
    tensors: tuple[TensorSpec, ...]  # in their order within a group
    fusion: Fusion = Fusion.SINGLE
    step: str = ""  # name of its cast copy among the saved activations, without "_weight_copy"; "" outside of blocks
    freed_by: str = ""  # step of ``RECOMPUTABLE`` whose recomputation frees the cast copies; "" if none does

    def __post_init__(self) -> None:
        sums = {tensor.gradient_sum for tensor in self.tensors}
        # NONE and KEY_COPIES may be fused (q, k and v): the rows of the copies are summed as views.
        if len(sums) > 1 and not sums <= {GradientSum.NONE, GradientSum.KEY_COPIES}:
            raise ValueError(f"{self.name}: fuses tensors whose gradients are summed over different ranks")


# Steps of a block that can be recomputed in backward, in order of execution
RECOMPUTABLE = (
    "attention_input",
    "qkv",
    "attention_log_sum",
    "attention_output",
    "residual",
    "feed_forward_input",
    "gate_up",
    "inner",
    "down_weight_copy",
)


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that a block saves for backward."""

    name: str  # among the activation bytes
    freed_by: tuple[str, ...] = ()  # steps of ``RECOMPUTABLE`` whose recomputation frees it
    # Local sizes of these axes, added, are the tensor's elements per token; none for one element per token
    axes: tuple[Axis, ...] = ()
    statistics: bool = False  # fp32 numbers: one per head of the axes, or one per token
    between: bool = False  # is between attention and feed-forward, where sequence parallelism shards
    # Name of the tensor of which this one is a gathered copy with sequence parallelism; without, both are the same, and
    # this one takes no memory of its own. "" if it always has memory of its own.
    gathers: str = ""
    # Steps that start from this tensor. If not empty, no operation saves the tensor itself but its gathered copy, so
    # that with sequence parallelism it is kept only if one of these steps is recomputed.
    source_of: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelSpec:
    """The parameters of an architecture, and the tensors that its blocks save for backward."""

    embedding: ParameterSpec
    block: tuple[ParameterSpec, ...]  # parameters of every decoder block, in order of execution
    norm: ParameterSpec
    head: ParameterSpec | None  # None if it is tied to the embedding
    # Saved by every block, in order of execution; besides cast copies of weights and what context parallelism adds
    saved: tuple[SavedTensor, ...]

    @property
    def block_tensors(self) -> tuple[TensorSpec, ...]:
        """Canonical tensors of a block, in order of execution."""
        return tuple(tensor for parameter in self.block for tensor in parameter.tensors)


# The activation function reads gate and up with a stride of a group: down to 128 rows that costs nothing measurable on
# a CPU, at 96 it takes twice the time in bf16.
_MAX_GROUPS = 64
_MIN_GROUP_ROWS = 128


@dataclass(frozen=True)
class ModelShard:
    """A tensor-parallel shard of consecutive layers; by default the complete model."""

    tensor_index: int = 0
    tensor_count: int = 1  # shards of every layer
    layers: range | None = None  # indices of its decoder blocks; None for all of them
    embedding: bool = True  # if it has one, its input is token ids
    head: bool = True  # the final norm and the head

    def layer_range(self, config: ModelConfig) -> range:
        return range(config.layers) if self.layers is None else self.layers

    @property
    def has_full_layers(self) -> bool:
        """True if its layers are not sharded by tensor parallelism."""
        return self.tensor_count == 1


FULL_MODEL = ModelShard()


@dataclass(frozen=True)
class Heads:
    """The attention heads of a shard: two ranges of heads, by first head and number."""

    first_query: int
    queries: int
    first_kv: int
    kvs: int
    # Neighbouring shards may hold copies of one kv head, each with some of its query heads. The first counts and saves
    # it.
    owns_kv: bool


def shard_heads(config: ModelConfig, shard: ModelShard) -> Heads:
    """Return the query heads and kv heads of a shard; with more shards than kv heads, neighbours share one."""
    index, count, kv_heads = shard.tensor_index, shard.tensor_count, config.n_kv_heads
    assert config.heads % count == 0, "recipe validation checks this"
    queries = config.heads // count
    if count <= kv_heads:
        assert kv_heads % count == 0, "recipe validation checks this"
        kvs = kv_heads // count
        return Heads(index * queries, queries, index * kvs, kvs, True)
    assert count % kv_heads == 0, "recipe validation checks this"
    copies = count // kv_heads
    return Heads(index * queries, queries, index // copies, 1, index % copies == 0)


def kv_replication(config: ModelConfig, tensor_count: int) -> int:
    """Number of neighbouring tensor-parallel shards that hold a copy of the same kv head."""
    return max(1, tensor_count // config.n_kv_heads)


def intermediate_columns(config: ModelConfig, shard: ModelShard) -> range:
    """Columns of the feed-forward layer's intermediate activation that a shard has."""
    assert config.intermediate_size % shard.tensor_count == 0, "recipe validation checks this"
    size = config.intermediate_size // shard.tensor_count
    return range(shard.tensor_index * size, (shard.tensor_index + 1) * size)


def vocabulary_rows(config: ModelConfig, shard: ModelShard) -> range:
    """Rows of embedding and head that a shard has; shards differ by at most one row."""
    index, count, rows = shard.tensor_index, shard.tensor_count, config.vocab_size
    return range(index * rows // count, (index + 1) * rows // count)


def gate_up_groups(config: ModelConfig, shard: ModelShard = FULL_MODEL) -> int:
    """Number of groups of the fused gate and up matrix of a shard; one if the model's cannot be divided evenly."""
    inner = config.intermediate_size
    groups = math.gcd(config.n_kv_heads, inner)
    while 2 * groups <= _MAX_GROUPS and inner % (2 * groups) == 0 and inner // (2 * groups) >= _MIN_GROUP_ROWS:
        groups *= 2
    return groups // shard.tensor_count if groups % shard.tensor_count == 0 else 1


@dataclass(frozen=True)
class AxisRange:
    """First index, number and owner of the indices of an axis that a shard has."""

    first: int
    count: int
    owned: bool = True  # this shard counts and saves them; if several shards have copies, the first of them does


def axis_range(config: ModelConfig, shard: ModelShard, axis: Axis) -> AxisRange:
    """Return first index, count and owner of a shard's part of an axis."""
    if axis in (Axis.WIDTH, Axis.HEAD):
        return AxisRange(0, config.hidden_size if axis is Axis.WIDTH else config.n_head_dim, shard.tensor_index == 0)
    if axis in (Axis.QUERIES, Axis.HEADS, Axis.KEYS):
        heads, size = shard_heads(config, shard), config.n_head_dim
        if axis is Axis.HEADS:
            return AxisRange(heads.first_query, heads.queries)
        if axis is Axis.QUERIES:
            return AxisRange(heads.first_query * size, heads.queries * size)
        return AxisRange(heads.first_kv * size, heads.kvs * size, heads.owns_kv)
    indices = intermediate_columns(config, shard) if axis is Axis.INNER else vocabulary_rows(config, shard)
    return AxisRange(indices.start, len(indices))


def axis_size(config: ModelConfig, axis: Axis) -> int:
    """Return the number of indices of an axis of the complete model."""
    return axis_range(config, FULL_MODEL, axis).count


def axis_share(config: ModelConfig, axis: Axis, tensor_count: int) -> float:
    """Return the mean number of an axis' indices per tensor rank."""
    if axis in (Axis.WIDTH, Axis.HEAD):
        return axis_size(config, axis)
    if axis is Axis.KEYS:
        # A kv head is never split
        return max(config.n_kv_heads / tensor_count, 1.0) * config.n_head_dim
    return axis_size(config, axis) / tensor_count


def element_share(config: ModelConfig, tensor: TensorSpec, tensor_count: int) -> float:
    """Return the mean number of a tensor's elements per tensor rank."""
    columns = 1.0 if tensor.columns is None else axis_share(config, tensor.columns, tensor_count)
    return axis_share(config, tensor.rows, tensor_count) * columns


def local_elements(config: ModelConfig, shard: ModelShard, tensor: TensorSpec) -> int:
    """Count the elements of a tensor that a shard has."""
    columns = 1 if tensor.columns is None else axis_range(config, shard, tensor.columns).count
    return axis_range(config, shard, tensor.rows).count * columns
