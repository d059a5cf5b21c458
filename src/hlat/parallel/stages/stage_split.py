"""How many layers each stage of a pipeline takes, where the recipe does not say.

    time of a layer and of the ends, bytes of a rank by its layers -> layers of each stage

Chosen is, in this order, the split

1. whose slowest rank is fastest: a rank's stages take turns, so that a step is as long as its slowest rank;
2. whose slowest stage is fastest;
3. whose fullest rank is smallest: the first ranks have the most micro-batches in flight;
4. whose ranks and stages are about equally slow, earlier ranks taking what is left over: the earlier the slowest rank
   is, the sooner has it something to do.

Each is found by dealing out layers one by one to where one more costs least. What a rank or a stage costs grows with
its own layers only, and a stage belongs to one rank, so that no other way of dealing has a lower largest cost
(Federgruen & Groenevelt 1986: greedy is optimal for increasing costs under nested limits). What one round finds is a
limit in the next.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any


@dataclass(frozen=True)
class StageCosts:
    """Stages that layers are dealt out to.

    Attributes:
        ranks: the pipeline rank of each stage.
        layer: time of a layer.
        extra: time of what a stage has besides layers, by stage; in the same unit.
        need: bytes of a rank, by rank and layers; grows with these.
        later: whether of equally slow stages of a rank the later takes a layer that is left over, and not the earlier.
    """

    ranks: Sequence[int]
    layer: float
    extra: Sequence[float]
    need: Callable[[int, int], float]
    later: bool = False


def balance_layers(layers: int, stages: StageCosts) -> tuple[int, ...]:
    """Layers of each stage, at least one.

    Args:
        layers: of the model, at least as many as there are stages.
    """
    loads = _Assignment(stages)
    slowest_rank = loads.assign(layers, loads.rank_time)
    slowest_stage = loads.assign(layers, loads.stage_time, slowest_rank)
    limits = slowest_rank, slowest_stage
    loads.assign(layers + 1, loads.times, *limits)
    if sum(loads.counts) > layers:  # else every rank is at its limit, and no bytes have to be counted
        fullest = loads.assign(layers, loads.bytes, *limits)
        loads.assign(layers, loads.times, *limits, fullest)
    return tuple(loads.counts)


class _Assignment:
    """Layers dealt out so far, by stage in ``counts``, and what stages cost with them, or with some ``more``."""

    def __init__(self, stages: StageCosts) -> None:
        self._stages = stages
        self.counts: list[int] = []
        self._of_ranks: list[int] = []
        self._extra_of_ranks = [0.0] * (max(stages.ranks) + 1)
        for rank, extra in zip(stages.ranks, stages.extra, strict=True):
            self._extra_of_ranks[rank] += extra
        self._bytes: dict[tuple[int, int], float] = {}

    def rank_time(self, stage: int, more: int = 0) -> float:
        """Time of the rank of a stage."""
        rank = self._stages.ranks[stage]
        return self._extra_of_ranks[rank] + (self._of_ranks[rank] + more) * self._stages.layer

    def stage_time(self, stage: int, more: int = 0) -> float:
        """Time of a stage."""
        return self._stages.extra[stage] + (self.counts[stage] + more) * self._stages.layer

    def times(self, stage: int, more: int = 0) -> tuple[float, float, int, int]:
        """Time of the rank of a stage, and of the stage, and which of equally slow ones comes first."""
        place = -stage if self._stages.later else stage
        return self.rank_time(stage, more), self.stage_time(stage, more), self._stages.ranks[stage], place

    def bytes(self, stage: int, more: int = 0) -> float:
        """Bytes of the rank of a stage."""
        rank = self._stages.ranks[stage]
        key = rank, self._of_ranks[rank] + more
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
        """Deal out layers anew, each to the stage where ``cost(stage, 1)`` is lowest, the first of several.

        Args:
            layers: as many, or as many as the limits allow.
            cost: one of the methods above; of the stage alone, or of its rank.
            slowest_rank, slowest_stage, fullest: limits of the three costs.

        Returns:
            The largest cost of any stage.
        """
        every = range(len(self._stages.ranks))
        self.counts = [1] * len(every)
        self._of_ranks = [0] * len(self._extra_of_ranks)
        for rank in self._stages.ranks:
            self._of_ranks[rank] += 1
        left = layers - len(every)
        heap = [(cost(stage, 1), stage) for stage in every]
        heapify(heap)
        while heap and left:
            known, stage = heappop(heap)
            now = cost(stage, 1)
            if now != known:  # another stage of its rank has grown
                heappush(heap, (now, stage))
            elif self._fits(stage, slowest_rank, slowest_stage, fullest):
                self.counts[stage] += 1
                self._of_ranks[self._stages.ranks[stage]] += 1
                left -= 1
                heappush(heap, (cost(stage, 1), stage))
        return max(cost(stage) for stage in every)

    def _fits(self, stage: int, slowest_rank: float, slowest_stage: float, fullest: float) -> bool:
        """Whether a stage can take one layer more within these limits."""
        in_time = self.rank_time(stage, 1) <= slowest_rank and self.stage_time(stage, 1) <= slowest_stage
        return in_time and (fullest == inf or self.bytes(stage, 1) <= fullest)
