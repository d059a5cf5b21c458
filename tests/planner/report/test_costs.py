"""Parts of the cost of a run, against numbers by hand: 10 days of 4 instances at 50 USD, goodput 0.96."""

from dataclasses import replace
from typing import Any

import pytest

import hlat
from hlat.data.prepared.shards import token_dtype
from hlat.hardware.catalog import InstancePrice
from hlat.planner.plan import make_plan
from hlat.planner.problem.request import PlanRequest
from hlat.planner.report.comparison import plans_as_json
from hlat.planner.report.explanation import cost_parts, cost_sentence, price_sentence
from hlat.planner.search import LayoutPrediction
from tests.support.planner.requests import request_for

COST = 10 * 24 * 4 * 50.0


@pytest.fixture(scope="module")
def planned() -> LayoutPrediction:
    one = hlat.plan("llama-3.2-1b", "p5.48xlarge:4", tokens=10**11, layout="zero=3").chosen
    return replace(one, days=10.0, cost_usd=COST, reliability=replace(one.reliability, goodput=0.96, saved_bytes=20e9))


def request_at(kind: str = "on-demand", tokens: int = 10**11, **price: Any) -> PlanRequest:
    """A request whose only price is 50 USD per instance and hour."""
    request = request_for("llama-3.2-1b", "p5.48xlarge:4", tokens=tokens)
    one = InstancePrice(usd_per_hour=50.0, seen="2026-11-20", source="", **price)
    instance = request.cluster.instance.model_copy(update={"prices": {kind: one}})
    return replace(request, cluster=replace(request.cluster, instance=instance))


def test_time_without_steps_is_idle(planned: LayoutPrediction) -> None:
    """4 % of 48,000 USD."""
    parts = cost_parts(request_at(), planned)
    assert parts is not None and (parts["storage"], parts["egress"]) == (None, None)
    assert (parts["steps"], parts["idle"], parts["total"]) == pytest.approx((46_080, 1_920, 48_000))
    assert cost_sentence(request_at(), planned) == (
        "48,000 USD = 46,080 steps + 1,920 idle (saves, failures, restarts); storage and egress not counted: no price "
        "is known (--quotes)"
    )


@pytest.mark.parametrize(("days", "sold"), [(9.2, 10), (10.0, 10), (13.5, 14), (14.1, 21), (22.0, 28)])
def test_a_capacity_block_is_paid_to_its_end(planned: LayoutPrediction, days: float, sold: int) -> None:
    """By the day up to 14 days, then by the week; 4,800 USD a day."""
    run = replace(planned, days=days, cost_usd=4_800.0 * days)
    parts = cost_parts(request_at("capacity-block"), run)
    assert parts is not None
    assert (parts["steps"], parts["total"]) == pytest.approx((0.96 * 4_800 * days, 4_800 * sold))
    assert f"(saves, failures, restarts, rest of {sold} days)" in cost_sentence(request_at("capacity-block"), run)


def test_storage_of_tokens_and_checkpoints_and_egress_of_one(planned: LayoutPrediction) -> None:
    """100 B tokens of 4 bytes (128,256 words) and 3 checkpoints of 20 GB for 10 of 30.4375 days; 20 GB leave."""
    request = request_at(storage=0.02, egress=0.09)
    assert token_dtype(request.model.vocab_size) == "uint32"
    parts = cost_parts(request, planned)
    assert parts is not None
    assert (parts["storage"], parts["egress"]) == pytest.approx((460 * 0.02 * 10 / 30.4375, 1.8))
    assert parts["total"] == pytest.approx(48_000 + 3.02259 + 1.8, abs=1e-3)
    assert cost_sentence(request, planned).endswith(
        "+ 3 storage (400 GB of tokens, 3 checkpoints of 20 GB) + 2 egress (a checkpoint)"
    )


def test_small_vocabularies_are_stored_in_two_bytes(planned: LayoutPrediction) -> None:
    request = request_at(storage=0.02, egress=0.0)
    small = replace(request, model=request_for("llama-2-7b").model)
    assert token_dtype(small.model.vocab_size) == "uint16"
    parts = cost_parts(small, planned)
    assert parts is not None and parts["storage"] == pytest.approx(260 * 0.02 * 10 / 30.4375)
    assert parts["egress"] == 0


def test_the_price_says_where_it_is_from_and_that_spot_instances_are_taken_away() -> None:
    request = request_at("spot", origin="b eu, quoted 2026-11-20")
    says = "200.00 USD per hour, spot: b eu, quoted 2026-11-20"
    assert price_sentence(request).startswith(f"{says}; taken away no more often than machines fail")
    rate = request.cluster.instance.failures.model_copy(update={"source": "given by the user"})
    instance = request.cluster.instance.model_copy(update={"failures": rate})
    assert price_sentence(replace(request, cluster=replace(request.cluster, instance=instance))) == says


def test_without_a_price_there_are_no_parts(planned: LayoutPrediction) -> None:
    request = request_at()
    free = replace(request.cluster, instance=request.cluster.instance.model_copy(update={"prices": {}}))
    unpriced = replace(request, cluster=free)
    run = replace(planned, cost_usd=None)
    assert (cost_parts(unpriced, run), cost_sentence(unpriced, run)) == (None, "")
    assert price_sentence(unpriced) == "not known"


def test_the_parts_are_in_json() -> None:
    request = request_at(storage=0.02, egress=0.09, origin="b eu, quoted 2026-11-20")
    plan = make_plan(request, "zero=3")
    [content] = plans_as_json([plan])
    parts = content["chosen"]["cost_parts_usd"]
    assert parts["total"] == pytest.approx(sum(parts[name] for name in ("steps", "idle", "storage", "egress")))
    assert parts["steps"] + parts["idle"] == pytest.approx(content["chosen"]["cost_usd"])
    assert content["assumptions"]["price_origin"] == "b eu, quoted 2026-11-20"
