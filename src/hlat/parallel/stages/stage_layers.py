"""Which layers a pipeline stage has, and with them a rank.

    cut -> FLOPs of layers and ends, bytes of ranks -> split.py -> layers of each stage -> parts of the model, bytes

A pure function of recipe and world: training, rehearsal and plan ask it, and so find the same stages.
"""

from functools import lru_cache

from hlat.config.sections import INTERLEAVED, ZERO_BUBBLE
from hlat.model import ModelShard
from hlat.model.derived import count_parameters, forward_flops_per_token
from hlat.parallel.stages.rank_memory import rank_bytes
from hlat.parallel.stages.stage_split import StageCosts, balance_layers
from hlat.parallel.stages.state_bytes import StateBytes, state_bytes_of_shards
from hlat.parallel.stages.step_shape import StepShape

_PASSES = 3  # backward is twice the work of forward


def stage_layers(step: StepShape) -> list[range]:
    """The layers of each stage, as the recipe lists them or as they are balanced."""
    counts = step.parallel.split or _balanced(step)
    stops = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [range(stop - count, stop) for count, stop in zip(counts, stops, strict=True)]


def rank_model_shards(step: StepShape, rank: int) -> list[ModelShard]:
    """The parts of a model that a rank builds: one per stage, ascending, or the one that a model without stages is."""
    layout, stages, layers = step.layout, step.parallel.stages, stage_layers(step)
    place = layout.coordinates(rank)
    return [
        ModelShard(place.tp, layout.tensor, layers[stage], embedding=stage == 0, head=stage == stages - 1)
        for stage in layout.stages_of(place.pp)
    ]


def state_bytes(
    step: StepShape, rank: int, parameter_bytes: int = 4, gradient_bytes: int = 4, moment_bytes: int = 8
) -> StateBytes:
    """Bytes of state on a rank; the arguments are those of ``state_bytes_of_shards``."""
    return state_bytes_of_shards(
        step, rank, rank_model_shards(step, rank), parameter_bytes, gradient_bytes, moment_bytes
    )


def stage_layer_counts(step: StepShape) -> list[tuple[int, ...]]:
    """Layers of each stage of each pipeline rank."""
    layers = stage_layers(step)
    return [tuple(len(layers[one]) for one in step.layout.stages_of(rank)) for rank in range(step.layout.pipeline)]


def peak_memory_rank(step: StepShape) -> int:
    """The pipeline rank that needs most memory in a step; the first of several."""
    needs = [rank_bytes(step, rank, sizes).total for rank, sizes in enumerate(stage_layer_counts(step))]
    return needs.index(max(needs))


@lru_cache(maxsize=1024)
def _balanced(step: StepShape) -> tuple[int, ...]:
    """Layers of each stage by FLOPs and bytes.

    FLOPs are those per token, causal, of forward, backward and what is computed again. The head is dear (a vocabulary
    of 128 k costs as much as several layers); looking up and adding to a row of the embedding is a handful of
    operations per element. How much is computed again to keep within a budget follows from the split, and is left out.
    """
    count = step.parallel.stages
    if count == 1:
        return (step.model.layers,)
    layer, attention, head = _forward_flops(step)
    schedule = step.parallel.schedule
    # Each part of a backward pass that is taken apart needs a block's products again, but attention only the first.
    again = {"full": layer * (2 if schedule in ZERO_BUBBLE else 1), "selective": attention}.get(step.policy, 0.0)
    extra = [0.0] * count
    extra[0] = _PASSES * 4.0 * step.model.hidden_size
    extra[-1] += _PASSES * head
    return balance_layers(
        step.model.layers,
        StageCosts(
            ranks=[step.layout.stage_rank(stage) for stage in range(count)],
            layer=_PASSES * layer + again,
            extra=extra,
            need=lambda rank, layers: rank_bytes(step, rank, (layers / step.virtual,) * step.virtual).total,
            # Interleaved, the last stages of all ranks take turns with that which has the head, and wait for it.
            later=schedule in INTERLEAVED,
        ),
    )


def _forward_flops(step: StepShape) -> tuple[float, float, float]:
    """FLOPs per token of a layer, of the attention within it, and of the head."""
    one, two = (step.model.model_copy(update={"layers": layers}) for layers in (1, 2))
    first, second = (forward_flops_per_token(model, step.sequence) for model in (one, two))
    layer = second - first
    products = 2.0 * (count_parameters(two).matmul - count_parameters(one).matmul)
    return layer, layer - products, first - layer
