"""Which layers a pipeline stage has.

layers, FLOPs of each, of the head, of the embedding -> stages of about equal cost
"""

from functools import cache

from hlat.config import ModelConfig, ParallelConfig
from hlat.model import forward_flops_per_token


def stage_layers(model: ModelConfig, config: ParallelConfig, sequence_length: int) -> list[range]:
    """The layers of each stage, as the recipe lists them or so that the dearest stage is as cheap as can be."""
    counts = config.split or _cheapest_split(model, config.stages, sequence_length)
    stops = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [range(stop - count, stop) for count, stop in zip(counts, stops, strict=True)]


def _cheapest_split(model: ModelConfig, stages: int, sequence_length: int) -> list[int]:
    """Layers per stage that minimise the cost of the dearest one; among such splits, earlier stages take more.

    Costs are FLOPs per token. The head is dear (a vocabulary of 128 k costs as much as several layers); looking up and
    adding to a row of the embedding is a handful of operations per element.
    """
    one, two = (
        forward_flops_per_token(model.model_copy(update={"layers": layers}), sequence_length) for layers in (1, 2)
    )
    layer, head, embedding = two - one, 2 * one - two, 4.0 * model.hidden_size

    @cache
    def best(stage: int, left: int) -> tuple[float, list[int]]:
        extra = (embedding if stage == 0 else 0.0) + (head if stage == stages - 1 else 0.0)
        if stage == stages - 1:
            return left * layer + extra, [left]
        choices = []
        for count in range(left - (stages - 1 - stage), 0, -1):
            rest, counts = best(stage + 1, left - count)
            choices.append((max(count * layer + extra, rest), [count, *counts]))
        return min(choices, key=lambda choice: choice[0])

    return best(0, model.layers)[1]
