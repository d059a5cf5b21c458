"""Layers of each pipeline stage and rank, balanced for recipes without ``parallel.split``.

    step shape -> FLOPs of layers, embedding, head; bytes of ranks --balance_layers--> layers of each stage
        -> model shards and state bytes of a rank

The result is a pure function of recipe and world size, so that training, rehearsal and planner get the same stages.

The criteria of the best split are, in this order:

1. The slowest rank is as fast as possible: a rank runs its stages in turn, so a step takes as long as its slowest rank.
2. The slowest stage is as fast as possible.
3. The peak memory of the fullest rank is as low as possible: the first ranks have the most micro-batches in flight.
4. Ranks and stages have about equal times, and earlier ranks get the remaining layers: they start earlier in a step.

Each criterion is optimised greedily, by assigning layers one by one to the stage where one more costs least. The cost
of a rank or stage increases with its own layers only, and a stage belongs to one rank, so no other assignment has a
lower maximum cost (Federgruen & Groenevelt 1986: greedy is optimal for increasing costs under nested limits). The
maximum of each criterion is a limit for the next.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import accumulate
from math import inf
from typing import Any

from hlat.config import INTERLEAVED, ZERO_BUBBLE
from hlat.model import ModelShard, count_parameters, forward_flops_per_token
from hlat.parallel.layout import StepShape
from hlat.parallel.stages.rank_memory import rank_bytes

_PASSES = 3  # forward and backward, in units of the forward FLOPs


def stage_layers(step: StepShape) -> list[range]:
    """Return the layers of each stage: ``parallel.split`` of the recipe, or balanced automatically."""
    counts = step.parallel.split or _balanced(step)
    return [range(stop - count, stop) for count, stop in zip(counts, accumulate(counts), strict=True)]


def rank_model_shards(step: StepShape, rank: int) -> list[ModelShard]:
    """Return the model shards that a rank builds: one per stage, ascending; one without a pipeline."""
    layout, stages, layers = step.layout, step.parallel.stages, stage_layers(step)
    coordinates = layout.coordinates(rank)
    return [
        ModelShard(coordinates.tp, layout.tensor, layers[stage], embedding=stage == 0, head=stage == stages - 1)
        for stage in layout.stages_of(coordinates.pp)
    ]


def stage_layer_counts(step: StepShape) -> list[tuple[int, ...]]:
    """Return the number of layers of each stage of each pipeline rank."""
    layers = stage_layers(step)
    return [tuple(len(layers[stage]) for stage in step.layout.stages_of(rank)) for rank in range(step.layout.pipeline)]


def representative_ranks(step: StepShape, needs: Sequence[float] | None = None) -> list[int]:
    """Return the pipeline ranks that plans report and rehearsals run: first two, last, and that with most ``needs``."""
    # Bytes of each pipeline rank; without a device those of an accelerator.
    if needs is None:
        needs = [rank_bytes(step, rank, sizes).total for rank, sizes in enumerate(stage_layer_counts(step))]
    last = step.layout.pipeline - 1
    # The second has buffers of messages on both sides and, of the ranks that do, the most micro-batches in flight.
    return sorted({0, min(1, last), needs.index(max(needs)), last})


@lru_cache(maxsize=1024)
def _balanced(step: StepShape) -> tuple[int, ...]:
    """Balance the layers of stages by FLOPs per token (causal) and bytes."""
    count = step.parallel.stages
    if count == 1:
        return (step.model.layers,)
    # Forward, backward and recomputation. The head is expensive: a vocabulary of 128 k costs as much as several layers.
    # The embedding lookup and its gradient are a few operations per element. Recomputation under a memory budget is
    # left out, since it depends on the split.
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
    """Forward FLOPs per token of a layer, of its core attention, and of the head."""
    one, two = (step.model.model_copy(update={"layers": layers}) for layers in (1, 2))
    first, second = (forward_flops_per_token(model, step.sequence) for model in (one, two))
    layer = second - first
    products = 2.0 * (count_parameters(two).matmul - count_parameters(one).matmul)
    return layer, layer - products, first - layer


@dataclass(frozen=True)
class StageCosts:
    """Costs of pipeline stages as functions of their layers."""

    ranks: Sequence[int]  # pipeline rank of each stage
    layer: float  # time, in any unit
    extra: Sequence[float]  # time of each stage in addition to its layers (embedding, head), in the same unit
    need: Callable[[int, int], float]  # bytes of a rank, by rank and number of layers; increases with the layers
    later: bool = False  # the later of equally slow stages of a rank gets a remaining layer, not the earlier


def balance_layers(layers: int, stages: StageCosts) -> tuple[int, ...]:
    """Return the number of layers of each stage, at least one; there are no fewer layers than stages."""
    assignment = _Assignment(stages)
    slowest_rank = assignment.assign(layers, assignment.rank_time)
    slowest_stage = assignment.assign(layers, assignment.stage_time, slowest_rank)
    # The maximum of each criterion is a limit for the next.
    limits = slowest_rank, slowest_stage
    assignment.assign(layers + 1, assignment.times, *limits)
    if sum(assignment.counts) > layers:  # otherwise every rank is at its limit, and memory does not matter
        fullest = assignment.assign(layers, assignment.bytes, *limits)
        assignment.assign(layers, assignment.times, *limits, fullest)
    return tuple(assignment.counts)


class _Assignment:
    """Layers assigned so far, by stage in ``counts``, and costs of a stage with them, or with ``more`` layers added."""

    def __init__(self, stages: StageCosts) -> None:
        self._stages = stages
        self.counts: list[int] = []
        self._layers_of_ranks: list[int] = []
        self._extra_of_ranks = [0.0] * (max(stages.ranks) + 1)
        for rank, extra in zip(stages.ranks, stages.extra, strict=True):
            self._extra_of_ranks[rank] += extra
        self._bytes: dict[tuple[int, int], float] = {}

    def rank_time(self, stage: int, more: int = 0) -> float:
        rank = self._stages.ranks[stage]
        return self._extra_of_ranks[rank] + (self._layers_of_ranks[rank] + more) * self._stages.layer

    def stage_time(self, stage: int, more: int = 0) -> float:
        return self._stages.extra[stage] + (self.counts[stage] + more) * self._stages.layer

    def times(self, stage: int, more: int = 0) -> tuple[float, float, int, int]:
        # A sort key: the last two decide between equally slow stages
        priority = -stage if self._stages.later else stage
        return self.rank_time(stage, more), self.stage_time(stage, more), self._stages.ranks[stage], priority

    def bytes(self, stage: int, more: int = 0) -> float:
        """Peak bytes of the rank that runs a stage."""
        rank = self._stages.ranks[stage]
        key = rank, self._layers_of_ranks[rank] + more
        if key not in self._bytes:
            self._bytes[key] = self._stages.need(*key)
        return self._bytes[key]

    def assign(self, layers: int, cost: Callable[..., Any], *limits: float) -> Any:
        """Assign all layers anew, each to the stage with the lowest ``cost(stage, 1)``; return the largest cost.

        Of equal costs the first stage gets the layer. Fewer layers are assigned if the ``limits`` do not allow more:
        times of the slowest rank and of the slowest stage, bytes of the fullest rank.
        """
        stages = range(len(self._stages.ranks))
        self.counts = [1] * len(stages)
        self._layers_of_ranks = [0] * len(self._extra_of_ranks)
        for rank in self._stages.ranks:
            self._layers_of_ranks[rank] += 1
        remaining = layers - len(stages)
        heap = [(cost(stage, 1), stage) for stage in stages]
        heapify(heap)
        while heap and remaining:
            queued, stage = heappop(heap)
            current = cost(stage, 1)
            if current != queued:  # another stage of its rank has got a layer meanwhile
                heappush(heap, (current, stage))
            elif self._fits(stage, *limits):
                self.counts[stage] += 1
                self._layers_of_ranks[self._stages.ranks[stage]] += 1
                remaining -= 1
                heappush(heap, (cost(stage, 1), stage))
        return max(cost(stage) for stage in stages)

    def _fits(self, stage: int, slowest_rank: float = inf, slowest_stage: float = inf, fullest: float = inf) -> bool:
        in_time = self.rank_time(stage, 1) <= slowest_rank and self.stage_time(stage, 1) <= slowest_stage
        return in_time and (fullest == inf or self.bytes(stage, 1) <= fullest)
