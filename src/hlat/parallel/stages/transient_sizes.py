"""Sizes of the transient tensors of a rank (activations, gradients, logits, buffers), by purpose.

    step shape, ends of the rank --model/activations.py--> SavedBytes: activations that a micro-batch saves
    step shape, kernels of the device --backward_memory.py--> BlockBytes: while a block runs; peaks of head and loss
        -> TransientSizes

``EagerKernels`` are the properties in which the kernels of devices differ. A search asks for the same shapes thousands
of times, so the counts are cached.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from hlat.activation_checkpointing import recomputed_steps
from hlat.config import ModelConfig
from hlat.model import (
    RECOMPUTABLE,
    ActivationBytes,
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
    CORE_STEPS,
    CORE_TENSORS,
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
    scores: bool = False  # attention keeps the scores of all pairs of positions


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


class ById:
    """A model section as a cache key, compared by identity."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model

    def __hash__(self) -> int:
        return id(self.model)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other.model is self.model


class Passed(NamedTuple):
    """Everything that the activations of a micro-batch in a layer follow from: the key of the caches."""

    model: ById
    sequence: int
    mode: str
    micro_batch: int
    ends: tuple[bool, bool]  # the rank has the embedding, it has the head
    tensor: int  # tensor-parallel ranks
    sequence_parallel: bool
    context: int  # context-parallel ranks
    sharded: bool  # by FSDP2
    masks: bool
    scores: bool
    isolated: bool
    recomputed: frozenset[str]

    @classmethod
    def of(cls, step: StepShape, ends: tuple[bool, bool], kernels: EagerKernels) -> "Passed":
        layout = step.layout
        return cls(
            ById(step.model),
            step.sequence,
            step.mode,
            step.micro_batch,
            ends,
            layout.tensor,
            layout.sequence_parallel,
            layout.context,
            step.sharded,
            kernels.masks,
            kernels.scores,
            step.isolated,
            # With a budget the caller limits these bytes; here nothing is recomputed.
            recomputed_steps(step.policy, step.parallel) if step.budget is None else frozenset(),
        )

    def activations(self, recomputed: frozenset[str]) -> ActivationBytes:
        shard = ModelShard(0, self.tensor, None, *self.ends)  # bytes of a layer are a mean over all
        shares = (shard, self.sequence_parallel, self.context)
        workload = RankWorkload(*shares, not self.sharded, self.masks, self.scores, self.isolated)
        return activation_bytes(self.model.model, self.micro_batch, self.sequence, self.mode, recomputed, workload)


@lru_cache(maxsize=65536)
def saved_bytes(passed: Passed) -> SavedBytes:
    """Count the bytes that a micro-batch saves on a rank."""
    saved = passed.activations(passed.recomputed)
    ends = saved.ends
    entry = sum(size for name, size in ends.items() if name not in _HEAD_TENSORS)
    by_loss = ends.get("loss_by_hidden", 0) + ends.get("loss_by_head", 0)
    return SavedBytes(saved.per_layer, entry, ends.get("final_norm", 0), by_loss)


@lru_cache(maxsize=65536)
def block_bytes(passed: Passed, kernels: EagerKernels, cast: float, kept: float) -> BlockBytes:
    """Compute the most bytes that passes of a block have beyond what its forward pass saves; see ``BlockTensors``."""
    config, micro_batch, recomputed = passed.model.model, passed.micro_batch, passed.recomputed
    tensor, context = passed.tensor, passed.context
    everything, saved = (passed.activations(steps).layer for steps in (frozenset[str](), recomputed))
    gathers = passed.sequence_parallel and tensor > 1
    item = MODES[passed.mode].compute.itemsize
    size = micro_batch * passed.sequence / context * item
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
        weights=_weights(config, tensor),
        gathers=gathers,
        reduces=tensor > 1 and not gathers,
        reorders=micro_batch > 1,
        cast=cast,
        kept=kept,
        fused=kernels.fused,
        head_sums=kernels.head_sums * _head_sums(config, micro_batch, passed.sequence, tensor),
        # With context parallelism two chunks of queries attend one after the other, the second to 2 C chunks of keys.
        scores=everything.get("attention_scores", 0) * (2 * context / (2 * context + 1) if context > 1 else 1.0),
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
        tensors |= CORE_TENSORS
    return tensors | {f"{parameter.step}_weight_copy" for parameter in spec.block if parameter.freed_by == step}


def _weights(config: ModelConfig, count: int) -> dict[str, tuple[float, ...]]:
    """Elements of each weight of a block's matrix products on a rank, in the order of backward."""
    found: dict[str, tuple[float, ...]] = {}
    for parameter in model_spec(config).block:
        size = sum(element_share(config, tensor, count) for tensor in parameter.tensors if tensor.is_hidden_matrix)
        if size:
            found[parameter.step] = (size, *found.get(parameter.step, ()))
    return found


