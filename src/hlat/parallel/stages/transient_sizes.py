"""Sizes of the transient tensors of a rank (activations, gradients, logits, buffers), by purpose.

    step shape, ends of the rank --model/activations.py--> SavedBytes: activations that a micro-batch saves
    step shape, kernels of the device --backward_memory.py--> BlockBytes: while a block runs; peaks of head and loss
        -> TransientSizes

``EagerKernels`` are the properties in which the kernels of devices differ. A search asks for the same shapes thousands
of times, so the counts are cached.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from hlat.activation_checkpointing import recomputed_steps
from hlat.config import ModelConfig
from hlat.model import (
    RECOMPUTABLE,
    Axis,
    GradientSum,
    ModelShard,
    RankWorkload,
    activation_bytes,
    axis_share,
    block_share,
    element_share,
    head_sums_shape,
    model_spec,
)
from hlat.parallel.layout import StepShape
from hlat.parallel.stages.backward_memory import (
    CONTEXT_TENSORS,
    CORE_STEPS,
    BlockTensors,
    EndTensors,
    Peak,
    backward_peak,
    embedding_peak,
    final_norm_peak,
    forward_bytes,
    input_peak,
    loss_backward_bytes,
    loss_peak,
    weight_peak,
)
from hlat.precision import MODES


@dataclass(frozen=True)
class EagerKernels:
    """Properties of a device's eager kernels that decide temporary memory."""

    # Norms, rotations, SwiGLU and loss are one pass each, without temporary tensors (``model.kernels``)
    fused: bool = False
    masks: bool = False  # context-parallel attention to positions of other ranks builds masks
    head_sums: bool = False  # backward of attention has gradients by keys and values from each query head, in fp32
    rounds: bool = False  # the embedding's gradient is accumulated in fp32 where its weights are bf16


ACCELERATOR = EagerKernels()  # kernels of GPUs and other accelerators


_FP32 = 4
_HEAD_TENSORS = ("final_norm", "loss_by_hidden", "loss_by_head")


@dataclass(frozen=True)
class SavedBytes:
    """Bytes of activations that a micro-batch saves on a rank."""

    per_layer: float  # with the activation checkpointing policy
    at_entry: float  # outside of layers, without those of final norm, head and loss: kept until the pass ends
    final_norm: float
    by_loss: float  # the gradients that the loss saves


@dataclass(frozen=True)
class BlockBytes:
    """Most bytes that passes of a block have beyond what its forward pass saves."""

    forward: float  # at the end of a forward pass
    whole: Peak  # of a backward pass that is not split
    by_inputs: Peak  # of the first half of a split one
    by_weights: Peak  # of its second half


def saved_bytes(step: StepShape, ends: tuple[bool, bool], kernels: EagerKernels) -> SavedBytes:
    """Count the bytes that a micro-batch saves on a rank; ``ends``: it has the embedding, it has the head."""
    return _saved_bytes(_Passed.of(step, ends, kernels))


def block_bytes(step: StepShape, kernels: EagerKernels, cast: float, kept: float) -> BlockBytes:
    """Compute the most bytes that passes of a block have beyond what its forward pass saves; see ``BlockTensors``."""
    return _block_bytes(_Passed.of(step, (False, False), kernels), cast, kept, kernels.fused, kernels.head_sums)


