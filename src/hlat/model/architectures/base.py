"""The protocol of an architecture, and the descriptions of the parts that architectures share.

llama.py, olmo2.py, ... -> Architecture(description of its parameters, class of its blocks, place of its norms)
names, options -> ParameterSpec and SavedTensor of norms, attention, feed-forward layer, embedding and head
"""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING

from pydantic import BaseModel

from hlat.config import ModelConfig, Section
from hlat.model.spec import (
    Axis,
    Component,
    Fusion,
    GradientSum,
    Initial,
    ModelSpec,
    ParameterSpec,
    SavedTensor,
    TensorSpec,
)

if TYPE_CHECKING:
    from hlat.model.layers import DecoderBlock


def block_class(name: str) -> Callable[[], type["DecoderBlock"]]:
    """Return what imports a class of blocks, by MODULE:CLASS in hlat.model, and with it torch."""
    return partial(pkgutil.resolve_name, f"hlat.model.{name}")


class NormPlace(Enum):
    """Place of the two norms of a block, around attention and around the feed-forward layer."""

    INPUT = auto()  # each normalises what its half of the block reads from the residual stream
    OUTPUT = auto()  # each normalises what its half of the block adds to the residual stream


@dataclass(frozen=True)
class Architecture:
    """An architecture: description, class of its blocks, and place of their norms."""

    describe: Callable[[ModelConfig], ModelSpec]  # returns the description of a model's parameters and saved tensors
    # Returns the class of its decoder blocks, built with (model section, model shard). A function, so that a
    # description, with which models are counted and planned, does not import torch.
    block: Callable[[], type["DecoderBlock"]]
    # Where the norms of a block are, if its blocks are ``DecoderBlock`` in everything else; the compiled decoding step
    # (``hlat.model.decoding``) then computes them. None if they are not: torch decodes.
    norm_place: NormPlace | None = None
    scales_embedding: bool = False  # True if embeddings are multiplied by the square root of their width
    # pydantic model of further fields of the model section, for an architecture of the user's own; they are in
    # ``own_options`` of the section
    Options: type[BaseModel] = Section


_CORE = ("attention_log_sum", "attention_output")  # steps that run core attention again


def decoder_spec(
    block: tuple[ParameterSpec, ...],
    saved: tuple[SavedTensor, ...],
    tie_embeddings: bool,
    norm: Initial = Initial.ONES,  # values of the final norm
) -> ModelSpec:
    """Describe a decoder with these blocks, a token embedding, a final norm and a head."""
    # A tied matrix has a term of its gradient on the first pipeline stage, and one on the last
    tied = GradientSum.TIED if tie_embeddings else GradientSum.NONE
    rows = (Axis.VOCABULARY, Axis.WIDTH)
    embedding = TensorSpec("model.embed_tokens.weight", *rows, Component.EMBEDDING, gradient_sum=tied)
    head = TensorSpec("lm_head.weight", *rows, Component.HEAD)
    return ModelSpec(
        embedding=ParameterSpec("embedding.weight", (embedding,)),
        block=block,
        norm=stream_norm("norm.weight", "model.norm.weight", initial=norm),
        head=None if tie_embeddings else ParameterSpec("head.weight", (head,)),
        saved=saved,
    )


def stream_norm(
    name: str,
    canonical: str,
    step: str = "",
    freed_by: str = "",
    initial: Initial = Initial.ONES,
    is_added: bool = False,
) -> ParameterSpec:
    """Describe a norm of the residual stream, or of what is added to it."""
    tensor = TensorSpec(canonical, Axis.WIDTH, None, Component.NORMS, initial, GradientSum.SEQUENCE, is_added)
    return ParameterSpec(name, (tensor,), step=step, freed_by=freed_by)


def projections(kind: str, coalesce: bool) -> tuple[ParameterSpec, ...]:
    """Describe weights or biases of the projections to queries, keys and values: one parameter or three."""
    columns, initial = (Axis.WIDTH, Initial.NORMAL) if kind == "weight" else (None, Initial.ZEROS)
    axes = {"q": Axis.QUERIES, "k": Axis.KEYS, "v": Axis.KEYS}
    sums = {Axis.QUERIES: GradientSum.NONE, Axis.KEYS: GradientSum.KEY_COPIES}
    tensors = {
        name: TensorSpec(f"self_attn.{name}_proj.{kind}", rows, columns, Component.ATTENTION, initial, sums[rows])
        for name, rows in axes.items()
    }
    parameters = {"qkv": tuple(tensors.values())} if coalesce else {name: (tensors[name],) for name in tensors}
    return tuple(
        ParameterSpec(f"attention.{name}.{kind}", its, Fusion.KEY_HEADS, "qkv", "qkv")
        for name, its in parameters.items()
    )


def sinks() -> ParameterSpec:
    """Describe the sinks of query heads: a score of each."""
    tensor = TensorSpec("self_attn.sinks", Axis.HEADS, None, Component.ATTENTION)
    return ParameterSpec("attention.sinks", (tensor,), step="attention_output", freed_by="attention_output")


def added_bias(name: str, canonical: str, component: Component) -> ParameterSpec:
    """Describe the bias of a projection into the residual stream, which is added behind the sum over tensor ranks."""
    tensor = TensorSpec(canonical, Axis.WIDTH, None, component, Initial.ZEROS, GradientSum.SEQUENCE, is_added=True)
    return ParameterSpec(name, (tensor,))


