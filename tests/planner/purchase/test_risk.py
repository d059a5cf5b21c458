"""The warning of a prediction whose range reaches beyond the goal, by arithmetic on the ranges."""

import re
from dataclasses import replace

import pytest

import hlat
from hlat.planner.offers import Goal
from hlat.planner.purchase import Purchase
from hlat.planner.purchase_table import purchase_json, purchase_lines

MODEL = {"tokens": 10**11, "sequence": 4096, "global_batch": 512, "precision": "mixed"}


@pytest.fixture(scope="module")
def purchase() -> Purchase:
    """A choice of two kinds of instances, of which the second has the narrower range."""
    return hlat.choose_cluster("llama-3.2-1b", chips="p5.48xlarge,p4d.24xlarge", deadline="9d", **MODEL)


def told(purchase: Purchase) -> str:
    """The warning of the goal, on one line; empty without one."""
    text = " ".join(line.strip() for line in purchase_lines(purchase, 80))
    found = re.search(r"! (\S+ may miss .*?\.) (?:! |not |assumed |expect )", text)
    return found[1] if found else ""


def with_goal(purchase: Purchase, days: float | None, usd: float | None = None) -> Purchase:
    """The best of each kind only, with another goal."""
    return replace(purchase, goal=Goal(days, usd), sizes=())


def test_a_range_within_the_goal_is_not_worth_a_word(purchase: Purchase) -> None:
    slowest = max(offer.prediction.interval.around(offer.days)[1] for offer in purchase.rows)
    kept = with_goal(purchase, 1.001 * slowest)  # beyond rounding
    assert told(kept) == ""
    assert set(purchase_json(kept)["sure"]) == {offer.cluster.name for offer in kept.rows}


def test_a_range_beyond_the_deadline_is_told_with_a_deadline_that_leaves_room(purchase: Purchase) -> None:
    """Only a budget that chooses the tokens can meet any deadline; no other advice is given: it might be refused."""
    days = purchase.chosen.days * 1.001
    risky = replace(with_goal(purchase, days), rows=purchase.rows[:1])
    line = told(risky)
    assert line.startswith(f"{risky.chosen.cluster.name} may miss the deadline: ") and "budget" not in line
    assert risky.sure == () and purchase_json(risky)["sure"] == [] and "--" not in line
    found = hlat.choose_cluster(
        "llama-3.2-1b", chips="p5.48xlarge", deadline="3d", budget="6k", **MODEL | {"tokens": None}
    )
    assert found.affords and not found.sure and f"--deadline {found.roomy} leaves room." in told(found)
    again = hlat.choose_cluster(
        "llama-3.2-1b", chips="p5.48xlarge", deadline=found.roomy, budget="6k", **MODEL | {"tokens": None}
    )
    assert found.chosen.slow_end.days > 3 >= again.chosen.slow_end.days


def test_a_deadline_at_risk_has_a_number_of_instances_that_keeps_it(purchase: Purchase) -> None:
    """The numbers that leave room for the slow end are computed, so that they can be named."""
    name = purchase.chosen.cluster.instance.name
    days = purchase.chosen.days * 1.001
    found = hlat.choose_cluster("llama-3.2-1b", chips=name, deadline=f"{days:.4f}d", **MODEL)
    assert not found.goal.meets(found.chosen.slow_end)
    assert found.sure and all(offer.prediction.interval.around(offer.days)[1] <= days for offer in found.sure)


def test_offers_that_are_sure_are_named(purchase: Purchase) -> None:
    """Exactly one of two offers ends its range before the deadline."""
    ends = {offer.cluster.name: offer.prediction.interval.around(offer.days)[1] for offer in purchase.rows}
    first, second = sorted(ends.values())
    some = with_goal(purchase, (first + second) / 2)
    (sure,) = (name for name, end in ends.items() if end == first)
    assert [offer.cluster.name for offer in some.sure] == [sure]
    if some.chosen.cluster.name == sure:
        some = replace(some, rows=some.rows[::-1])
    assert told(some).endswith(f"Within the goal over the whole range: {sure}.")


def test_a_range_beyond_the_budget_is_told_unless_the_budget_chose_the_tokens(purchase: Purchase) -> None:
    usd = max(offer.usd for offer in purchase.rows) * 1.001
    risky = with_goal(purchase, None, usd)
    assert "may miss the budget: " in told(risky) and " in 4 of 5 runs" in told(risky)
    assert told(replace(risky, affords=True)) == ""


def test_more_instances_of_the_chosen_kind_may_be_sure_and_the_cheapest_is_named_first(purchase: Purchase) -> None:
    offers = {offer.cluster.name: offer for offer in (*purchase.rows, *purchase.sizes)}
    ends = {name: offer.prediction.interval.around(offer.days)[1] for name, offer in offers.items()}
    last = sorted(ends.values())[len(ends) // 2]
    sure = replace(purchase, goal=Goal(last * 1.001, None)).sure
    assert {offer.cluster.name for offer in sure} == {name for name, end in ends.items() if end <= last}
    assert len(sure) > 1 and [offer.usd for offer in sure] == sorted(offer.usd for offer in sure)


def test_what_hlat_cannot_run_is_not_recommended() -> None:
    """Trainium 1 is planned for comparison only: it is sure by its range, and not named beside GPUs."""
    both = hlat.choose_cluster("llama-3.2-1b", chips="p5.48xlarge,trn1.32xlarge", deadline="30d", **MODEL)
    kept = replace(both, goal=Goal(1000.0, None))
    names = {offer.cluster.instance.name for offer in kept.sure}
    assert names == {"p5.48xlarge"} and len(kept.rows) == 2
    trn1 = hlat.choose_cluster("llama-3.2-1b", chips="trn1.32xlarge", deadline="30d", **MODEL)
    assert {offer.cluster.instance.name for offer in replace(trn1, goal=Goal(1000.0, None)).sure} == {"trn1.32xlarge"}
