"""Bytes that a rank needs, per pipeline rank: state, what is kept for backward, and what is alive for a moment.

    PlanRequest, Candidate, pipeline rank -> parallel.fullest_moment -> with runtime and allocator -> RankMemory

Nothing is counted here that another room counts: state and what comes and goes are those of state_bytes.py and
moments.py, by which layers are cut into stages too. Held against rehearsals and real runs in a test. Besides there is
what the device's runtime and allocator take.
"""

from dataclasses import dataclass, fields

from hlat.parallel.stages import (
    RankBytes,
    ends_of,
    fullest_moment,
    held_parts,
    layer_weights,
    rank_bytes,
    sizes_of_ranks,
    state_in_mode,
    stored,
)
from hlat.planner.problem import Candidate, PlanRequest
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


def rank_memory(request: PlanRequest, one: Candidate, pipeline_rank: int) -> RankMemory:
    """Bytes of a rank at this place of the pipeline: counted from the shapes that the model is built from."""
    cut = one.cut(request)
    rank = cut.first_rank(pipeline_rank)
    parts = held_parts(cut, rank)
    sizes = tuple(len(part.layer_range(request.model)) for part in parts)
    state = stored(cut, state_in_mode(cut, rank, parts))
    return _on_device(request, fullest_moment(cut, pipeline_rank, sizes, state, _on_cpu(request)))


def estimate_rank_memory(request: PlanRequest, one: Candidate, pipeline_rank: int) -> RankMemory:
    """The same from the numbers of parameters alone, as if everything divided evenly: fast, for a search."""
    model, mode, cut = request.model, MODES[request.mode], one.cut(request)
    first, last = ends_of(cut, pipeline_rank)
    layers = -(-model.layers // one.pipeline)
    if last and model.layers % one.pipeline:
        layers -= 1
    held = (
        layers * layer_weights(model, one.tensor) + (first + last) * model.vocab_size * model.hidden_size / one.tensor
    )
    shards = one.data * one.context
    sharded = one.zero > 0 and shards > 1
    kept = held / shards if sharded else held
    gathered = 0.0
    if sharded:
        gathered = (first + last) * model.vocab_size * model.hidden_size / one.tensor if one.zero == 3 else held
    whole = not sharded or one.pipeline > 1 or (one.zero == 1 and one.accumulation(request.global_batch) > 1)
    moments = 2 * mode.moments.itemsize + (mode.compensation.itemsize if mode.compensation else 0)
    state = (
        kept * mode.weights.itemsize + gathered * mode.compute.itemsize,
        (held if whole else kept) * mode.gradients.itemsize,
        kept * moments,
    )
    return _on_device(
        request, fullest_moment(cut, pipeline_rank, (layers / one.virtual,) * one.virtual, state, _on_cpu(request))
    )


def ranks_of_interest(request: PlanRequest, one: Candidate) -> list[int]:
    """Pipeline ranks of interest: the first two, the last, and the one that needs most memory."""
    cut = one.cut(request)
    needs = [_on_device(request, rank_bytes(cut, rank, sizes)).total for rank, sizes in enumerate(sizes_of_ranks(cut))]
    return sorted({0, min(1, one.pipeline - 1), needs.index(max(needs)), one.pipeline - 1})


def _on_cpu(request: PlanRequest) -> bool:
    return request.cluster.chip.family == "measured"


def _on_device(request: PlanRequest, found: RankBytes) -> RankMemory:
    """With what runtime and allocator take."""
    family = request.cluster.chip.family or "measured"
    runtime = _RUNTIME_BYTES.get(family, _OTHER_RUNTIME_BYTES)
    share = 0.0 if family == "measured" else _SLACK
    moving = {
        **dict.fromkeys(("gradients", "activations", "recomputing", "logits", "working", "buffers"), 0.0),
        **found.moving,
    }
    slack = share * (sum(moving.values()) - moving["gradients"])
    return RankMemory(parameters=found.parameters, optimizer=found.optimizer, **moving, runtime=runtime, slack=slack)
