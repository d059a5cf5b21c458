"""Reports of a plan: consistent numbers, sentences, charts and trace."""

import html
import math
from dataclasses import replace

import pytest
import yaml

import hlat
from hlat.hardware import load_catalog, parse_cluster
from hlat.model.counts import count_parameters, flops_per_token
from hlat.planner.cost.calibration import shipped_interval, sources_of_chip, undecided_ratio
from hlat.planner.expected import days_text, two_digits
from hlat.planner.plan import layout_json, make_plan
from hlat.planner.problem.layouts import parse_layout
from hlat.planner.problem.question import PlanQuestion
from hlat.planner.problem.request import resolve_request
from hlat.planner.report.comparison import (
    comparison_lines,
    pareto_front_of_plans,
    plans_as_json,
    rank_plans,
    told_apart,
)
from hlat.planner.report.explanation import compare, cost_sentence, expectation, explain, network_sentence
from hlat.planner.report.html_report import chrome_trace, html_page, step_timeline
from hlat.planner.report.terminal import plan_lines
from hlat.planner.search import TIE_TOLERANCE, predict_layout
from tests.support.planner.requests import request_for


@pytest.fixture(scope="module")
def hlat_7b():
    return make_plan(request_for())


def test_the_numbers_of_a_plan_are_consistent(hlat_7b):
    content, request = hlat_7b.to_dict(), hlat_7b.request
    chosen, assumed = content["chosen"], content["assumptions"]
    seconds = chosen["days"] / assumed["median_over_predicted"] * 86400
    assert seconds * chosen["goodput"] * chosen["tokens_per_second"] == pytest.approx(assumed["tokens"])
    assert assumed["tokens"] == 20 * count_parameters(request.model).total
    flops = flops_per_token(request.model, 4096, "causal")
    assert chosen["mfu"] == pytest.approx(chosen["tokens_per_second"] * flops / (1024 * 190e12))  # chips of 190 TFLOP/s
    assert chosen["usd_per_billion_tokens"] * assumed["tokens"] / 1e9 == pytest.approx(chosen["cost_usd"])
    every = assumed["checkpoint_every_steps"] * chosen["step_seconds"]
    assert every == pytest.approx(assumed["checkpoint_every_seconds"], abs=chosen["step_seconds"])


def test_defaults_of_a_request(tmp_path):
    assert request_for(tokens=1024 * 4096 * 10 + 1).steps == 11
    cluster = parse_cluster("h100:8", load_catalog())
    assert resolve_request(PlanQuestion("llama-2-7b", sequence=2048), cluster).tokens_per_step == 4 * 2**20
    content = {"model": {"preset": "llama-2-7b"}, "data": {"path": "x", "sequence_length": 2048},
               "batch": {"global_batch": 32}, "training": {"steps": 7}, "precision": {"mode": "bf16-sr"}}  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    request = resolve_request(PlanQuestion(tmp_path / "recipe.yaml"), cluster)
    assert (request.mode, request.sequence, request.global_batch, request.steps) == ("bf16-sr", 2048, 32, 7)
    assert request.assumed == ()


@pytest.mark.parametrize(("mode", "each"), [("mixed", 12), ("bf16-sr", 6)])
def test_a_save_has_weights_and_two_moments(mode, each):
    request = request_for("llama-2-70b", "trn1.32xlarge:64", precision=mode)
    size = each * count_parameters(request.model).total
    expected = predict_layout(request, parse_layout("tp=8,pp=8", request)).reliability
    assert expected.writing == pytest.approx(size / (64 * 2e9)) and expected.stall == pytest.approx(size / 2048 / 10e9)


def test_exchanged_bytes_are_those_of_the_ranks_own_stages():
    """In a ZBV schedule the first rank has embedding and head, two messages of hidden size each; the last, none."""
    request = request_for("llama-2-70b", "h100:8", global_batch=64)
    content = layout_json(request, predict_layout(request, parse_layout("tp=8,pp=4,schedule=zbv", request)))[
        "exchanged_gib_per_step"
    ]
    hidden = 4096 * 8192 * 2 * 32 / 2**30
    assert content["0"]["tensor"] - content["3"]["tensor"] == pytest.approx(4 * hidden, abs=0.01)


