"""Which layers a pipeline stage has.

layers, FLOPs of each, of the head, of the embedding -> stages of about equal cost
"""

from functools import cache, lru_cache

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
    return list(_split(model.layers, stages, two - one, 2 * one - two, 4.0 * model.hidden_size))


@lru_cache(maxsize=256)
def _split(layers: int, stages: int, layer: float, head: float, embedding: float) -> tuple[int, ...]:
    @cache
    def best(stage: int, left: int) -> tuple[float, int]:
        """Cost of the dearest of the stages from this one on, and how many layers this one takes."""
        if stage == stages - 1:
            return left * layer + head + (embedding if stages == 1 else 0.0), left
        extra = embedding if stage == 0 else 0.0
        # With more layers here its own cost rises and that of the rest falls: the best is where they cross.
        few, many = 1, left - (stages - 1 - stage)
        while few < many:
            middle = (few + many) // 2
            if middle * layer + extra >= best(stage + 1, left - middle)[0]:
                many = middle
            else:
                few = middle + 1
        count = few
        if count > 1 and best(stage + 1, left - count + 1)[0] < max(
            count * layer + extra, best(stage + 1, left - count)[0]
        ):
            count -= 1
        return max(count * layer + extra, best(stage + 1, left - count)[0]), count

    counts, left = [], layers
    for stage in range(stages):
        counts.append(best(stage, left)[1])
        left -= counts[-1]
    return tuple(counts)
