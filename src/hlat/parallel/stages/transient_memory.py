"""Transient memory of a rank (gradients, activations, logits, buffers) at the instants of a step where it can peak.

    backward of a block | reduction of its gradients | logits of the loss | communication of all gradients | optimizer
        -> bytes of gradients, activations, recomputing, logits, working, buffers

Activations are counted by model/derived/activations.py, passes in flight by in_flight.py. The other numbers were found
by rehearsals, and tests compare them with rehearsals and real processes (tests/distributed/memory/test_planned.py).
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from hlat.activation_checkpointing import recomputed_steps
from hlat.config.sections import ModelConfig, ParallelConfig, Schedule
from hlat.model import Axis, CrossEntropy, GradientSum, ModelShard, vocabulary_rows
from hlat.model.architectures import model_spec
from hlat.model.derived import RankWorkload, activation_bytes, axis_share, block_share, element_share
from hlat.parallel.mesh import Layout
from hlat.parallel.stages.in_flight import Instant, peak_instants
from hlat.parallel.stages.optimizer_memory import optimizer_instant
from hlat.parallel.stages.step_shape import StepShape
from hlat.precision import MODES

_HEAD_TENSORS = ("final_norm", "loss_by_hidden", "loss_by_head")  # freed before a block runs backward


def transient_bytes(
    step: StepShape,
    pipeline_rank: int,
    sizes: tuple[float, ...],
    ends: tuple[bool, bool],
    gradients: float,
    on_cpu: bool = False,
) -> list[dict[str, float]]:
    """Compute transient bytes by name, for each instant at which memory can peak; missing names are 0.

    Args:
        step: model, layout and batch of a training step.
        pipeline_rank: index on the pipeline axis.
        sizes: layers of each stage of the rank.
        ends: (True if it has the embedding, True if it has the head).
        gradients: bytes of accumulated gradients.
        on_cpu: True if context-parallel attention builds masks, and SwiGLU and the loss have kernels (model/kernels):
            SwiGLU needs no memory for terms of its gradients, and the loss overwrites its logits.
    """
    mode = MODES[step.mode]
    received, instants = _messages(step, pipeline_rank, sizes)
    rank = _rank(step, sum(sizes), ends, gradients, received, on_cpu)
    if step.budget is not None:
        alive = max((now.alive for now in instants if now.alive), default=1)
        rank = replace(rank, per_pass=min(rank.per_pass, step.budget / alive))
    found = [sizes_by_name for now in instants for sizes_by_name in _at(rank, now)]
    if step.layout.zero == 0 and step.layout.data * step.layout.context > 1:  # all gradients, concatenated to be sent
        found.append({"gradients": gradients, "buffers": gradients * mode.reduction.itemsize / mode.gradients.itemsize})
    return found + optimizer_instant(step, sum(sizes), ends)


@dataclass(frozen=True)
class _Rank:
    """Transient bytes of a rank, by purpose.

    Attributes:
        per_pass: activations that a micro-batch saves in one stage.
        per_layer: activations that a micro-batch saves in one layer.
        at_ends: activations that a micro-batch saves in head and loss.
        recomputed: additional activations while a block is recomputed.
        working: temporary tensors while a block runs backward.
        split_backward: tensors that the first half of a split backward pass keeps for the weight gradients.
        largest: temporary tensors while the second half computes a weight gradient.
        logits: logits of a chunk of the loss, and the gathered input of the head; None without head.
        gradients: gradients of one stage.
        gathered: gathered parameters of a sharded block.
        reduced: gradients of a sharded block while they are reduced.
        message: a message between stages.
        received: number of messages with a receive buffer.
    """

    per_pass: float
    per_layer: float
    at_ends: float
    recomputed: float
    working: float
    split_backward: float
    largest: float
    logits: float | None
    gradients: float
    gathered: float
    reduced: float
    message: float
    received: int


def _rank(
    step: StepShape, layers: float, ends: tuple[bool, bool], gradients: float, received: int, on_cpu: bool
) -> _Rank:
    model, mode, layout = step.model, MODES[step.mode], step.layout
    saved = _saved_bytes(step, ends, on_cpu)
    tokens = step.micro_batch * step.sequence / layout.context
    item = mode.compute.itemsize
    inner = tokens * item * axis_share(model, Axis.INNER, layout.tensor)
    block = block_share(model, layout.tensor)
    message = tokens * item * model.hidden_size / (layout.tensor if layout.sequence_parallel else 1)
    recomputes, gathered = step.policy == "full", tokens * item * model.hidden_size
    gathers_again = step.parallel.gathers_again and not recomputes
    # FSDP2 reduces a block's gradients as soon as they exist; in a pipeline at the end of the step.
    reduced = block * mode.reduction.itemsize if step.sharded and layout.pipeline == 1 else 0.0
    return _Rank(
        per_pass=(layers * saved.per_layer + saved.at_entry) / step.virtual,
        per_layer=saved.per_layer,
        at_ends=saved.at_ends - saved.at_entry,
        recomputed=float(saved.without_policy - saved.per_layer) if recomputes else gathered * gathers_again,
        # The widest activations: gradients by the outputs of the feed-forward layer, and their terms.
        working=(3 if recomputes or on_cpu else 4) * inner,
        split_backward=layers / step.virtual * _split_backward_bytes(step, tokens * item) + 2 * message,
        largest=_largest_gradient(step),
        # With sequence parallelism the head's input is gathered.
        logits=_logits(model, layout.tensor, tokens, item, on_cpu) + gathered * layout.sequence_parallel
        if ends[1]
        else None,
        gradients=gradients / step.virtual,
        gathered=block * item if layout.zero == 3 and step.sharded else 0.0,
        reduced=reduced + (block * item if reduced and layout.zero > 1 else 0.0),
        message=message,
        received=received,
    )


def _at(rank: _Rank, now: Instant) -> list[dict[str, float]]:
    """List the transient bytes by name at an instant; several sets if it is not known which is largest."""
    blocks, buffers = now.alive * rank.per_pass, rank.message * (rank.received + now.sent)
    common = {"gradients": now.stages * rank.gradients, "buffers": buffers}
    if now.alive == 0:
        return [common]
    if now.forward:
        if rank.logits is None:
            return []
        # The last stage has one pass in flight.
        loss = {
            "activations": blocks + rank.at_ends,
            "logits": rank.logits,
            "working": now.waiting * rank.split_backward,
        }
        return [{**common, **loss, "buffers": buffers + rank.gathered}]
    earlier = now.earlier * rank.split_backward  # passes that waited for their weight gradients before this one
    running = {**common, "recomputing": rank.recomputed, "working": earlier + rank.working}
    buffers += 2 * rank.gathered  # FSDP2 gathers the next block in advance
    found = [
        {**running, "activations": blocks, "buffers": buffers},
        {**running, "activations": blocks - rank.per_layer, "buffers": buffers + rank.reduced},
    ]
    if now.waiting:
        found.append({**running, "activations": blocks, "working": now.waiting * rank.split_backward + rank.largest})
    return found


def _messages(step: StepShape, pipeline_rank: int, sizes: tuple[float, ...]) -> tuple[int, tuple[Instant, ...]]:
    """Count the messages that a rank receives in a step, and find the instants at which its memory can peak."""
    layout, micro_batches = step.layout, step.micro_batches
    if layout.pipeline == 1:
        before = int(micro_batches > 1)  # gradients of earlier micro-batches
        return 0, (
            Instant(True, 1, 0, 0, 0, before),
            Instant(False, 1, 0, 0, 0, before),
            Instant(False, 0, 0, 0, 0, 1),
        )
    sends = _sends(step.parallel.schedule, layout.pipeline, step.virtual, pipeline_rank)
    received = micro_batches * sum(map(sum, sends))
    even = (1.0,) * len(sizes) if len(set(sizes)) == 1 else sizes
    instants = peak_instants(step.parallel.schedule, pipeline_rank, layout.pipeline, micro_batches, sends, even)
    return received, instants


@lru_cache(maxsize=4096)
def _sends(schedule: Schedule, ranks: int, each: int, pipeline_rank: int) -> tuple[tuple[bool, bool], ...]:
    """Return for each stage of a rank if it sends activations, and if it sends gradients, to another rank."""
    config = ParallelConfig(pipeline=ranks, schedule=schedule, virtual_stages=each)
    stages = Layout.of(config, ranks).remote_neighbour_stages(pipeline_rank)
    return tuple((stage + 1 in others, stage - 1 in others) for stage, others in stages)


def _split_backward_bytes(step: StepShape, size: float) -> float:
    """Bytes per layer kept between the halves of a split backward pass: gradients by outputs of products and norms.

    Args:
        step: model, layout and batch of a training step.
        size: bytes of one element per token of a micro-batch.
    """
    model, count = step.model, step.layout.tensor
    tensors = model_spec(model).block_tensors
    products = sum(axis_share(model, tensor.rows, count) for tensor in tensors if tensor.is_product)
    norms = sum(
        axis_share(model, tensor.rows, count) for tensor in tensors if tensor.gradient_sum is GradientSum.SEQUENCE
    )
    return size * (products + norms / (count if step.layout.sequence_parallel else 1))


def _largest_gradient(step: StepShape) -> float:
    """Bytes of the largest weight gradient as computed, plus its copy in the accumulation dtype if that differs."""
    model, mode = step.model, MODES[step.mode]
    sizes = [
        sum(element_share(model, tensor, step.layout.tensor) for tensor in parameter.tensors)
        for parameter in model_spec(model).block
    ]
    wider = mode.gradients.itemsize if mode.gradients != mode.compute else 0
    return max(sizes) * (mode.compute.itemsize + wider)


@dataclass(frozen=True)
class _SavedBytes:
    """Bytes of activations that a micro-batch saves on a rank.

    Attributes:
        per_layer: per layer, with the activation checkpointing policy.
        without_policy: per layer, if nothing is recomputed.
        at_ends: outside of layers.
        at_entry: those of ``at_ends`` that do not belong to final norm, head and loss.
    """

    per_layer: int
    without_policy: int
    at_ends: int
    at_entry: int


def _saved_bytes(step: StepShape, ends: tuple[bool, bool], on_cpu: bool) -> _SavedBytes:
    layout = step.layout
    return _cached_saved_bytes(
        _ById(step.model),
        step.sequence,
        step.mode,
        step.micro_batch,
        ModelShard(0, layout.tensor, range(1), embedding=ends[0], head=ends[1]),
        (layout.sequence_parallel, layout.context, not step.sharded, on_cpu, step.isolated),
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
def _cached_saved_bytes(
    model: _ById,
    sequence: int,
    mode: str,
    micro_batch: int,
    shard: ModelShard,
    shared: tuple[bool, int, bool, bool, bool],
    recomputed: frozenset[str],
) -> _SavedBytes:
    workload = RankWorkload(shard, *shared)
    saved = activation_bytes(model.model, micro_batch, sequence, mode, recomputed, workload)
    everything = activation_bytes(model.model, micro_batch, sequence, mode, (), workload)
    entry = sum(size for name, size in saved.ends.items() if name not in _HEAD_TENSORS)
    return _SavedBytes(saved.per_layer, everything.per_layer, sum(saved.ends.values()), entry)


def _logits(model: ModelConfig, tensor: int, tokens: float, item: int, in_place: bool) -> float:
    """Bytes of a chunk of the loss: logits and gradient in the compute dtype and in fp32, or logits only."""
    rows = len(vocabulary_rows(model, ModelShard(0, tensor)))
    size = CrossEntropy().chunk(rows)
    chunk = min(tokens, size)
    # The gradient of the head is accumulated in fp32 over chunks.
    accumulated = rows * model.hidden_size * 4 if tokens > size else 0.0
    return chunk * rows * (item if in_place or item == 4 else 2 * item + 4) + accumulated