def test_without_a_price_cost_is_ignored():
    unpriced, priced = (
        make_plan(request_for("llama-3-8b", name, global_batch=256)) for name in ("gb200:2", "p5.48xlarge:1")
    )
    assert rank_plans([unpriced, priced], "cost") == [priced, unpriced]
    slow = replace(priced.chosen, days=2 * priced.chosen.days)  # slower, same memory, twice the cost
    free = replace(slow, cost_usd=None)
    plans = [replace(priced, ranked=(priced.chosen,)), replace(priced, chosen=free, ranked=(free,))]
    assert [found for _, found in pareto_front_of_plans(plans)] == [priced.chosen]


def test_the_fastest_layout_is_on_the_pareto_front():
    plans = [make_plan(request_for("llama-3-8b", f"p5.48xlarge:{count}", global_batch=64)) for count in (1, 2)]
    content = [layout for each in plans_as_json(plans) for layout in (each["chosen"], *each["alternatives"])]
    assert min(content, key=lambda layout: layout["days"])["on_front"]
    assert sum(layout["on_front"] for layout in content) == len(pareto_front_of_plans(plans))


def test_sentences_agree_with_the_numbers():
    for cluster, layout, where in (("h100:4", "tp=8", "over the network"), ("h100:1", "tp=2", "on the fast links")):
        request = request_for("llama-2-7b", cluster, global_batch=64)
        assert f"replicas communicates once per step, {where}" in " ".join(explain(make_plan(request, layout)))
    fast, slow = (predict_layout(request, parse_layout(text, request)) for text in ("tp=2", "tp=2,recompute=full"))
    share = slow.step_seconds / fast.step_seconds - 1
    assert f": {share:.1%} slower (recomputation +" in compare(fast, slow)
    # With no recomputation the inputs are gathered again, which costs some communication.
    text = compare(slow, fast)
    assert f": {1 - 1 / (1 + share):.1%} faster (" in text and "; recomputation -" in text


def test_the_interval_of_the_family_is_told_everywhere(hlat_7b):
    """Trainium's factors of the shipped table, times the prediction: JSON, sentence, table of the page, whiskers."""
    one = shipped_interval("trainium", eight_bit=False)
    content, chosen = hlat_7b.to_dict()["chosen"], hlat_7b.chosen
    assert content["step_seconds_interval"] == [chosen.step_seconds * one.low, chosen.step_seconds * one.high]
    days = predict_layout(hlat_7b.request, chosen.candidate).days
    assert content["days_interval"] == pytest.approx([days * one.low, days * one.high])
    for name in ("days", "cost_usd"):
        low, high = content[f"{name}_interval"]
        assert content[name] / low == pytest.approx(one.median / one.low) and low < content[name] < high
        assert high / low == pytest.approx(one.high / one.low)
    said, text = expectation(hlat_7b.request, chosen), html.unescape(html_page([hlat_7b]))
    low, high = map(two_digits, content["days_interval"])
    assert said.startswith(f"{days_text(chosen)}; $")
    assert f"{low}-{high}" in text and said in text
    assert cost_sentence(hlat_7b.request, chosen) in text
    assert f"trn1.32xlarge:64: {days_text(chosen)}" in next(iter(plan_lines([hlat_7b], 80)))


def test_evidence_is_counted_by_chip():
    """Trainium's sources are all of Trainium 1; those of cards are of several, and gave ranges, not constants."""
    run = {"sequence": 4096, "global_batch": 64, "tokens": 10**9}
    one, two, card = (
        hlat.plan("llama-3.2-1b", name, **run) for name in ("trn1.32xlarge:1", "trn2.48xlarge:1", "8xrtx4090:1")
    )
    said = [expectation(plan.request, plan.chosen) for plan in (one, two, card)]
    sources = shipped_interval("trainium", eight_bit=False).sources
    assert f"{sources} of them of Trainium1" in said[0] and "none of them of Trainium2" in said[1]
    assert f"{sources_of_chip('RTX 4090')} of them of RTX 4090" in said[2] and sources_of_chip("RTX 4090") > 0
    assumed = "; ".join(card.request.assumed)
    assert "constants of ampere chips: none were fitted to graphics" in assumed and "no published run" not in assumed


