"""Bytes that a rank needs, per pipeline rank: state, what is kept for backward, and what is alive for a moment.

    Question, Candidate, pipeline rank -> parallel.state_bytes, model.activations, memory's counts -> RankMemory

Nothing is counted here that another room counts: parameters, gradients and moments are those of parallel/footprint.py,
what the forward pass keeps those of model/activations.py, passes in flight those of memory/in_flight.py. Added are what
these leave out: buffers of collectives, the loss's chunk of logits, gradients of activations while a layer runs
backward, and what the device's runtime and allocator take besides.
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
        logits: of the loss's chunk, and the head's gradient; the last stage only.
        working: gradients of activations, and of a layer's weights, while it runs backward.
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
    model, mode = question.model, MODES[question.mode]
    per_layer, everything, at_ends = _kept(question, one, ends)
    flight = passes_in_flight(one.parallel, pipeline_rank, one.accumulation(question.global_batch)) / one.virtual
    kept = flight * (layers * per_layer + at_ends)
    tokens = one.micro_batch * question.sequence / one.context
    item = mode.compute.itemsize
    layer_weights = _layer_weights(model, one.tensor)
    logits = _logits(model, one, tokens, item) if ends[1] else 0.0
    # Gradients of the widest activations of a block, and of its largest weight, before they are added or sent.
    working = tokens * item * (3 * model.intermediate_size / one.tensor + 2 * model.hidden_size)
    working += item * model.hidden_size * 2 * model.intermediate_size / one.tensor
    buffers = 0.0
    if one.zero > 0 and one.data * one.context > 1:
        buffers = layer_weights * (2 * item + mode.reduction.itemsize)
    if one.tensor > 1:
        buffers += 2 * tokens * item * model.hidden_size
    if one.pipeline > 1:
        buffers += 2 * tokens * item * model.hidden_size / one.tensor
    moving = kept + (everything - per_layer) + max(working, logits) + buffers
    family = question.cluster.chip.family or "measured"
    return RankMemory(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=kept,
        recomputing=everything - per_layer,
        logits=logits,
        working=max(working - logits, 0.0),
        buffers=buffers,
        runtime=_RUNTIME_BYTES.get(family, _OTHER_RUNTIME_BYTES),
        slack=_SLACK * moving if family != "measured" else 0.0,
    )


def _kept(question: Question, one: Candidate, ends: tuple[bool, bool]) -> tuple[int, int, int]:
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
) -> tuple[int, int, int]:
    """Bytes per layer with the policy, per layer without any, and of the ends."""
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
    return kept.per_layer, whole.per_layer, sum(kept.ends.values())


def _layer_weights(model: ModelConfig, tensor: int) -> float:
    heads = model.heads / tensor
    keys = max(model.n_kv_heads / tensor, 1.0)
    attention = model.hidden_size * model.n_head_dim * (2 * heads + 2 * keys)
    return attention + 3 * model.hidden_size * model.intermediate_size / tensor + 2 * model.hidden_size


def _logits(model: ModelConfig, one: Candidate, tokens: float, item: int) -> float:
    """The loss's chunk: logits as they come and in fp32, their gradient; and the head's gradient in fp32."""
    rows = len(vocabulary_rows(model, ModelPart(0, one.tensor)))
    chunk = min(tokens, max(_SMALLEST_CHUNK, _CHUNK // (4 * rows)))
    return chunk * rows * (2 * item + 4) + rows * model.hidden_size * (4 + item)