def head_norms(initial: Initial = Initial.ONES) -> tuple[ParameterSpec, ...]:
    """Describe norms of each query head and of each key head, with a weight that all heads share."""
    return tuple(_head_norm(name, initial) for name in ("q_norm.weight", "k_norm.weight"))


def _head_norm(name: str, initial: Initial) -> ParameterSpec:
    # All heads share the weight, and each tensor rank has some of them: a sum over these ranks.
    tensor = TensorSpec(f"self_attn.{name}", Axis.HEAD, None, Component.NORMS, initial, GradientSum.TENSOR)
    return ParameterSpec(f"attention.{name}", (tensor,), step="qk_norm", freed_by="qkv")


def output_projection(is_added: bool = True) -> ParameterSpec:
    """Describe the projection of attention into the residual stream; a norm between them is what is added."""
    axes = (Axis.WIDTH, Axis.QUERIES)
    output = TensorSpec("self_attn.o_proj.weight", *axes, Component.ATTENTION, Initial.RESIDUAL, is_added=is_added)
    return ParameterSpec("attention.output.weight", (output,), step="output", freed_by="residual")


def feed_forward(coalesce: bool, is_added: bool = True) -> tuple[ParameterSpec, ...]:
    """Describe the SwiGLU layer; ``is_added`` as of ``output_projection``."""
    axes = (Axis.WIDTH, Axis.INNER)
    down = TensorSpec("mlp.down_proj.weight", *axes, Component.FEED_FORWARD, Initial.RESIDUAL, is_added=is_added)
    last = ParameterSpec("feed_forward.down.weight", (down,), step="down", freed_by="down_weight_copy")
    return (*gate_up("weight", coalesce), last)


def gate_up(kind: str, coalesce: bool) -> tuple[ParameterSpec, ...]:
    """Describe weights or biases of the projections to gate and up: one parameter or two."""
    columns, initial = (Axis.WIDTH, Initial.NORMAL) if kind == "weight" else (None, Initial.ZEROS)
    tensors = {
        name: TensorSpec(f"mlp.{name}_proj.{kind}", Axis.INNER, columns, Component.FEED_FORWARD, initial)
        for name in ("gate", "up")
    }
    parameters = {"gate_up": tuple(tensors.values())} if coalesce else {name: (tensors[name],) for name in tensors}
    return tuple(
        ParameterSpec(f"feed_forward.{name}.{kind}", its, Fusion.GATE_UP, "gate_up", "gate_up")
        for name, its in parameters.items()
    )


ATTENTION_NORM = stream_norm("attention_norm.weight", "input_layernorm.weight", "attention_norm", "attention_input")
FEED_FORWARD_NORM = stream_norm(
    "feed_forward_norm.weight", "post_attention_layernorm.weight", "feed_forward_norm", "feed_forward_input"
)
"""The norms of LLaMA's blocks."""


def saved_by_block(coalesce: bool, qk_norm: bool, output_norms: bool = False) -> tuple[SavedTensor, ...]:
    """Describe what a block with norms before its halves saves: each norm its input, and a number for each token."""
    width = (Axis.WIDTH,)
    # Norms of what the halves add save that too. The second is never recomputed: that would take one more product.
    results = [
        (
            SavedTensor(f"{half}_result", freed_by, width, between=True),
            SavedTensor(f"{half}_output_norm_scale", freed_by, statistics=True, between=True),
        )
        for half, freed_by in ((("attention", ("residual",)), ("feed_forward", ())) if output_norms else ())
    ]
    return (
        SavedTensor("x", axes=width, between=True),
        SavedTensor("attention_norm_scale", ("attention_input",), statistics=True, between=True),
        SavedTensor("attention_input", ("attention_input",), width),
        *saved_by_attention(),
        *(results[0] if output_norms else ()),
        SavedTensor("residual", ("residual",), width, between=True),
        SavedTensor("feed_forward_norm_scale", ("feed_forward_input",), statistics=True, between=True),
        SavedTensor("feed_forward_input", ("feed_forward_input",), width),
        *saved_by_feed_forward(),
        *(saved_by_head_norms(coalesce) if qk_norm else ()),
        *(results[1] if output_norms else ()),
    )


def saved_by_attention() -> tuple[SavedTensor, ...]:
    """Describe the tensors that core attention and its output projection save."""
    queries, keys = (Axis.QUERIES,), (Axis.KEYS,)
    return (
        SavedTensor("q", ("qkv",), queries),
        SavedTensor("k", ("qkv",), keys),
        SavedTensor("v", ("qkv",), keys),
        SavedTensor("attention_output", ("attention_output",), queries),
        SavedTensor("attention_log_sum", _CORE, queries, statistics=True),
    )


def saved_by_feed_forward() -> tuple[SavedTensor, ...]:
    """Describe the tensors that the SwiGLU layer saves, besides its input."""
    return (
        SavedTensor("gate_up", ("gate_up",), (Axis.INNER, Axis.INNER)),
        SavedTensor("inner", ("inner",), (Axis.INNER,)),
    )


def saved_by_head_norms(coalesce: bool) -> tuple[SavedTensor, ...]:
    """Describe the tensors that norms of query and key heads save."""
    # The norms save their inputs. If fused, these are slices that keep the complete projection alive.
    values = (Axis.KEYS,) if coalesce else ()
    return (
        SavedTensor("qk_norm_input", ("qkv",), (Axis.QUERIES, Axis.KEYS, *values)),
        SavedTensor("qk_norm_scale", ("qkv",), (Axis.QUERIES, Axis.KEYS), statistics=True),
    )