def test_a_network_that_nobody_stated_is_shown_with_what_depends_on_it():
    """The choice at a half and a quarter is that of the same question with the network stated so."""
    run = {"sequence": 4096, "global_batch": 256, "tokens": 10**10}
    plan = hlat.plan("llama-3.1-8b", "8xrtx4090:4", **run)
    rate = plan.request.cluster.instance.network
    for found, share in zip(plan.at_slower_networks, (0.5, 0.25), strict=True):
        stated = hlat.plan("llama-3.1-8b", "8xrtx4090:4", network=f"{rate * share:g} GB/s", **run)
        assert found.share == share and not stated.at_slower_networks
        assert found.days == pytest.approx(stated.chosen.days, rel=TIE_TOLERANCE) and found.days > plan.chosen.days
        kept = predict_layout(stated.request, plan.chosen.candidate).step_seconds
        assert found.faster == pytest.approx(1 - stated.ranked[0].step_seconds / kept, abs=TIE_TOLERANCE)
    line = network_sentence(plan)
    assert f"{rate:g} GB/s" in line and "--network" in line and "at a half" in line and "at a quarter" in line
    assert line in html.unescape(html_page([plan])) and len(plan.to_dict()["slower_networks"]) == 2
    assert network_sentence(stated) == "" and not stated.to_dict()["assumptions"]["network_assumed"]
    assert network_sentence(hlat.plan("llama-3.1-8b", "p5.48xlarge:1", **run)) == ""


def test_clusters_that_are_too_close_are_named():
    """By hand: deviations of the logarithm from the table, 0.84 of them beyond 0 in four of five cases."""
    plans = [
        make_plan(request_for("llama-2-7b", name, global_batch=1024)) for name in ("p5.48xlarge:4", "p4d.24xlarge:9")
    ]
    days = [plan.chosen.days for plan in plans]
    deviations = [math.log(plan.chosen.interval.high / plan.chosen.interval.low) / 2 / 1.2816 for plan in plans]
    least = math.exp(0.8416 * math.hypot(*deviations))
    assert told_apart(*plans, "time") is (max(days) >= least * min(days))
    far = [
        replace(plans[0], chosen=replace(plans[0].chosen, days=days[1] * factor))
        for factor in (least * 1.01, least * 0.99)
    ]
    assert [told_apart(one, plans[1], "time") for one in far] == [True, False]
    assert "Too close" not in comparison_lines([far[0], plans[1]])[0]
    # p4d is the faster one, by 1 / 0.99 of the least ratio; 4 of 5 cases are within 1.2816 deviations to both sides.
    ratio, spread = 1 / (least * 0.99), math.exp(1.2816 * math.hypot(*deviations))
    share = f"{ratio:.0%} of it, {ratio / spread:.0%} to {ratio * spread:.0%} in 4 of 5 cases"
    assert comparison_lines([far[1], plans[1]])[0].endswith(f"Too close to tell apart: p5.48xlarge:4 ({share}).")
    # One family shares its errors: the ratio of layouts of one job decides.
    twin = replace(plans[0], chosen=replace(plans[0].chosen, days=days[0] * undecided_ratio() * 1.01))
    assert told_apart(plans[0], twin, "time")


def test_a_trace_is_as_long_as_its_step():
    plan = make_plan(request_for("llama-2-70b", "h100:8", global_batch=64), "tp=8,pp=4,recompute=full")
    events = [event for event in chrome_trace(plan)["traceEvents"] if event["ph"] == "X"]
    timeline = step_timeline(plan)
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(timeline.seconds * 1e6)
    for rank in range(4):
        assert sum(event["dur"] for event in events if event["tid"] == rank) == pytest.approx(timeline.busy(rank) * 1e6)


def test_traces_of_long_steps_have_complete_rounds_of_micro_batches():
    plan = make_plan(request_for("llama-2-70b", "h100:8", global_batch=8192), "tp=8,pp=4,vpp=2,recompute=full")
    passes = [each for rank in step_timeline(plan).ranks for each in rank]
    assert len({each.micro_batch for each in passes}) % 4 == 0 and 10_000 < len(passes) <= 20_000
