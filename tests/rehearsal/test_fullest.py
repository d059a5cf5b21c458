"""The rank that needs most memory is among those that a rehearsal takes by itself; its layers are those of the plan."""

from typing import Any

import pytest

from hlat.config import Recipe
from hlat.parallel.stages import Cut, fullest_rank, rank_bytes, sizes_of_ranks
from hlat.rehearsal import default_ranks, rehearse
from tests.support.rehearsal.small_recipes import recipe_of

# So many layers that ranks differ; of most the fullest is neither the first, nor the middle, nor the last.
UNEVEN = {
    "1f1b": ({"schedule": "1f1b"}, 9, "none"),
    "1f1b, attention again": ({"schedule": "1f1b"}, 11, "selective"),
    "gpipe": ({"schedule": "gpipe"}, 9, "none"),
    "in a V": ({"schedule": "zbv"}, 9, "none"),
    "interleaved": ({"schedule": "interleaved-1f1b"}, 10, "none"),
    "interleaved, everything again": ({"schedule": "interleaved-1f1b"}, 10, "full"),
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
    "name", [pytest.param(name, marks=() if name == "in a V" else pytest.mark.slow) for name in UNEVEN]
)
def test_the_fullest_of_all_ranks_is_rehearsed_by_default(name: str) -> None:
    recipe = uneven(name)
    reports = rehearse(recipe, 4, range(4)).ranks
    fullest = max(reports, key=lambda report: report.peak_bytes)
    assert fullest.rank in default_ranks(recipe, 4)
    sizes = [tuple(stop - start for start, stop in report.layers) for report in reports]
    assert sizes == sizes_of_ranks(Cut.of(recipe, 4)), "what is built is what is counted"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "1f1b, attention again", "in a V"])
def test_the_fullest_rank_is_counted_as_it_is_rehearsed(name: str) -> None:
    """With stages of several sizes; 3 % as of all planned memory (tests/distributed/test_planned.py)."""
    model = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "heads": 8, "kv_heads": 4}
    recipe = uneven(name, 512, **model)
    cut = Cut.of(recipe, 4)
    rank = fullest_rank(cut)
    (report,) = rehearse(recipe, 4, [rank]).ranks
    assert abs(rank_bytes(cut, rank, sizes_of_ranks(cut)[rank]).total / report.peak_bytes - 1) < 0.03
