"""Bytes that a rank needs, per pipeline rank: state, what is kept for backward, and what is alive for a moment.

    Question, Candidate, pipeline rank -> parallel.state_bytes, what is alive at each instant (moments.py) -> RankMemory

Nothing is counted here that another room counts: parameters, gradients and moments are those of parallel/footprint.py,
what the forward pass keeps those of model/activations.py. Of the instants of a step the one that needs most counts.
Held against rehearsals and real runs in a test. Besides there is what the device's runtime and allocator take.
"""

from dataclasses import dataclass, fields

from hlat.parallel import Layout, held_parts, state_bytes
from hlat.planner.layouts import Candidate
from hlat.planner.moments import layer_weights, moments
from hlat.planner.question import Question
from hlat.precision import MODES

_GIB = 1 << 30
_RUNTIME_BYTES = {"measured": 0.0, "trainium": 6.25 * _GIB}
"""Of the device's runtime, by family: context, code of kernels and graphs, buffers of the collectives' library.

On Trainium nobody has published it. It is inferred from two runs of AWS's library, whose pipelines hold no buffer for
each micro-batch: HLAT saw Llama-2-70B run out of memory on 4 trn1.32xlarge, which by the counts here, without such
buffers, needs 9.0 GiB per core at least; AWS trains it on 8 with tensor 8, pipeline 16, everything recomputed, which so
counted needs 7.5. So it is more than 6 or 7, depending on what else takes memory, and less than 8.5.
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
    first, last = pipeline_rank == 0, pipeline_rank == (0 if one.schedule == "zbv" else one.pipeline - 1)
    layers = -(-model.layers // one.pipeline)
    if last and model.layers % one.pipeline:
        layers -= 1
    held = (
        layers * layer_weights(model, one.tensor) + (first + last) * model.vocab_size * model.hidden_size / one.tensor
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
    empty = dict.fromkeys(("gradients", "activations", "recomputing", "logits", "working", "buffers"), 0.0)
    found = [{**empty, **one} for one in moments(question, one, pipeline_rank, layers, ends, gradients)]
    moving = max(found, key=lambda moment: sum(moment.values()))
    slack = share * (sum(moving.values()) - moving["gradients"])
    return RankMemory(parameters=parameters, optimizer=optimizer, **moving, runtime=runtime, slack=slack)
