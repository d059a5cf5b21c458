"""What a rank holds besides parameters and AdamW's moments, at the instants of a step that can need most.

    the first block runs backward | it has, and is reduced | the loss has logits | all gradients are put together
        -> gradients, activations, recomputed, logits, working, buffers: bytes of each

Activations are those of model/derived/activations.py, passes in flight those of flight.py. The rest was learnt from
rehearsals, and is held against them and against real processes (tests/distributed/test_planned.py).
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from hlat.activation_checkpointing import POLICIES
from hlat.config.sections import ModelConfig, ParallelConfig, Schedule
from hlat.model import ModelShard, vocabulary_rows
from hlat.model.derived import RankWorkload, activation_bytes
from hlat.parallel.mesh import Layout
from hlat.parallel.stages.in_flight import Instant, peak_instants
from hlat.parallel.stages.step_shape import StepShape
from hlat.precision import MODES

_CHUNK = 64 << 20  # bytes of fp32 logits that the loss makes at a time (model/loss.py)
_SMALLEST_CHUNK = 256  # rows
_HEADS = ("final_norm", "loss_by_hidden", "loss_by_head")  # gone when a block runs backward


def transient_bytes(
    step: StepShape,
    pipeline_rank: int,
    sizes: tuple[float, ...],
    ends: tuple[bool, bool],
    gradients: float,
    on_cpu: bool = False,
) -> list[dict[str, float]]:
    """Bytes by name, for each instant; what a name is not given for is nothing.

    Args:
        sizes: layers of each stage of the rank.
        ends: whether it has the embedding, and the head.
        gradients: bytes of them, as they are added up.
        on_cpu: whether context-parallel attention builds masks.
    """
    mode = MODES[step.mode]
    received, transient = _messages(step, pipeline_rank, sizes)
    rank = _rank(step, sum(sizes), ends, gradients, received, on_cpu)
    if step.budget is not None:
        alive = max((now.alive for now in transient if now.alive), default=1)
        rank = replace(rank, per_pass=min(rank.per_pass, step.budget / alive))
    found = [moment for now in transient for moment in _at(rank, now)]
    if step.layout.zero == 0 and step.layout.data * step.layout.context > 1:  # all gradients, put together to be sent
        found.append({"gradients": gradients, "buffers": gradients * mode.reduction.itemsize / mode.gradients.itemsize})
    return found


@dataclass(frozen=True)
class _Rank:
    """Bytes that come and go on a rank.

    Attributes:
        per_pass, per_layer, at_ends: kept by one micro-batch: by one stage, by one layer, and by head and loss besides.
        recomputed: alive besides while a block is computed again.
        working: while a block runs backward.
        apart: that a backward pass leaves for its weights' part; ``largest``, while that makes a gradient.
        logits: of the loss's chunk; None where there is no head.
        gradients: by stage.
        gathered, reduced: of a block whose weights are sharded.
        message: one between stages; ``received`` of them have a buffer.
    """

    per_pass: float
    per_layer: float
    at_ends: float
    recomputed: float
    working: float
    apart: float
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
    kept = _saved_bytes(step, ends, on_cpu)
    tokens = step.micro_batch * step.sequence / layout.context
    item = mode.compute.itemsize
    inner = tokens * item * model.intermediate_size / layout.tensor
    block = layer_weights(model, layout.tensor)
    message = tokens * item * model.hidden_size / (layout.tensor if layout.sequence_parallel else 1)
    recomputes = step.policy == "full"
    # FSDP2 reduces a block as soon as it has its gradients, but pipelines at their end.
    reduced = block * mode.reduction.itemsize if step.sharded and layout.pipeline == 1 else 0.0
    return _Rank(
        per_pass=(layers * kept.per_layer + kept.at_entry) / step.virtual,
        per_layer=kept.per_layer,
        at_ends=kept.at_ends - kept.at_entry,
        recomputed=float(kept.whole_layer - kept.per_layer) if recomputes else 0.0,
        # By the widest activations: gradients by what the feed-forward half makes, and what they are added up from.
        working=(3 if recomputes else 4) * inner,
        apart=layers / step.virtual * _apart(step, tokens * item) + 2 * message,
        largest=_gradient(step),
        logits=_logits(model, layout.tensor, tokens, item) if ends[1] else None,
        gradients=gradients / step.virtual,
        gathered=block * item if layout.zero == 3 and step.sharded else 0.0,
        reduced=reduced + (block * item if reduced and layout.zero > 1 else 0.0),
        message=message,
        received=received,
    )


def _at(rank: _Rank, now: Instant) -> list[dict[str, float]]:
    """What is alive at an instant."""
    blocks, buffers = now.alive * rank.per_pass, rank.message * (rank.received + now.sent)
    held = {"gradients": now.stages * rank.gradients, "buffers": buffers}
    if now.alive == 0:
        return [held]
    if now.forward:
        if rank.logits is None:
            return []
        # Of the last stage one pass is in flight.
        loss = {"activations": blocks + rank.at_ends, "logits": rank.logits, "working": now.waiting * rank.apart}
        return [{**held, **loss, "buffers": buffers + rank.gathered}]
    earlier = now.earlier * rank.apart  # of passes that wait already
    running = {**held, "recomputing": rank.recomputed, "working": earlier + rank.working}
    buffers += 2 * rank.gathered  # FSDP2 gathers a block before it works
    found = [
        {**running, "activations": blocks, "buffers": buffers},
        {**running, "activations": blocks - rank.per_layer, "buffers": buffers + rank.reduced},
    ]
    if now.waiting:
        found.append({**running, "activations": blocks, "working": now.waiting * rank.apart + rank.largest})
    return found


def _messages(step: StepShape, pipeline_rank: int, sizes: tuple[float, ...]) -> tuple[int, tuple[Instant, ...]]:
    """Messages that a rank has buffers for, one per micro-batch, and what else is alive while it sends its own."""
    layout, micro_batches = step.layout, step.micro_batches
    if layout.pipeline == 1:
        before = int(micro_batches > 1)  # gradients of earlier micro-batches
        return 0, (
            Instant(True, 1, 0, 0, 0, before),
            Instant(False, 1, 0, 0, 0, before),
            Instant(False, 0, 0, 0, 0, 1),
        )
    talks = _talks(step.parallel.schedule, layout.pipeline, step.virtual, pipeline_rank)
    received = micro_batches * sum(map(sum, talks))
    even = (1.0,) * len(sizes) if len(set(sizes)) == 1 else sizes
    transient = peak_instants(step.parallel.schedule, pipeline_rank, layout.pipeline, micro_batches, talks, even)
    return received, transient


@lru_cache(maxsize=4096)
def _talks(schedule: Schedule, ranks: int, each: int, pipeline_rank: int) -> tuple[tuple[bool, bool], ...]:
    """For each stage of a rank, whether it sends results, and gradients, to another rank."""
    config = ParallelConfig(pipeline=ranks, schedule=schedule, virtual_stages=each)
    stages = Layout.of(config, ranks).remote_neighbour_stages(pipeline_rank)
    return tuple((stage + 1 in others, stage - 1 in others) for stage, others in stages)


def _apart(step: StepShape, size: float) -> float:
    """Bytes per layer that wait between the two parts of a backward pass: gradients by what products and norms made.

    Args:
        size: of one number for each token of a micro-batch.
    """
    model, tensor = step.model, step.layout.tensor
    keys = max(model.n_kv_heads / tensor, 1.0)
    inside = (model.heads / tensor + 2 * keys) * model.n_head_dim + 2 * model.intermediate_size / tensor
    between = 2 * model.hidden_size / (tensor if step.layout.sequence_parallel else 1)
    return size * (inside + 2 * model.hidden_size + between)


def _gradient(step: StepShape) -> float:
    """Bytes of the largest gradient of weights as it is made, and as it is added up where that is another dtype."""
    model, mode = step.model, MODES[step.mode]
    size = (2 if model.coalesce else 1) * model.hidden_size * model.intermediate_size / step.layout.tensor
    wider = mode.gradients.itemsize if mode.gradients != mode.compute else 0
    return size * (mode.compute.itemsize + wider)


@dataclass(frozen=True)
class _SavedBytes:
    """Bytes that a micro-batch keeps on a rank: per layer with the policy and without any, and outside of layers."""

    per_layer: int
    whole_layer: int
    at_ends: int
    at_entry: int  # of these, what is not the head's and the loss's


def _saved_bytes(step: StepShape, ends: tuple[bool, bool], on_cpu: bool) -> _SavedBytes:
    layout = step.layout
    return _cached_saved_bytes(
        _Hashed(step.model),
        step.sequence,
        step.mode,
        step.micro_batch,
        ModelShard(0, layout.tensor, range(1), embedding=ends[0], head=ends[1]),
        (layout.sequence_parallel, layout.context, not step.sharded, on_cpu, step.isolated),
        step.policy,
    )


class _Hashed:
    """A model as the key of a cache: the object itself."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model

    def __hash__(self) -> int:
        return id(self.model)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and other.model is self.model