class _ById:
    """A model section as a cache key, compared by identity."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model

    def __hash__(self) -> int:
        return id(self.model)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.model is self.model


class _Passed(NamedTuple):
    """Everything that the activations of a micro-batch in a layer follow from: the key of the caches."""

    model: _ById
    sequence: int
    mode: str
    micro_batch: int
    shard: ModelShard
    shared: tuple[bool, int, bool, bool, bool]  # the other fields of ``RankWorkload``
    recomputed: frozenset[str]

    @classmethod
    def of(cls, step: StepShape, ends: tuple[bool, bool], kernels: EagerKernels) -> "_Passed":
        layout = step.layout
        return cls(
            _ById(step.model),
            step.sequence,
            step.mode,
            step.micro_batch,
            ModelShard(0, layout.tensor, range(1), embedding=ends[0], head=ends[1]),
            (layout.sequence_parallel, layout.context, not step.sharded, kernels.masks, step.isolated),
            # With a budget the caller limits these bytes; here nothing is recomputed.
            recomputed_steps(step.policy, step.parallel) if step.budget is None else frozenset(),
        )

    def saving(self, recomputed: frozenset[str]) -> tuple[ModelConfig, int, int, str, frozenset[str], RankWorkload]:
        """Return the arguments of ``activation_bytes``."""
        workload = RankWorkload(self.shard, *self.shared)
        return self.model.model, self.micro_batch, self.sequence, self.mode, recomputed, workload


@lru_cache(maxsize=65536)
def _saved_bytes(passed: _Passed) -> SavedBytes:
    saved = activation_bytes(*passed.saving(passed.recomputed))
    ends = saved.ends
    entry = sum(size for name, size in ends.items() if name not in _HEAD_TENSORS)
    by_loss = ends.get("loss_by_hidden", 0) + ends.get("loss_by_head", 0)
    return SavedBytes(saved.per_layer, entry, ends.get("final_norm", 0), by_loss)


@lru_cache(maxsize=65536)
def _block_bytes(passed: _Passed, cast: float, kept: float, fused: bool, head_sums: bool) -> BlockBytes:
    model, sequence, mode, micro_batch, shard, shared, recomputed = passed
    config, tensor = model.model, shard.tensor_count
    everything, saved = (activation_bytes(*passed.saving(steps)).layer for steps in (frozenset[str](), recomputed))
    gathers, context = shared[0] and tensor > 1, shared[1]
    item = MODES[mode].compute.itemsize
    size = micro_batch * sequence / context * item
    inside, keys = size * config.hidden_size, size * axis_share(config, Axis.KEYS, tensor)
    if context > 1:  # recomputed keys and values are those of this rank, before they are gathered
        everything |= {"k": round(keys), "v": round(keys)}
    tensors = BlockTensors(
        saved=saved,
        recomputed={
            step: _missing(everything, saved, _names(config, step)) for step in RECOMPUTABLE if step in recomputed
        },
        stream=inside / (tensor if gathers else 1),
        inside=inside,
        queries=size * axis_share(config, Axis.QUERIES, tensor),
        keys=keys,
        inner=size * axis_share(config, Axis.INNER, tensor),
        item=item,
        weights=_weights(config, lambda spec: element_share(config, spec, tensor)),
        gathers=gathers,
        reduces=tensor > 1 and not gathers,
        reorders=micro_batch > 1,
        cast=cast,
        kept=kept,
        fused=fused,
        head_sums=head_sums * _head_sums(config, micro_batch, sequence, tensor),
    )
    return BlockBytes(forward_bytes(tensors), backward_peak(tensors), input_peak(tensors), weight_peak(tensors))


def _head_sums(config: ModelConfig, rows: int, sequence: int, tensor: int) -> float:
    """Bytes of the gradients by keys and values of complete rows from each query head of a rank."""
    heads = axis_share(config, Axis.QUERIES, tensor) / config.n_head_dim
    return 2 * heads * prod(head_sums_shape(rows, 1, sequence, config.n_head_dim)) * _FP32


def _missing(everything: dict[str, int], saved: dict[str, int], names: set[str]) -> dict[str, float]:
    return {name: float(size) for name, size in everything.items() if name in names and name not in saved}


def _names(config: ModelConfig, step: str) -> set[str]:
    """Names of the tensors that recomputing a step makes."""
    spec = model_spec(config)
    tensors = {tensor.name for tensor in spec.saved if step in tensor.freed_by}
    if step in CORE_STEPS:
        tensors |= CONTEXT_TENSORS
    return tensors | {f"{parameter.step}_weight_copy" for parameter in spec.block if parameter.freed_by == step}


def _weights(config: ModelConfig, elements: Callable[..., float]) -> dict[str, tuple[float, ...]]:
    """Elements of each weight of a block's matrix products on a rank, in the order of backward."""
    found: dict[str, tuple[float, ...]] = {}
    for parameter in model_spec(config).block:
        size = sum(elements(tensor) for tensor in parameter.tensors if tensor.is_hidden_matrix)
        if size:
            found[parameter.step] = (size, *found.get(parameter.step, ()))
    return found


