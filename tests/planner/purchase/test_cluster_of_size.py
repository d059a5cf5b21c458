"""The cluster that a budget's model gets: the best one for that model, whatever model was asked for first.

Predictions are those of a simple formula here, whose answer is known: the same search on the real ones takes minutes.
"""

from dataclasses import replace

import pytest

import hlat
from hlat.forecast import CHINCHILLA
from hlat.model.counts import count_parameters
from hlat.planner import offers
from hlat.planner import purchase as model_size
from hlat.planner.problem.request import PlanRequest
from hlat.planner.problem.shapes import nearest_shape
from hlat.planner.purchase import ModelSize
from hlat.planner.search import LayoutPrediction

RUN = {"sequence": 4096, "global_batch": 512, "precision": "mixed"}
KINDS = "p4d.24xlarge,p5.48xlarge"


@pytest.fixture(scope="module")
def one() -> LayoutPrediction:
    """Some prediction, of which days and cost are replaced."""
    return hlat.plan("llama-3.2-1b", "p4d.24xlarge:1", price="on-demand", tokens=10**9, **RUN).chosen


@pytest.fixture(autouse=True)
def formula(one: LayoutPrediction, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predict by a formula: small models are cheaper on p4d, large ones on p5, and larger ones on more instances."""

    def predict(request: PlanRequest) -> LayoutPrediction:
        size, cluster = count_parameters(request.model).total, request.cluster
        kind = 1.0 if cluster.instance.name == "p4d.24xlarge" else 2.0 * (size / 1e10) ** 0.2
        share = kind / (1 + cluster.count / (8 * (size / 1e9) ** 0.5))
        days = 6 * size * request.tokens / (1e15 * share * cluster.count) / 86400
        price = cluster.price(request.price)
        assert price is not None
        return replace(one, days=days, cost_usd=days * 24 * price[1])

    monkeypatch.setattr(offers, "best_layout", predict)


def answer(budget: str, first: float, generated: int | None, monkeypatch: pytest.MonkeyPatch) -> ModelSize:
    monkeypatch.setattr(model_size, "_FIRST_FLOPS", first)
    return hlat.choose_model_size(chips=KINDS, budget=budget, inference_tokens=generated, **RUN)


@pytest.mark.parametrize("generated", [None, 10**12])
@pytest.mark.parametrize("budget", ["5k", "5M"])
def test_the_model_that_is_asked_for_first_has_no_influence(
    budget: str, generated: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [answer(budget, first, generated, monkeypatch) for first in (1e19, 1e21, 1e23)]
    assert found[0].runs == found[1].runs == found[2].runs and found[0].missed == found[1].missed == found[2].missed


@pytest.mark.parametrize("budget", ["5k", "5M"])
def test_the_cluster_is_the_one_that_is_bought_for_that_model(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = answer(budget, 1e21, None, monkeypatch).runs[0]
    alone = hlat.choose_cluster(run.offer.request.name, chips=KINDS, budget=budget, **RUN).chosen
    assert (run.offer.cluster, run.tokens) == (alone.cluster, alone.request.tokens)
    wanted = CHINCHILLA.optimal_size(6 * run.parameters * run.tokens)[0]
    assert nearest_shape(wanted)[2] == run.parameters


def test_kind_and_number_follow_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (answer(budget, 1e21, None, monkeypatch).runs[0].offer for budget in ("5k", "5M"))
    assert small.cluster.instance.name == "p4d.24xlarge" and large.cluster.instance.name == "p5.48xlarge"
    assert small.cluster.count < large.cluster.count
