"""What a rank holds besides parameters and AdamW's moments, at the instants of a step that can need most.

    the first block runs backward | it has, and is reduced | the loss has logits | all gradients are put together
        -> gradients, activations, recomputed, logits, working, buffers: bytes of each

Activations are those of model/activations.py, passes in flight those of flight.py. The rest was learnt from
rehearsals, and is held against them and against real processes (tests/distributed/test_planned.py).
"""

from dataclasses import dataclass
from functools import lru_cache

from hlat.config import ModelConfig
from hlat.memory import POLICIES
from hlat.model import ModelPart, Share, activations, vocabulary_rows
from hlat.planner.flight import Instant, instants
from hlat.planner.layouts import Candidate, mine
from hlat.planner.question import Question
from hlat.planner.work import Recompute
from hlat.precision import MODES

_CHUNK = 64 << 20  # bytes of fp32 logits that the loss makes at a time (model/loss.py)
_SMALLEST_CHUNK = 256  # rows
_HEADS = ("final_norm", "loss_by_hidden", "loss_by_head")  # gone when a block runs backward


def moments(
    question: Question, one: Candidate, pipeline_rank: int, layers: int, ends: tuple[bool, bool], gradients: float
) -> list[dict[str, float]]:
    """Bytes by name, for each instant; what a name is not given for is nothing.

    Args:
        layers: of the rank.
        ends: whether it has the embedding, and the head.
        gradients: bytes of them, as they are added up.
    """
    mode = MODES[question.mode]
    rank = _rank(question, one, pipeline_rank, layers, ends, gradients)
    _, moving = _messages(one, pipeline_rank, one.accumulation(question.global_batch))
    found = [moment for now in moving for moment in _at(rank, now)]
    if one.zero == 0 and one.data * one.context > 1:  # all gradients, put together to be sent
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
    question: Question, one: Candidate, pipeline_rank: int, layers: int, ends: tuple[bool, bool], gradients: float
) -> _Rank:
    model, mode = question.model, MODES[question.mode]
    kept = _kept(question, one, ends)
    tokens = one.micro_batch * question.sequence / one.context
    item = mode.compute.itemsize
    inner = tokens * item * model.intermediate_size / one.tensor
    block = layer_weights(model, one.tensor)
    message = tokens * item * model.hidden_size / one.tensor
    sharded = one.data * one.context > 1
    recomputes = one.recompute == "full"
    # FSDP2 reduces a block as soon as it has its gradients, but pipelines at their end.
    reduced = block * mode.reduction.itemsize if one.zero > 0 and sharded and one.pipeline == 1 else 0.0
    return _Rank(
        per_pass=(layers * kept.per_layer + kept.at_entry) / one.virtual,
        per_layer=kept.per_layer,
        at_ends=kept.at_ends - kept.at_entry,
        recomputed=float(kept.whole_layer - kept.per_layer) if recomputes else 0.0,
        # By the widest activations: gradients by what the feed-forward half makes, and what they are added up from.
        working=(3 if recomputes else 4) * inner,
        apart=layers / one.virtual * _apart(question, one, tokens * item) + 2 * message,
        largest=_gradient(question, one),
        logits=_logits(model, one, tokens, item) if ends[1] else None,
        gradients=gradients / one.virtual,
        gathered=block * item if one.zero == 3 and sharded else 0.0,
        reduced=reduced + (block * item if reduced and one.zero > 1 else 0.0),
        message=message,
        received=_messages(one, pipeline_rank, one.accumulation(question.global_batch))[0],
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
    earlier = max(0, now.waiting - 1) * rank.apart  # of passes that wait already
    running = {**held, "recomputing": rank.recomputed, "working": earlier + rank.working}
    buffers += 2 * rank.gathered  # FSDP2 gathers a block before it works
    found = [
        {**running, "activations": blocks, "buffers": buffers},
        {**running, "activations": blocks - rank.per_layer, "buffers": buffers + rank.reduced},
    ]
    if now.waiting:
        found.append({**running, "activations": blocks, "working": now.waiting * rank.apart + rank.largest})
    return found


def _messages(one: Candidate, pipeline_rank: int, micro_batches: int) -> tuple[int, tuple[Instant, ...]]:
    """Messages that a rank has buffers for, one per micro-batch, and what else is alive while it sends its own."""
    if one.pipeline == 1:
        before = int(micro_batches > 1)  # gradients of earlier micro-batches
        return 0, (Instant(True, 1, 0, 0, before), Instant(False, 1, 0, 0, before), Instant(False, 0, 0, 0, 1))
    stages = mine(one, pipeline_rank)
    received = micro_batches * sum(len(others) for _, others in stages)
    talks = tuple((stage + 1 in others, stage - 1 in others) for stage, others in stages)
    return received, instants(one.schedule, pipeline_rank, one.pipeline, micro_batches, one.virtual, talks)


def _apart(question: Question, one: Candidate, size: float) -> float:
    """Bytes per layer that wait between the two parts of a backward pass: gradients by what products and norms made.

    Args:
        size: of one number for each token of a micro-batch.
    """
    model = question.model
    keys = max(model.n_kv_heads / one.tensor, 1.0)
    inside = (model.heads / one.tensor + 2 * keys) * model.n_head_dim + 2 * model.intermediate_size / one.tensor
    return size * (inside + 2 * model.hidden_size + 2 * model.hidden_size / one.tensor)


def _gradient(question: Question, one: Candidate) -> float:
    """Bytes of the largest gradient of weights as it is made, and as it is added up where that is another dtype."""
    model, mode = question.model, MODES[question.mode]
    size = (2 if model.coalesce else 1) * model.hidden_size * model.intermediate_size / one.tensor
    wider = mode.gradients.itemsize if mode.gradients != mode.compute else 0
    return size * (mode.compute.itemsize + wider)


@dataclass(frozen=True)
class _Kept:
    """Bytes that a micro-batch keeps on a rank: per layer with the policy and without any, and outside of layers."""

    per_layer: int
    whole_layer: int
    at_ends: int
    at_entry: int  # of these, what is not the head's and the loss's


def _kept(question: Question, one: Candidate, ends: tuple[bool, bool]) -> _Kept:
    return _kept_of(
        _Hashed(question.model),
        question.sequence,
        question.mode,
        one.micro_batch,
        one.tensor,
        one.context,
        one.zero == 0 or one.data * one.context == 1,
        one.recompute,
        ends,
        question.cluster.chip.family == "measured",
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
def _kept_of(
    model: _Hashed,
    sequence: int,
    mode: str,
    micro_batch: int,
    tensor: int,
    context: int,
    weight_copies: bool,
    recompute: Recompute,
    ends: tuple[bool, bool],
    on_cpu: bool,
) -> _Kept:
    part = ModelPart(0, tensor, range(1), embedding=ends[0], head=ends[1])
    share = Share(
        part=part,
        sequence=tensor > 1,
        context=context,
        weight_copies=weight_copies,
        materialised_masks=on_cpu,
    )
    kept = activations(model.model, micro_batch, sequence, mode, POLICIES[recompute], share)
    whole = activations(model.model, micro_batch, sequence, mode, (), share)
    entry = sum(size for name, size in kept.ends.items() if name not in _HEADS)
    return _Kept(kept.per_layer, whole.per_layer, sum(kept.ends.values()), entry)


def layer_weights(model: ModelConfig, tensor: int) -> float:
    """Weights of one block on a tensor rank."""
    heads = model.heads / tensor
    keys = max(model.n_kv_heads / tensor, 1.0)
    attention = model.hidden_size * model.n_head_dim * (2 * heads + 2 * keys)
    return attention + 3 * model.hidden_size * model.intermediate_size / tensor + 2 * model.hidden_size


def _logits(model: ModelConfig, one: Candidate, tokens: float, item: int) -> float:
    """The loss's chunk: logits and their gradient as they come, and in fp32; in place where they come in fp32."""
    rows = len(vocabulary_rows(model, ModelPart(0, one.tensor)))
    size = max(_SMALLEST_CHUNK, _CHUNK // (4 * rows))
    chunk = min(tokens, size)
    # Gradients of the head are added up in fp32 over chunks.
    again = rows * model.hidden_size * 4 if tokens > size else 0.0
    return chunk * rows * (4 if item == 4 else 2 * item + 4) + again