@dataclass(frozen=True)
class TransientSizes:
    """Transient bytes of a rank, by purpose."""

    per_pass: float  # activations that a micro-batch saves in one stage
    per_layer: float  # the same in one layer
    at_entry: float  # outside of blocks, until its pass ends
    final_norm: float  # activations that the final norm saves; 0 without head
    by_loss: float  # gradients that the loss saves
    block: BlockBytes  # temporary tensors while a block runs, beyond its saved activations
    embedding: float | None  # temporary tensors while the embedding's gradient is computed; None without embedding
    loss: float | None  # temporary tensors of head and loss in the forward pass; None without head
    loss_backward: float  # temporary tensors of head and loss in the backward pass
    norm: float  # temporary tensors of the final norm in the backward pass
    head_waits: bool  # the gradient of a tied head waits in autograd for that of the embedding
    head_gradient: float  # from the backward pass of the loss on, if it takes memory of its own
    first_head_gradient: float  # the same in the first pass of a stage, whose gradients do not exist yet
    split_layer: float  # of a layer: what the first half of a split backward pass keeps for the weight gradients
    split_pass: float  # the same of a stage
    split_received: float  # those of a pass that are in the receive buffer of a message
    split_norm: float  # that of the final norm, the gradient by its output; 0 without head
    largest_gradient: float  # of a parameter
    block_gradient: float  # as it is stored
    end_gradient: float  # of embedding and head, as it is stored
    gradients: float  # of one stage
    gathered: float  # parameters of a sharded block, if they are freed after each pass
    block_gather: float  # buffer in which parameters of a sharded block are gathered
    last_gather: float  # such buffers that FSDP2 keeps from a forward pass of a pipeline stage, until its next gather
    block_kept: float  # gradients of a sharded block before they are reduced or accumulated
    block_reduced: float  # buffer in which gradients of a sharded block are reduced
    end_kept: float  # as ``block_kept`` for embedding and head, or for each of them if they are gathered apart
    end_reduced: float  # as ``block_reduced``, likewise
    head_freed: float  # gathered head, freed after its backward pass; 0 if it stays until that of the embedding
    message: float  # between stages
    virtual: int  # number of stages


