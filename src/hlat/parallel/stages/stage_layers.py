"""Layers of each pipeline stage and rank.

    step shape -> FLOPs of layers, embedding, head; bytes of ranks -> stage_split.py -> layers of each stage
        -> model shards and state bytes of a rank

The result is a pure function of recipe and world size, so that training, rehearsal and planner get the same stages.
"""

from collections.abc import Sequence
from functools import lru_cache

from hlat.config import INTERLEAVED, ZERO_BUBBLE
from hlat.model import ModelShard, count_parameters, forward_flops_per_token
from hlat.parallel.stages.rank_memory import rank_bytes
from hlat.parallel.stages.stage_split import StageCosts, balance_layers
from hlat.parallel.stages.state_bytes import StateBytes, state_bytes_of_shards
from hlat.parallel.stages.step_shape import StepShape

_PASSES = 3  # forward and backward, in units of the forward FLOPs


def stage_layers(step: StepShape) -> list[range]:
    """Return the layers of each stage: ``parallel.split`` of the recipe, or balanced automatically."""
    counts = step.parallel.split or _balanced(step)
    stops = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [range(stop - count, stop) for count, stop in zip(counts, stops, strict=True)]


def rank_model_shards(step: StepShape, rank: int) -> list[ModelShard]:
    """Return the model shards that a rank builds: one per stage, ascending; one without a pipeline."""
    layout, stages, layers = step.layout, step.parallel.stages, stage_layers(step)
    coordinates = layout.coordinates(rank)
    return [
        ModelShard(coordinates.tp, layout.tensor, layers[stage], embedding=stage == 0, head=stage == stages - 1)
        for stage in layout.stages_of(coordinates.pp)
    ]


def state_bytes(step: StepShape, rank: int, parameter_bytes: int = 4, gradient_bytes: int = 4) -> StateBytes:
    """Compute the bytes of state of a rank; see ``state_bytes_of_shards`` for the arguments."""
    return state_bytes_of_shards(step, rank, rank_model_shards(step, rank), parameter_bytes, gradient_bytes)


def stage_layer_counts(step: StepShape) -> list[tuple[int, ...]]:
    """Return the number of layers of each stage of each pipeline rank."""
    layers = stage_layers(step)
    return [tuple(len(layers[stage]) for stage in step.layout.stages_of(rank)) for rank in range(step.layout.pipeline)]


def peak_memory_rank(step: StepShape) -> int:
    """Return the pipeline rank with the highest peak memory; the first if several are equal."""
    needs = _needs(step)
    return needs.index(max(needs))


def representative_ranks(step: StepShape, needs: Sequence[float] | None = None) -> list[int]:
    """Return the pipeline ranks that stand for all: the first two, the last, and the one that needs most memory.

    The second has buffers of messages on both sides and, of the ranks that do, the most micro-batches in flight. Plans
    report these ranks, and rehearsals run them.

    Args:
        step: the step.
        needs: bytes that each pipeline rank needs; None to count them without a device.
    """
    needs = _needs(step) if needs is None else needs
    last = step.layout.pipeline - 1
    return sorted({0, min(1, last), needs.index(max(needs)), last})


def _needs(step: StepShape) -> list[float]:
    """Count the bytes that each pipeline rank needs."""
    return [rank_bytes(step, rank, sizes).total for rank, sizes in enumerate(stage_layer_counts(step))]


@lru_cache(maxsize=1024)
def _balanced(step: StepShape) -> tuple[int, ...]:
    """Balance the layers of stages by FLOPs and bytes.

    FLOPs are per token (causal): forward, backward and recomputation. The head is expensive (a vocabulary of 128 k
    costs as much as several layers); the embedding lookup and its gradient are a few operations per element.
    Recomputation under a memory budget is left out, since it depends on the split.
    """
    count = step.parallel.stages
    if count == 1:
        return (step.model.layers,)
    layer, attention, head = _forward_flops(step)
    schedule = step.parallel.schedule
    # Each half of a split backward pass recomputes a block's matrix products, but only the first its attention.
    recomputed = {"full": layer * (2 if schedule in ZERO_BUBBLE else 1), "selective": attention}.get(step.policy, 0.0)
    extra = [0.0] * count
    extra[0] = _PASSES * 4.0 * step.model.hidden_size
    extra[-1] += _PASSES * head
    return balance_layers(
        step.model.layers,
        StageCosts(
            ranks=[step.layout.stage_rank(stage) for stage in range(count)],
            layer=_PASSES * layer + recomputed,
            extra=extra,
            need=lambda rank, layers: rank_bytes(step, rank, (layers / step.virtual,) * step.virtual).total,
            # With interleaving, the last stages of all ranks alternate with the one that has the head, and wait for it.
            later=schedule in INTERLEAVED,
        ),
    )


def _forward_flops(step: StepShape) -> tuple[float, float, float]:
    """Compute forward FLOPs per token of a layer, of its core attention, and of the head."""
    one, two = (step.model.model_copy(update={"layers": layers}) for layers in (1, 2))
    first, second = (forward_flops_per_token(model, step.sequence) for model in (one, two))
    layer = second - first
    products = 2.0 * (count_parameters(two).matmul - count_parameters(one).matmul)
    return layer, layer - products, first - layer
