"""The description of an architecture: its parameters, tensor by tensor.

    model section --architectures--> ModelSpec(embedding, block, norm, head, saved)
        --> row layouts and Hugging Face names, initial values, counts, gradient sums, activation bytes

A parameter of a module has one canonical (Hugging Face) tensor, or several that are fused. A tensor's axes say how
tensor parallelism shards it; a tensor that no axis shards is stored by every tensor rank, and has to state which ranks
compute different terms of its gradient. Everything that depends on the parameters of a model is a function of this
description, so that an architecture is described once.
"""

from dataclasses import dataclass
from enum import Enum, auto


class Axis(Enum):
    """A dimension of a tensor, and how tensor parallelism shards it."""

    WIDTH = auto()
    """Width of the residual stream: not sharded."""
    HEAD = auto()
    """Width of one head: not sharded."""
    QUERIES = auto()
    """All query heads: sharded by heads."""
    KEYS = auto()
    """All key (or value) heads: sharded by heads; copied where there are more ranks than heads."""
    INNER = auto()
    """Intermediate columns of the feed-forward layer: sharded evenly."""
    VOCABULARY = auto()
    """Rows of the vocabulary: sharded in ranges whose sizes differ by at most one."""


SHARDED = frozenset({Axis.QUERIES, Axis.KEYS, Axis.INNER, Axis.VOCABULARY})
"""Axes that tensor parallelism shards."""


class GradientSum(Enum):
    """Ranks that compute different terms of a tensor's gradient, which have to be summed after backward."""

    NONE = auto()
    """None: each rank computes the complete gradient of the rows that it stores."""
    SEQUENCE = auto()
    """With sequence parallelism the tensor ranks: each has the term of its shard of the sequence."""
    TENSOR = auto()
    """The tensor ranks: each has the term of its heads."""
    KEY_COPIES = auto()
    """Tensor ranks with copies of the same kv head: each has the term of its query heads."""
    TIED = auto()
    """The first and the last pipeline stage, if the head is tied: the terms of the lookup and of the logits."""


class Initial(Enum):
    """Distribution of a tensor's initial values."""

    NORMAL = auto()
    """Normal(0, ``model.init_std``)."""
    RESIDUAL = auto()
    """The same, scaled for projections into the residual stream if ``model.init_scaled_outputs``."""
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

    SINGLE = auto()
    """One group."""
    KEY_HEADS = auto()
    """One group per kv head."""
    GATE_UP = auto()
    """``gate_up_groups`` of the feed-forward layer."""


@dataclass(frozen=True)
class TensorSpec:
    """A canonical tensor.

    Attributes:
        name: canonical name; in a block without the prefix ``model.layers.N.``.
        rows: axis of the rows.
        columns: axis of the columns; None for a vector.
        component: component that it is counted under.
        initial: initial values.
        gradient_sum: ranks whose terms of the gradient are summed.

    Raises:
        ValueError: the gradient sum does not follow from the axes: a tensor that every tensor rank stores has to name
            one, and so has one with kv heads; other tensors have none, unless they are tied.
    """

    name: str
    rows: Axis
    columns: Axis | None
    component: Component
    initial: Initial = Initial.NORMAL
    gradient_sum: GradientSum = GradientSum.NONE

    def __post_init__(self) -> None:
        if self.gradient_sum not in self._possible_sums():
            names = ", ".join(sorted(possible.name for possible in self._possible_sums()))
            raise ValueError(f"{self.name}: gradient_sum {self.gradient_sum.name} is wrong for its axes; use {names}")

    def _possible_sums(self) -> set[GradientSum]:
        axes = {self.rows, self.columns}
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
    def is_bias(self) -> bool:
        """True for a vector that is added to the result of a matrix product."""
        return self.columns is None and self.component is not Component.NORMS

    @property
    def is_hidden_matrix(self) -> bool:
        """True for a matrix of an attention or feed-forward layer, between hidden activations."""
        return self.columns is not None and self.component in (Component.ATTENTION, Component.FEED_FORWARD)

    @property
    def is_product(self) -> bool:
        """True if its elements are weights of a matrix product; an embedding is only looked up."""
        return self.columns is not None and self.component is not Component.EMBEDDING


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter of a module.

    Attributes:
        name: name in the module; in a block without the prefix ``layers.N.``.
        tensors: its canonical tensors, in their order within a group.
        fusion: groups of rows.
        step: name of its cast copy among the saved activations, without "_weight_copy"; "" outside of blocks.
        freed_by: step of ``RECOMPUTABLE`` whose recomputation frees the cast copies; "" if none does.

    Raises:
        ValueError: the gradients of its tensors are summed over different ranks, although not by rows.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    fusion: Fusion = Fusion.SINGLE
    step: str = ""
    freed_by: str = ""

    def __post_init__(self) -> None:
        sums = {tensor.gradient_sum for tensor in self.tensors}
        if len(sums) > 1 and not sums <= {GradientSum.NONE, GradientSum.KEY_COPIES}:
            raise ValueError(f"{self.name}: fuses tensors whose gradients are summed over different ranks")


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
"""Steps of a block that can be recomputed in backward, in order of execution."""


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that a block saves for backward.

    Attributes:
        name: name among the activation bytes.
        freed_by: steps of ``RECOMPUTABLE`` whose recomputation frees it.
        axes: axes whose local sizes, added, are its elements per token; none for one element per token.
        statistics: True for fp32 numbers: one per head of the axes, or one per token.
        between: True for a tensor between attention and feed-forward, which sequence parallelism shards.
        gathers: the tensor between them that it is with sequence parallelism a gathered copy of; without, it is the
            same tensor, and takes no memory of its own. "" if it always has memory of its own.
        source_of: steps that start from it. If not empty, no operation saves the tensor itself but its gathered copy,
            so that with sequence parallelism it is kept only if one of these steps is recomputed.
    """

    name: str
    freed_by: tuple[str, ...] = ()
    axes: tuple[Axis, ...] = ()
    statistics: bool = False
    between: bool = False
    gathers: str = ""
    source_of: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelSpec:
    """The parameters of an architecture, and the tensors that its blocks save for backward.

    Attributes:
        embedding: the token embedding.
        block: the parameters of every decoder block, in order of execution.
        norm: the final norm.
        head: the head; None if it is tied to the embedding.
        saved: tensors that every block saves for backward, besides cast copies of weights and what context parallelism
            adds; in order of execution.
    """

    embedding: ParameterSpec
    block: tuple[ParameterSpec, ...]
    norm: ParameterSpec
    head: ParameterSpec | None
    saved: tuple[SavedTensor, ...]

    @property
    def block_tensors(self) -> tuple[TensorSpec, ...]:
        """Canonical tensors of a block, in order of execution."""
        return tuple(tensor for parameter in self.block for tensor in parameter.tensors)
