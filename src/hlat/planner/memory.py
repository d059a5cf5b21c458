"""Bytes that a rank needs, per pipeline rank: state, what is kept for backward, and what is alive for a moment.

    Question, Candidate, pipeline rank -> parallel.state_bytes, model.activations, memory's counts -> RankMemory

Nothing is counted here that another room counts: parameters, gradients and moments are those of parallel/footprint.py,
what the forward pass keeps those of model/activations.py, passes in flight those of memory/in_flight.py. What these
leave out is alive at one of three instants, of which the largest counts: the loss has the logits of a chunk; the first
block runs backward; all gradients are put together to be sent. Held against rehearsals and real runs in a test.
Besides there is what the device's runtime and allocator take.
"""

from dataclasses import dataclass, fields
from functools import lru_cache

from hlat.config import ModelConfig
from hlat.memory import POLICIES, passes_in_flight
from hlat.model import ModelPart, Share, activations, vocabulary_rows
from hlat.parallel import Layout, held_parts, state_bytes
from hlat.planner.layouts import Candidate
from hlat.planner.question import Question
from hlat.planner.work import Recompute
from hlat.precision import MODES

_CHUNK = 64 << 20  # bytes of fp32 logits that the loss makes at a time (model/loss.py)
_SMALLEST_CHUNK = 256  # rows
_HEADS = ("final_norm", "loss_by_hidden", "loss_by_head")  # gone when a block runs backward