class TransientSizes(NamedTuple):
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
    layout, accumulates = step.layout, step.micro_batches > 1
    sharing = step.shards if layout.pipeline == 1 and (layout.zero > 1 or not accumulates) else 1
    found = _sizes(
        Passed.of(step, ends, kernels), kernels, layout.zero, layout.pipeline > 1, accumulates, sharing, step.virtual
    )
    return found._replace(
        per_pass=(layers * found.per_layer + found.at_entry) / step.virtual,
        split_pass=layers / step.virtual * found.split_layer,
        gradients=gradients / step.virtual,
    )


@lru_cache(maxsize=65536)
def _sizes(
    passed: Passed,
    kernels: EagerKernels,
    zero: int,
    pipelined: bool,
    accumulates: bool,  # into gradients that an earlier micro-batch has made
    sharing: int,  # ranks that the gradients of a block and of the ends are sharded over
    virtual: int,
) -> TransientSizes:
    """Count the transient tensors of a rank, for no layers: the same for thousands of layouts of a search."""
    model, mode, tensor = passed.model.model, MODES[passed.mode], passed.tensor
    ends, sharded = passed.ends, passed.sharded
    saved = saved_bytes(passed)
    tokens = passed.micro_batch * passed.sequence / passed.context
    item, stored = mode.compute.itemsize, (mode.compute if sharded else mode.weights).itemsize
    gathers = passed.sequence_parallel and tensor > 1
    at_ends = EndTensors(
        model,
        tensor,
        tokens,
        item,
        stored,
        gathers,
        reorders=passed.micro_batch > 1,
        rounds=kernels.rounds,
        fused=kernels.fused,
    )
    block = block_share(model, tensor)
    message = tokens * item * model.hidden_size / (tensor if passed.sequence_parallel else 1)
    # Without FSDP2 a gradient is cast to the dtype of the weight, and then it is the accumulated one or added to it.
    cast = stored if stored != item else 0
    first_kept = item if sharded else mode.gradients.itemsize
    whole = not sharded or pipelined or zero == 1  # gradients between micro-batches
    in_place = accumulates and whole and (not sharded or mode.compute == mode.gradients)
    kept = 0 if in_place else first_kept
    tied = model.tie_embeddings and all(ends)  # one matrix on this rank
    ends_apart = sharded and zero == 3 and not pipelined and not model.tie_embeddings
    matrices = 1 if tied or ends_apart else sum(ends)
    # A tied head's gradient waits in autograd for that of the embedding, whatever is accumulated later.
    waiting = at_ends.matrix * stored if tied else 0.0
    first_head = waiting or ends[1] * at_ends.matrix * first_kept
    reduced = mode.reduction.itemsize if sharded else 0
    return TransientSizes(
        per_pass=0.0,
        per_layer=saved.per_layer,
        at_entry=saved.at_entry,
        final_norm=saved.final_norm,
        by_loss=saved.by_loss,
        block=block_bytes(passed._replace(ends=(False, False)), kernels, cast, kept),
        embedding=embedding_peak(at_ends) if ends[0] else None,
        loss=loss_peak(at_ends) if ends[1] else None,
        loss_backward=loss_backward_bytes(at_ends),
        norm=final_norm_peak(at_ends),
        head_waits=bool(waiting),
        head_gradient=waiting if in_place else first_head,
        first_head_gradient=first_head,
        split_layer=tokens * item * _split_elements(model, tensor, passed.sequence_parallel),
        split_pass=0.0,
        # The gradient by a stage's output is that of its last product, unless that has a gathered copy.
        split_received=message if gathers else 0.0,
        split_norm=ends[1] * at_ends.stream,
        largest_gradient=max(_largest_parameter(model, tensor), at_ends.matrix * any(ends)) * mode.gradients.itemsize,
        block_gradient=block * mode.gradients.itemsize / sharing,
        end_gradient=at_ends.matrix * mode.gradients.itemsize / sharing,
        gradients=0.0,
        # Several stages of a rank gather all their blocks at once: they are among the parameters within a step.
        gathered=block * item if zero == 3 and sharded and virtual == 1 else 0.0,
        block_gather=block * item if sharded else 0.0,
        last_gather=block * item * min(2, virtual) if zero == 3 and sharded else 0.0,
        block_kept=block * kept if sharded else 0.0,
        block_reduced=block * reduced,
        end_kept=matrices * at_ends.matrix * item if sharded else 0.0,
        end_reduced=matrices * at_ends.matrix * reduced,
        head_freed=at_ends.matrix * item if ends_apart else 0.0,
        message=message,
        virtual=virtual,
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
