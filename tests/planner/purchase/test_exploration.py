"""Few predictions, the same answer: the pruned search against one that predicts every number and counts all memory."""

import pytest

import hlat
from hlat.hardware import load_catalog
from hlat.planner.memory import estimated_ranks, rank_memory
from hlat.planner.offers import KNEE, Goal, Kind, Offer, numbers_tried
from hlat.planner.problem.layouts import candidates
from hlat.planner.problem.question import PlanQuestion
from hlat.planner.problem.request import PlanRequest, resolve_request
from hlat.planner.search import USABLE_MEMORY_SHARE, CandidateLayouts, fitting_positions
from tests.support.planner.requests import request_for

RUN = {"tokens": 2 * 10**10, "sequence": 2048, "global_batch": 1024}
KINDS = ("p4d.24xlarge", "p5.48xlarge", "p5en.48xlarge")


def every_offer(name: str, most: int) -> list[Offer]:
    """Offers of a kind of instance for every number that a search tries, up to one."""
    catalog = load_catalog()
    instance = catalog.instance(name)
    chip = catalog.chip(instance.chip)
    question = PlanQuestion("llama-3.2-1b", precision="mixed", **RUN)
    kind = Kind(instance, chip, lambda one: resolve_request(question, one, "on-demand"))
    return [offer for number in numbers_tried(most) if (offer := kind.at(number)) is not None]


@pytest.fixture(scope="module")
def exhaustive() -> dict[str, list[Offer]]:
    """All offers up to 32 instances. On more, 256 sequences are too few for some of the numbers."""
    return {name: every_offer(name, 32) for name in KINDS}


def best_of_all(goal: Goal, offers: dict[str, list[Offer]]) -> Offer:
    """The answer by its definition in docs/planning.md, from all offers."""
    rows = []
    for of_kind in offers.values():
        if goal.days is not None:
            enough = [offer for offer in of_kind if offer.days <= goal.days]
            power = min((one.cluster.count for one in enough if one.cluster.count.bit_count() == 1), default=0)
            rows += [one for one in enough if power / 2 < one.cluster.count <= power and goal.meets(one)]
        elif goal.usd is not None:
            rows += [offer for offer in of_kind if goal.meets(offer)]
        else:
            doublings = [offer for offer in of_kind if offer.cluster.count.bit_count() == 1]
            flat = KNEE * min(offer.price for offer in doublings)
            rows.append(min((one for one in doublings if one.price <= flat), key=lambda one: one.days))
    return min(rows, key=goal.order)


@pytest.mark.parametrize(
    "question",
    [
        {"deadline": "12h"},
        {"deadline": "5h"},
        {"deadline": "2h"},
        {"deadline": "1d", "budget": "900"},
        {"deadline": "6h", "budget": "1000"},
    ],
    ids=str,
)
def test_the_answer_is_that_of_all_predictions(exhaustive: dict, question: dict[str, str]) -> None:
    found = hlat.choose_cluster(
        "llama-3.2-1b", chips=",".join(KINDS), precision="mixed", price="on-demand", **question, **RUN
    )
    expected = best_of_all(found.goal, exhaustive)
    assert found.chosen.cluster == expected.cluster
    assert (found.chosen.days, found.chosen.usd) == pytest.approx((expected.days, expected.usd))


def test_without_a_goal_the_bend_is_found_and_kinds_that_are_left_are_dearer(exhaustive: dict) -> None:
    """Costs are flat up to 32 instances and bend beyond: the number is at least as good as the best up to there."""
    found = hlat.choose_cluster("llama-3.2-1b", chips=",".join(KINDS), precision="mixed", price="on-demand", **RUN)
    expected = best_of_all(Goal(), {found.chosen.cluster.instance.name: exhaustive[found.chosen.cluster.instance.name]})
    assert found.chosen.days <= expected.days
    for name in found.missed:
        assert min(offer.price for offer in exhaustive[name]) > found.chosen.price


def test_a_budget_alone_finds_no_slower_cluster_than_all_predictions(exhaustive: dict) -> None:
    for budget in ("800", "850", "1000"):
        found = hlat.choose_cluster(
            "llama-3.2-1b", chips=",".join(KINDS), precision="mixed", price="on-demand", budget=budget, **RUN
        )
        expected = best_of_all(found.goal, exhaustive)
        assert found.chosen.usd <= float(budget) and found.chosen.days <= expected.days


@pytest.mark.parametrize(
    ("model", "cluster", "more"),
    [
        ("llama-3.1-8b", "trn1.32xlarge:1", {}),
        ("llama-3.1-8b", "g5.xlarge:32", {}),
        ("llama-2-70b", "h100:10", {"global_batch": 320}),
        ("llama-2-7b", "p4d.24xlarge:1", {"precision": "bf16-sr"}),
    ],
)
def test_memory_that_is_counted_for_few_layouts_decides_as_for_all(model: str, cluster: str, more: dict) -> None:
    """In particular the layout that recomputes everything never needs more than its siblings.

    Layouts that are found beyond the estimate, with layers divided unevenly, fit by the exact count of every rank.
    """
    request: PlanRequest = request_for(model, cluster, **more)
    tried = list(candidates(request))
    limit = USABLE_MEMORY_SHARE * request.cluster.memory_bytes
    within = [index for index, one in enumerate(tried) if max(estimated_ranks(request, one)) <= limit]
    found = list(fitting_positions(CandidateLayouts(request), range(len(tried))))
    assert [index for index in found if index in set(within)] == within
    for index in set(found) - set(within):
        assert max(rank_memory(request, tried[index], rank).total for rank in range(tried[index].pipeline)) <= limit
