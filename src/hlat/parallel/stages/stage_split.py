"""Balance layers over pipeline stages, for recipes without ``parallel.split``.

    time of a layer, embedding and head; bytes of a rank by its layers -> layers of each stage

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
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any


@dataclass(frozen=True)
class StageCosts:
    """Costs of pipeline stages as functions of their layers.

    Attributes:
        ranks: pipeline rank of each stage.
        layer: time of a layer, in any unit.
        extra: time of each stage in addition to its layers (embedding, head), in the same unit.
        need: bytes of a rank, by rank and number of layers; increases with the layers.
        later: True if the later of equally slow stages of a rank gets a remaining layer; False for the earlier.
    """

    ranks: Sequence[int]
    layer: float
    extra: Sequence[float]
    need: Callable[[int, int], float]
    later: bool = False


def balance_layers(layers: int, stages: StageCosts) -> tuple[int, ...]:
    """Return the number of layers of each stage, at least one.

    Args:
        layers: layers of the model, at least as many as stages.
        stages: costs of the stages.
    """
    assignment = _Assignment(stages)
    slowest_rank = assignment.assign(layers, assignment.rank_time)
    slowest_stage = assignment.assign(layers, assignment.stage_time, slowest_rank)
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
        """Time of the rank that runs a stage."""
        rank = self._stages.ranks[stage]
        return self._extra_of_ranks[rank] + (self._layers_of_ranks[rank] + more) * self._stages.layer

    def stage_time(self, stage: int, more: int = 0) -> float:
        """Time of a stage."""
        return self._stages.extra[stage] + (self.counts[stage] + more) * self._stages.layer

    def times(self, stage: int, more: int = 0) -> tuple[float, float, int, int]:
        """Sort key: time of the stage's rank, time of the stage, and the priority of equally slow ones."""
        priority = -stage if self._stages.later else stage
        return self.rank_time(stage, more), self.stage_time(stage, more), self._stages.ranks[stage], priority

    def bytes(self, stage: int, more: int = 0) -> float:
        """Peak bytes of the rank that runs a stage."""
        rank = self._stages.ranks[stage]
        key = rank, self._layers_of_ranks[rank] + more
        if key not in self._bytes:
            self._bytes[key] = self._stages.need(*key)
        return self._bytes[key]

    def assign(
        self,
        layers: int,
        cost: Callable[..., Any],
        slowest_rank: float = inf,
        slowest_stage: float = inf,
        fullest: float = inf,
    ) -> Any:
        """Assign all layers anew, each to the stage with the lowest ``cost(stage, 1)``, the first if several are equal.

        Args:
            layers: number of layers to assign; fewer are assigned if the limits do not allow more.
            cost: one of the methods above: a cost of the stage or of its rank.
            slowest_rank: limit of ``rank_time``.
            slowest_stage: limit of ``stage_time``.
            fullest: limit of ``bytes``.

        Returns:
            The largest cost of any stage.
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
            elif self._fits(stage, slowest_rank, slowest_stage, fullest):
                self.counts[stage] += 1
                self._layers_of_ranks[self._stages.ranks[stage]] += 1
                remaining -= 1
                heappush(heap, (cost(stage, 1), stage))
        return max(cost(stage) for stage in stages)

    def _fits(self, stage: int, slowest_rank: float, slowest_stage: float, fullest: float) -> bool:
        """Return True if a stage can get one more layer within the limits."""
        in_time = self.rank_time(stage, 1) <= slowest_rank and self.stage_time(stage, 1) <= slowest_stage
        return in_time and (fullest == inf or self.bytes(stage, 1) <= fullest)