def transient_sizes(
    step: StepShape, layers: float, ends: tuple[bool, bool], gradients: float, kernels: EagerKernels
) -> TransientSizes:
    """Count the transient tensors of a rank with this many layers; ``ends``: it has the embedding, it has the head."""
    model, mode, layout = step.model, MODES[step.mode], step.layout
    saved = saved_bytes(step, ends, kernels)
    tokens = step.micro_batch * step.sequence / layout.context
    item, stored = mode.compute.itemsize, (mode.compute if step.sharded else mode.weights).itemsize
    gathers = layout.sequence_parallel and layout.tensor > 1
    at_ends = EndTensors(
        model,
        layout.tensor,
        tokens,
        item,
        stored,
        gathers,
        reorders=step.micro_batch > 1,
        rounds=kernels.rounds,
        fused=kernels.fused,
    )
    block = block_share(model, layout.tensor)
    split = tokens * item * _split_elements(model, layout.tensor, layout.sequence_parallel)
    message = tokens * item * model.hidden_size / (layout.tensor if layout.sequence_parallel else 1)
    accumulates = step.micro_batches > 1  # into gradients that an earlier micro-batch has made
    # Without FSDP2 a gradient is cast to the dtype of the weight, and then it is the accumulated one or added to it.
    cast = stored if stored != item else 0
    first_kept = item if step.sharded else mode.gradients.itemsize
    whole = not step.sharded or layout.pipeline > 1 or layout.zero == 1  # gradients between micro-batches
    in_place = accumulates and whole and (not step.sharded or mode.compute == mode.gradients)
    kept = 0 if in_place else first_kept
    tied = model.tie_embeddings and all(ends)  # one matrix on this rank
    matrices = 1 if tied or step.gathers_ends_apart else sum(ends)
    # A tied head's gradient waits in autograd for that of the embedding, whatever is accumulated later.
    waiting = at_ends.matrix * stored if tied else 0.0
    first_head = waiting or ends[1] * at_ends.matrix * first_kept
    sharing = step.shards if step.sharded and layout.pipeline == 1 and (layout.zero > 1 or not accumulates) else 1
    reduced = mode.reduction.itemsize if step.sharded else 0
    return TransientSizes(
        per_pass=(layers * saved.per_layer + saved.at_entry) / step.virtual,
        per_layer=saved.per_layer,
        at_entry=saved.at_entry,
        final_norm=saved.final_norm,
        by_loss=saved.by_loss,
        block=block_bytes(step, kernels, cast, kept),
        embedding=embedding_peak(at_ends) if ends[0] else None,
        loss=loss_peak(at_ends) if ends[1] else None,
        loss_backward=loss_backward_bytes(at_ends),
        norm=final_norm_peak(at_ends),
        head_waits=bool(waiting),
        head_gradient=waiting if in_place else first_head,
        first_head_gradient=first_head,
        split_layer=split,
        split_pass=layers / step.virtual * split,
        # The gradient by a stage's output is that of its last product, unless that has a gathered copy.
        split_received=message if gathers else 0.0,
        split_norm=ends[1] * at_ends.stream,
        largest_gradient=max(_largest_parameter(model, layout.tensor), at_ends.matrix * any(ends))
        * mode.gradients.itemsize,
        block_gradient=block * mode.gradients.itemsize / sharing,
        end_gradient=at_ends.matrix * mode.gradients.itemsize / sharing,
        gradients=gradients / step.virtual,
        # Several stages of a rank gather all their blocks at once: they are among the parameters within a step.
        gathered=block * item if layout.zero == 3 and step.sharded and step.virtual == 1 else 0.0,
        block_gather=block * item if step.sharded else 0.0,
        last_gather=block * item * min(2, step.virtual) if layout.zero == 3 and step.sharded else 0.0,
        block_kept=block * kept if step.sharded else 0.0,
        block_reduced=block * reduced,
        end_kept=matrices * at_ends.matrix * item if step.sharded else 0.0,
        end_reduced=matrices * at_ends.matrix * reduced,
        head_freed=at_ends.matrix * item if step.gathers_ends_apart else 0.0,
        message=message,
        virtual=step.virtual,
    )


@lru_cache(maxsize=1024)
def _split_elements(model: ModelConfig, count: int, sequence_parallel: bool) -> float:
    """Elements per token and layer between the halves of a split backward pass: outputs of products and norms."""
    tensors = model_spec(model).block_tensors
    products = sum(axis_share(model, tensor.rows, count) for tensor in tensors if tensor.is_product)
    norms = sum(
        axis_share(model, tensor.rows, count) for tensor in tensors if tensor.gradient_sum is GradientSum.SEQUENCE
    )
    return products + norms / (count if sequence_parallel else 1)


@lru_cache(maxsize=1024)
def _largest_parameter(model: ModelConfig, count: int) -> float:
    return max(sum(element_share(model, tensor, count) for tensor in each.tensors) for each in model_spec(model).block)
