"""Rates and energy in a plan's sentences: those of the cost model and of the prediction, not of the data sheet."""

import re
from dataclasses import replace

import pytest

import hlat
from hlat.planner.plan import make_plan
from hlat.planner.problem.layouts import parse_layout
from hlat.planner.report.explanation import energy_sentence, explain, message_times, storage_sentence
from hlat.planner.search import predict_layout
from hlat.runtime.quantities import amount_text
from tests.support.planner.requests import request_for


def with_links(request, factor):
    """The request on instances with other fast links."""
    instance = request.cluster.instance
    faster = instance.model_copy(update={"link": factor * instance.link, "network": factor * instance.network})
    return replace(request, cluster=replace(request.cluster, instance=faster))


def test_all_reduces_take_the_time_that_the_step_has_for_them() -> None:
    """Trainium exposes every all-reduce: four per layer and micro-batch are the tensor part of a step."""
    request = request_for("llama-2-7b", "trn1.32xlarge:8", global_batch=256)
    layout = parse_layout("tp=8,gather=never", request)
    predicted = predict_layout(request, layout)
    messages = 4 * request.model.layers * layout.accumulation(request.global_batch)
    seconds = message_times(request, layout)["tensor"].seconds
    assert predicted.components["tensor"] == pytest.approx(messages * seconds)


def test_messages_between_stages_take_the_time_of_the_simulation() -> None:
    request = request_for("llama-2-70b", "h100:8", global_batch=128)
    layout = parse_layout("tp=8,pp=4,recompute=full", request)
    assert message_times(request, layout)["stage"].seconds == pytest.approx(
        predict_layout(request, layout).stage_times.message
    )


def test_the_sentences_have_the_numbers_of_the_cost_model() -> None:
    for model, cluster, layout in (
        ("llama-2-70b", "h100:8", "tp=8,pp=4,recompute=full"),
        ("llama-2-7b", "p4d.24xlarge:4", "zero=3,rep=4,recompute=full"),
        ("llama-2-7b", "trn1.32xlarge:4", "tp=8"),
    ):
        request = request_for(model, cluster, global_batch=128)
        plan = make_plan(request, layout)
        text, times = " ".join(explain(plan)), message_times(request, plan.chosen.candidate)
        used = {"tensor": plan.chosen.candidate.tensor > 1, "stage": plan.chosen.candidate.pipeline > 1,
                "gather": plan.chosen.candidate.data > 1, "across": plan.chosen.candidate.replicas > 1}  # fmt: skip
        for name, present in used.items():
            assert not present or str(times[name]) in text
        links = request.cluster.link_rate, request.cluster.network_rate / request.cluster.devices_per_instance
        shown = [float(rate) * 1e9 for rate in re.findall(r"\(([\d.e+]+) GB/s\)", text)]
        assert shown and all(rate < max(links) for rate in shown), "no collective is as fast as the data sheet's link"


def test_faster_links_make_the_shown_messages_faster() -> None:
    request = request_for("llama-2-70b", "h100:8", global_batch=128)
    layout = parse_layout("tp=8,pp=2,recompute=full", request)
    slow, fast = (message_times(with_links(request, factor), layout) for factor in (1, 2))
    for name in ("tensor", "stage", "gather", "reduce"):
        assert slow[name].seconds / 2 < fast[name].seconds < slow[name].seconds


def test_energy_and_storage_are_those_of_the_prediction() -> None:
    run = {"sequence": 4096, "global_batch": 512, "tokens": 10**11}
    plan = hlat.plan("llama-3.2-1b", "p5.48xlarge:4", pue=1.5, storage="1GB/s", **run)
    chosen, said = plan.chosen, plan.assumptions()
    watts = 32 * said["chip_watts"] * (1 + said["host_share_of_power"]) * 1.5
    assert plan.to_dict()["chosen"]["energy_kwh"] == pytest.approx(chosen.days * 24 * watts / 1000)
    assert f"about {amount_text(1000 * chosen.kwh, 'Wh', 2)}, " in energy_sentence(plan.request, chosen)
    assert said["save_durable_after_seconds"] == pytest.approx(said["checkpoint_bytes"] / 1e9, abs=0.1)
    assert said["restart_seconds"] == pytest.approx(
        said["failure_noticed_after_seconds"] + said["start_up_seconds"] + said["save_durable_after_seconds"], abs=0.2
    )
    assert "1 GB/s, by --storage 1 GB/s for the whole cluster" in storage_sentence(plan.request, chosen)


def test_slow_storage_costs_goodput() -> None:
    run = {"sequence": 4096, "global_batch": 512, "tokens": 10**11, "interruptions": 2.0}
    goodput = [hlat.plan("llama-3.1-8b", "p5.48xlarge:4", storage=rate, **run).chosen.goodput
               for rate in ("50MB/s", "1GB/s", "20GB/s")]  # fmt: skip
    assert goodput == sorted(goodput) and goodput[0] < goodput[1]


def test_chips_without_a_power_limit_have_no_energy() -> None:
    plan = hlat.plan("llama-2-7b", "trn1.32xlarge:4", sequence=4096, global_batch=256)
    assert plan.chosen.kwh is None and plan.to_dict()["chosen"]["energy_kwh"] is None
    assert energy_sentence(plan.request, plan.chosen) == "not known: no power limit of Trainium1 is published"