_GIB = 1 << 30
_RUNTIME_BYTES = {"measured": 0.0, "trainium": 6.25 * _GIB}
"""Of the device's runtime, by family: context, code of kernels and graphs, buffers of the collectives' library.

On Trainium nobody has published it. It lies between what two runs say: HLAT saw Llama-2-70B run out of memory on 4
trn1.32xlarge, which by the counts below needs 9.3 GiB per core at least (so more than 6.1), and AWS trains it on 8 with
tensor 8, pipeline 16, everything recomputed, which needs 8.6 GiB (so less than 7.4). It is inferred, not measured.
"""
_OTHER_RUNTIME_BYTES = 2.0 * _GIB
# The allocator's rounding and what it cannot put together again, as a share of what comes and goes.
_SLACK = 0.06


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank when it has most.

    Attributes:
        parameters: and gathered copies of them.
        gradients, optimizer: as they are kept.
        activations: kept for backward by all micro-batches in flight.
        recomputing: alive besides, while a block is computed again.
        logits: of the loss's chunk; the last stage only.
        working: gradients of activations of the block that runs backward.
        buffers: of collectives.
        runtime: of the device's runtime.
        slack: of the allocator.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    recomputing: float
    logits: float
    working: float
    buffers: float
    runtime: float
    slack: float

    @property
    def total(self) -> float:
        """Bytes in all."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Every part by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def rank_memory(question: Question, one: Candidate, pipeline_rank: int) -> RankMemory:
    """Bytes of a rank at this place of the pipeline: counted from the shapes that the model is built from."""
    model, mode = question.model, MODES[question.mode]
    layout = Layout.of(one.parallel, one.world)
    rank = pipeline_rank * (one.world // one.pipeline)
    state = state_bytes(
        model,
        one.parallel,
        one.world,
        rank,
        question.sequence,
        one.accumulation(question.global_batch),
        parameter_bytes=mode.weights.itemsize,
        gradient_bytes=mode.gradients.itemsize,
        moment_bytes=2 * mode.moments.itemsize + (mode.compensation.itemsize if mode.compensation else 0),
    )
    parts = held_parts(model, layout, rank, question.sequence)
    gathered = state.parameters_within_step - state.parameters
    # FSDP2 gathers in the dtype that is computed in.
    narrow = mode.compute.itemsize / mode.weights.itemsize
    layers = sum(len(part.layer_range(model)) for part in parts)
    ends = (any(part.embedding for part in parts), any(part.head for part in parts))
    return _put_together(
        question,
        one,
        pipeline_rank,
        layers,
        ends,
        state.parameters + narrow * gathered,
        float(state.gradients_accumulating),
        float(state.optimizer),
    )


def estimated_memory(question: Question, one: Candidate, pipeline_rank: int) -> RankMemory:
    """The same from the numbers of parameters alone, as if everything divided evenly: fast, for a search."""
    model, mode = question.model, MODES[question.mode]
    first, last = pipeline_rank == 0, pipeline_rank == one.pipeline - 1
    layers = -(-model.layers // one.pipeline)
    if last and model.layers % one.pipeline:
        layers -= 1
    held = (
        layers * _layer_weights(model, one.tensor) + (first + last) * model.vocab_size * model.hidden_size / one.tensor
    )
    shards = one.data * one.context
    sharded = one.zero > 0 and shards > 1
    stored = held / shards if sharded else held
    gathered = 0.0
    if sharded:
        gathered = (first + last) * model.vocab_size * model.hidden_size / one.tensor if one.zero == 3 else held
    whole = not sharded or one.pipeline > 1 or (one.zero == 1 and one.accumulation(question.global_batch) > 1)
    moments = 2 * mode.moments.itemsize + (mode.compensation.itemsize if mode.compensation else 0)
    return _put_together(
        question,
        one,
        pipeline_rank,
        layers,
        (first, last),
        stored * mode.weights.itemsize + gathered * mode.compute.itemsize,
        (held if whole else stored) * mode.gradients.itemsize,
        stored * moments,
    )


def _put_together(
    question: Question,
    one: Candidate,
    pipeline_rank: int,
    layers: int,
    ends: tuple[bool, bool],
    parameters: float,
    gradients: float,
    optimizer: float,
) -> RankMemory:
    family = question.cluster.chip.family or "measured"
    runtime = _RUNTIME_BYTES.get(family, _OTHER_RUNTIME_BYTES)
    share = 0.0 if family == "measured" else _SLACK
    moments = _moments(question, one, pipeline_rank, layers, ends, gradients)
    moving = max(moments, key=lambda moment: sum(moment.values()))
    empty = {"activations": 0.0, "recomputing": 0.0, "logits": 0.0, "working": 0.0, "buffers": 0.0}
    slack = share * sum(moving.values())
    held = {"parameters": parameters, "gradients": gradients, "optimizer": optimizer}
    return RankMemory(**held, **{**empty, **moving}, runtime=runtime, slack=slack)


def _moments(
    question: Question, one: Candidate, pipeline_rank: int, layers: int, ends: tuple[bool, bool], gradients: float
) -> list[dict[str, float]]:
    """What is there besides the state at the instants of a step that can need most."""
    model, mode = question.model, MODES[question.mode]
    micro_batches = one.accumulation(question.global_batch)
    kept = _kept(question, one, ends)
    passes = passes_in_flight(one.parallel, pipeline_rank, micro_batches)
    flight = passes / one.virtual
    tokens = one.micro_batch * question.sequence / one.context
    item, reduced = mode.compute.itemsize, mode.reduction.itemsize
    inner = tokens * item * model.intermediate_size / one.tensor
    block = _layer_weights(model, one.tensor)
    messages = _messages(one, pipeline_rank, micro_batches, passes, tokens * item * model.hidden_size / one.tensor)
    shards = one.data * one.context
    # FSDP2 gathers a block before it works; it reduces one as soon as it has its gradients, but pipelines at their end.
    gathering = block * item if one.zero == 3 and shards > 1 else 0.0
    reducing = block * reduced if one.zero > 0 and shards > 1 and one.pipeline == 1 else 0.0
    if reducing and one.zero > 1:
        reducing += block * item
    recomputes = one.recompute == "full"
    backward = {
        "activations": flight * (layers * kept.per_layer + kept.at_entry),
        "recomputing": float(kept.whole_layer - kept.per_layer) if recomputes else 0.0,
        # By the widest activations: the gradients by what the feed-forward half makes, and what they are added up from.
        "working": (3 if recomputes else 4) * inner,
        "buffers": messages + 2 * gathering + reducing,
    }
    moments = [backward]
    if ends[1]:
        loss = _logits(model, one, tokens, item)
        everything = flight * (layers * kept.per_layer + kept.at_ends)
        moments.append({"activations": everything, "logits": loss, "buffers": messages + gathering})
    if one.zero == 0 and shards > 1:
        moments.append(
            {"buffers": gradients * reduced / mode.gradients.itemsize}
        )  # all of them, put together to be sent
    return moments


def _messages(one: Candidate, pipeline_rank: int, micro_batches: int, passes: int, size: float) -> float:
    """Buffers of messages between stages.

    torch's stages have one for each micro-batch that they receive. 1F1B waits for each send before the next; with
    several stages per rank all are waited for at the end of a step. Of these, rehearsals of ten ranks (2 to 4 ranks, 2
    to 4 stages each, 4 and 8 micro-batches) hold at their peak all but about 1.6 for each pass in flight.
    """
    if one.pipeline == 1:
        return 0.0
    stages = one.pipeline * one.virtual
    received = micro_batches * sum(
        (stage > 0) + (stage < stages - 1) for stage in range(pipeline_rank, stages, one.pipeline)
    )
    held = 1.0 if one.virtual == 1 else max(received - 1.6 * passes, 1.0)
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


def _layer_weights(model: ModelConfig, tensor: int) -> float:
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
