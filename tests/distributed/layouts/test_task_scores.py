"""Log-likelihoods of requests are those of each request alone, in any layout, whatever rows they are padded to.

The reference computes ``log_softmax`` of the plain model's logits for one unpadded request at a time. In float64 the
difference is the order of summation: chains of at most a few hundred terms with errors of 2^-53, about 1e-13 of the
sum. The bound of 1e-9 is far above that, and far below the effect of one token that does not belong to the request.
"""

import random

import pytest
import torch

from hlat.config.load import parse_recipe
from hlat.parallel import build_parallel
from hlat.runtime.distributed.join import Runtime
from hlat.training.validation.tasks import TokenRow, score_requests
from tests.support.distributed.layouts import CASES, Case, recipe_content
from tests.support.distributed.workers import Pool

WITHIN = 1e-9
LENGTH = 512
CPU = torch.device("cpu")
ONE = Case("one process", 1, {})
NAMES = (
    *("TP2 + SP", "TP4 + SP, q and k norms, odd vocabulary", "CP2", "TP2 x CP2", "DP2, ZeRO 3", "PP2 1f1b", "PP2 zbv"),
    *("PP2, tied", "PP2 x CP2 x DP2, ZeRO 1", "TP2 x PP2 x DP2, ZeRO 1", "TP2 x CP2, sliding window"),
)
USUAL = ("one process", "TP2 x CP2", "PP2 zbv", "PP2 x CP2 x DP2, ZeRO 1")
LAYOUTS = [
    pytest.param(case, isolate, marks=() if case.name in USUAL and not isolate else pytest.mark.slow)
    for case in (ONE, *(case for case in CASES if case.name in NAMES))
    for isolate in (False, True)
]


def requests(vocabulary: int) -> list[TokenRow]:
    """Rows of every padded length, the longest and the shortest possible among them, in no order."""
    draw = random.Random(5)
    sizes = [LENGTH + 1, 2, *(draw.randrange(3, 2 + LENGTH // draw.choice((1, 3, 6, 30))) for _ in range(12))]
    return [
        TokenRow(tuple(draw.randrange(vocabulary) for _ in range(size)), draw.randint(1, min(size - 1, 40)))
        for size in sizes
    ]


def content_of(case: Case, isolate: bool = False) -> dict[str, object]:
    return recipe_content(case, data={"sequence_length": LENGTH, "isolate": isolate}, model={"init_std": 0.2})


def scored(runtime: Runtime, content: dict[str, object], rows: list[TokenRow]) -> list[float]:
    """Score rows on a rank; a job of the pool."""
    recipe = parse_recipe(content, world=runtime.world)
    model = build_parallel(recipe, runtime, recipe.training.seed, torch.float64)
    return score_requests(model, rows, LENGTH, recipe.batch.micro_batch)


@torch.no_grad()
def alone(case: Case, rows: list[TokenRow]) -> list[float]:
    """Compute the same with the plain model, one request at a time."""
    recipe = parse_recipe(content_of(Case("one process", 1, {}, case.model)), world=1)
    (model,) = build_parallel(recipe, Runtime(CPU), recipe.training.seed, torch.float64).stages
    found = []
    for tokens, asked in rows:
        logits = model(torch.tensor([tokens[:-1]])).log_softmax(-1)[0, -asked:]
        found.append(float(logits.gather(1, torch.tensor(tokens[-asked:]).unsqueeze(1)).sum()))
    return found


@pytest.mark.parametrize(("case", "isolate"), LAYOUTS, ids=str)
def test_in_any_layout_a_request_is_scored_as_if_alone(case: Case, isolate: bool, pool: Pool) -> None:
    rows = requests(parse_recipe(content_of(case), world=case.world).model.vocab_size)
    wanted = alone(case, rows)
    for found in pool.run(case.world, scored, content_of(case, isolate), rows):
        assert found == pytest.approx(wanted, rel=WITHIN)
