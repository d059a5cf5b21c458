"""The fullest rank: it is rehearsed by default, and its count matches its rehearsal."""

from typing import Any

import pytest

from hlat.config import Recipe
from hlat.parallel.layout import StepShape
from hlat.parallel.stages.rank_memory import rank_bytes
from hlat.parallel.stages.stage_layers import stage_layer_counts
from hlat.rehearsal import default_ranks, rehearse
from tests.support.distributed.stage_bytes import peak_memory_rank
from tests.support.rehearsal.small_recipes import recipe_of

# Numbers of layers that do not divide evenly. The fullest rank is mostly neither the first, middle nor last.
UNEVEN = {
    "1f1b": ({"schedule": "1f1b"}, 9, "none"),
    "1f1b, selective recomputation": ({"schedule": "1f1b"}, 11, "selective"),
    "gpipe": ({"schedule": "gpipe"}, 9, "none"),
    "zbv": ({"schedule": "zbv"}, 9, "none"),
    "interleaved": ({"schedule": "interleaved-1f1b"}, 10, "none"),
    "interleaved, full recomputation": ({"schedule": "interleaved-1f1b"}, 10, "full"),
}


def uneven(name: str, length: int = 32, **model: Any) -> Recipe:
    parallel, layers, policy = UNEVEN[name]
    return recipe_of(
        4,
        model={"layers": layers, "max_sequence_length": length, **model},
        data={"sequence_length": length},
        parallel={"pipeline": 4, **parallel},
        memory={"activation_checkpointing": policy},
    )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "zbv" else pytest.mark.slow) for name in UNEVEN]
)
def test_the_fullest_of_all_ranks_is_rehearsed_by_default(name: str) -> None:
    recipe = uneven(name)
    reports = rehearse(recipe, 4, range(4)).ranks
    fullest = max(reports, key=lambda report: report.peak_bytes)
    assert fullest.rank in default_ranks(recipe, 4)
    sizes = [tuple(stop - start for start, stop in report.layers) for report in reports]
    assert sizes == stage_layer_counts(StepShape.of(recipe, 4)), "the built stages have the counted layers"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "1f1b, selective recomputation", "zbv"])
def test_the_count_of_the_fullest_rank_matches_its_rehearsal(name: str) -> None:
    """With stages of several sizes; the tolerance is 3 %, as for all planned memory."""
    model = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "heads": 8, "kv_heads": 4}
    recipe = uneven(name, 512, **model)
    step = StepShape.of(recipe, 4)
    rank = peak_memory_rank(step)
    (report,) = rehearse(recipe, 4, [rank]).ranks
    assert abs(rank_bytes(step, rank, stage_layer_counts(step)[rank]).total / report.peak_bytes - 1) < 0.03
