"""What a rank holds besides parameters and AdamW's moments, at the instants of a step that can need most.

    the first block runs backward | it has, and is reduced | the loss has logits | all gradients are put together
        -> gradients, activations, recomputed, logits, working, buffers: bytes of each

Activations are those of model/activations.py, passes in flight those of memory/in_flight.py. The rest was learnt from
rehearsals, and is held against them and against real processes (tests/distributed/test_planned.py).
"""

from dataclasses import dataclass
from functools import lru_cache

from hlat.config import ModelConfig
from hlat.memory import POLICIES, passes_in_flight
from hlat.model import ModelPart, Share, activations, vocabulary_rows
from hlat.planner.layouts import Candidate
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
    model, mode = question.model, MODES[question.mode]
    micro_batches = one.accumulation(question.global_batch)
    kept = _kept(question, one, ends)
    passes = passes_in_flight(one.parallel, pipeline_rank, micro_batches)
    flight = passes / one.virtual
    tokens = one.micro_batch * question.sequence / one.context
    item, reduced = mode.compute.itemsize, mode.reduction.itemsize
    inner = tokens * item * model.intermediate_size / one.tensor
    block = layer_weights(model, one.tensor)
    messages = _messages(one, pipeline_rank, micro_batches, passes, tokens * item * model.hidden_size / one.tensor)
    shards = one.data * one.context
    # FSDP2 gathers a block before it works; it reduces one as soon as it has its gradients, but pipelines at their end.
    gathering = block * item if one.zero == 3 and shards > 1 else 0.0
    reducing = block * reduced if one.zero > 0 and shards > 1 and one.pipeline == 1 else 0.0
    if reducing and one.zero > 1:
        reducing += block * item
    # Where all passes are in flight before the first runs backward, there are no gradients yet beside all of them.
    alone = passes == micro_batches * one.virtual
    early = 0.0 if alone else gradients
    recomputes = one.recompute == "full"
    blocks = flight * (layers * kept.per_layer + kept.at_entry)
    backward = {
        "recomputing": float(kept.whole_layer - kept.per_layer) if recomputes else 0.0,
        # By the widest activations: the gradients by what the feed-forward half makes, and what they are added up from.
        "working": (3 if recomputes else 4) * inner,
    }
    found = [
        {**backward, "gradients": early, "activations": blocks, "buffers": messages + 2 * gathering},
        {
            **backward,
            "gradients": early,
            "activations": blocks - kept.per_layer,
            "buffers": messages + 2 * gathering + reducing,
        },
    ]
    if alone:
        found.append({"gradients": gradients, "activations": blocks * (passes - 1) / passes, "buffers": messages})
    if ends[1]:
        loss = _logits(model, one, tokens, item)
        everything = blocks + kept.at_ends - kept.at_entry  # of the last stage one pass is in flight
        found.append({"gradients": early, "activations": everything, "logits": loss, "buffers": messages + gathering})
    if one.zero == 0 and shards > 1:  # all gradients, put together to be sent
        found.append({"gradients": gradients, "buffers": gradients * reduced / mode.gradients.itemsize})
    return found


def _messages(one: Candidate, pipeline_rank: int, micro_batches: int, passes: int, size: float) -> float:
    """What torch's pipelines hold of messages between stages.

    A stage has a buffer for each micro-batch that it receives, and keeps what it has sent until that runs backward.
    1F1B waits for each send before the next; with several stages per rank all are waited for at the end of a step. Of
    these, rehearsals of ten ranks (2 to 4 ranks, 2 to 4 stages each, 4 and 8 micro-batches) hold at their peak all but
    about 1.6 for each pass in flight.
    """
    if one.pipeline == 1:
        return 0.0
    stages = one.pipeline * one.virtual
    mine = range(pipeline_rank, stages, one.pipeline)
    received = micro_batches * sum((stage > 0) + (stage < stages - 1) for stage in mine)
    sent = passes * sum(stage < stages - 1 for stage in mine) / one.virtual
    held = sent if one.virtual == 1 else max(received - 1.6 * passes, sent)
    return size * (received + held)


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
