"""Bytes of activations that a micro-batch saves on a rank, and the tensors of a block's backward pass.

    step shape, ends of the rank --model/derived/activations.py--> SavedBytes, BlockTensors

A search asks for the same shapes thousands of times, so the counts are cached.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from hlat.activation_checkpointing import recomputed_steps
from hlat.config import ModelConfig
from hlat.model import (
    RECOMPUTABLE,
    Axis,
    ModelShard,
    RankWorkload,
    activation_bytes,
    axis_share,
    element_share,
    head_sums_shape,
    model_spec,
)
from hlat.parallel.stages.eager_kernels import EagerKernels
from hlat.parallel.stages.memory.block_backward import backward_peak, forward_bytes, input_peak
from hlat.parallel.stages.memory.block_tape import CONTEXT_TENSORS, CORE_STEPS, BlockTensors, Peak
from hlat.parallel.stages.memory.weight_gradients import weight_peak
from hlat.parallel.stages.step_shape import StepShape
from hlat.precision import MODES

_FP32 = 4
_HEAD_TENSORS = ("final_norm", "loss_by_hidden", "loss_by_head")


@dataclass(frozen=True)
class SavedBytes:
    """Bytes of activations that a micro-batch saves on a rank.

    Attributes:
        per_layer: per layer, with the activation checkpointing policy.
        at_entry: outside of layers, without those of final norm, head and loss: kept until the pass ends.
        final_norm: saved by the final norm.
        by_loss: the gradients that the loss saves.
    """

    per_layer: float
    at_entry: float
    final_norm: float
    by_loss: float


@dataclass(frozen=True)
class BlockBytes:
    """Most bytes that passes of a block have beyond what its forward pass saves.

    Attributes:
        forward: at the end of a forward pass.
        whole: of a backward pass that is not split.
        by_inputs: of the first half of a split one.
        by_weights: of its second half.
    """

    forward: float
    whole: Peak
    by_inputs: Peak
    by_weights: Peak


def saved_bytes(step: StepShape, ends: tuple[bool, bool], kernels: EagerKernels) -> SavedBytes:
    """Count the bytes that a micro-batch saves on a rank.

    Args:
        step: model, layout and batch of a training step.
        ends: (True if the rank has the embedding, True if it has the head).
        kernels: eager kernels of the device.
    """
    return _saved_bytes(*_arguments(step, ends, kernels))


def block_bytes(step: StepShape, kernels: EagerKernels, cast: float, kept: float) -> BlockBytes:
    """Compute the most bytes that passes of a block have beyond what its forward pass saves.

    Args:
        step: model, layout and batch of a training step.
        kernels: eager kernels of the device.
        cast: bytes per element of gradients by weights that are cast to another dtype; 0 if they are not.
        kept: bytes per element of gradients by weights after that, until the end of the block.
    """
    return _block_bytes(*_arguments(step, (False, False), kernels), cast, kept, kernels.fused, kernels.head_sums)


_Arguments = tuple["_ById", int, str, int, ModelShard, tuple[bool, int, bool, bool, bool], frozenset[str]]


def _arguments(step: StepShape, ends: tuple[bool, bool], kernels: EagerKernels) -> _Arguments:
    layout = step.layout
    return (
        _ById(step.model),
        step.sequence,
        step.mode,
        step.micro_batch,
        ModelShard(0, layout.tensor, range(1), embedding=ends[0], head=ends[1]),
        (layout.sequence_parallel, layout.context, not step.sharded, kernels.masks, step.isolated),
        # With a budget the caller limits these bytes; here nothing is recomputed.
        recomputed_steps(step.policy, step.parallel) if step.budget is None else frozenset(),
    )


class _ById:
    """A model section as a cache key, compared by identity."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model

    def __hash__(self) -> int:
        return id(self.model)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.model is self.model


@lru_cache(maxsize=65536)
def _saved_bytes(
    model: _ById,
    sequence: int,
    mode: str,
    micro_batch: int,
    shard: ModelShard,
    shared: tuple[bool, int, bool, bool, bool],
    recomputed: frozenset[str],
) -> SavedBytes:
    saved = activation_bytes(model.model, micro_batch, sequence, mode, recomputed, RankWorkload(shard, *shared))
    ends = saved.ends
    entry = sum(size for name, size in ends.items() if name not in _HEAD_TENSORS)
    by_loss = ends.get("loss_by_hidden", 0) + ends.get("loss_by_head", 0)
    return SavedBytes(saved.per_layer, entry, ends.get("final_norm", 0), by_loss)


@lru_cache(maxsize=65536)
def _block_bytes(
    model: _ById,
    sequence: int,
    mode: str,
    micro_batch: int,
    shard: ModelShard,
    shared: tuple[bool, int, bool, bool, bool],
    recomputed: frozenset[str],
    cast: float,
    kept: float,
    fused: bool,
    head_sums: bool,
) -> BlockBytes:
    config, workload, tensor = model.model, RankWorkload(shard, *shared), shard.tensor_count

    def layer(steps: frozenset[str]) -> dict[str, int]:
        return activation_bytes(config, micro_batch, sequence, mode, steps, workload).layer

    everything, saved = layer(frozenset()), layer(recomputed)
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
    """Count the bytes of the gradients by keys and values of complete rows from each query head of a rank."""
    heads = axis_share(config, Axis.QUERIES, tensor) / config.n_head_dim
    return 2 * heads * prod(head_sums_shape(rows, 1, sequence, config.n_head_dim)) * _FP32


def _missing(everything: dict[str, int], saved: dict[str, int], names: set[str]) -> dict[str, float]:
    """Select the tensors of these names that are not saved, with their bytes."""
    return {name: float(size) for name, size in everything.items() if name in names and name not in saved}


def _names(config: ModelConfig, step: str) -> set[str]:
    """Names of the tensors that recomputing a step makes."""
    spec = model_spec(config)
    tensors = {tensor.name for tensor in spec.saved if step in tensor.freed_by}
    if step in CORE_STEPS:
        tensors |= CONTEXT_TENSORS
    return tensors | {f"{parameter.step}_weight_copy" for parameter in spec.block if parameter.freed_by == step}


def _weights(config: ModelConfig, elements: Callable[..., float]) -> dict[str, tuple[float, ...]]:
    """Count the elements of each weight of a block's matrix products on a rank, in the order of backward."""
    found: dict[str, tuple[float, ...]] = {}
    for parameter in model_spec(config).block:
        size = sum(elements(tensor) for tensor in parameter.tensors if tensor.is_hidden_matrix)
        if size:
            found[parameter.step] = (size, *found.get(parameter.step, ()))
    return found