@lru_cache(maxsize=65536)
def _cached_saved_bytes(
    model: _Hashed,
    sequence: int,
    mode: str,
    micro_batch: int,
    part: ModelShard,
    shared: tuple[bool, int, bool, bool, bool],
    policy: str,
) -> _SavedBytes:
    share = RankWorkload(part, *shared)
    # With a budget a rank computes again what is too much: what it would keep otherwise says how much that is.
    again = POLICIES.get(policy, frozenset())
    kept = activation_bytes(model.model, micro_batch, sequence, mode, again, share)
    whole = activation_bytes(model.model, micro_batch, sequence, mode, (), share)
    entry = sum(size for name, size in kept.ends.items() if name not in _HEADS)
    return _SavedBytes(kept.per_layer, whole.per_layer, sum(kept.ends.values()), entry)


def layer_weights(model: ModelConfig, tensor: int) -> float:
    """Weights of one block on a tensor rank."""
    heads = model.heads / tensor
    keys = max(model.n_kv_heads / tensor, 1.0)
    attention = model.hidden_size * model.n_head_dim * (2 * heads + 2 * keys)
    return attention + 3 * model.hidden_size * model.intermediate_size / tensor + 2 * model.hidden_size


def _logits(model: ModelConfig, tensor: int, tokens: float, item: int) -> float:
    """The loss's chunk: logits and their gradient as they come, and in fp32; in place where they come in fp32."""
    rows = len(vocabulary_rows(model, ModelShard(0, tensor)))
    size = max(_SMALLEST_CHUNK, _CHUNK // (4 * rows))
    chunk = min(tokens, size)
    # Gradients of the head are added up in fp32 over chunks.
    again = rows * model.hidden_size * 4 if tokens > size else 0.0
    return chunk * rows * (4 if item == 4 else 2 * item + 4) + again
