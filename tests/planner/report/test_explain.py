"""What a plan says: numbers that belong together, words, pictures, a trace."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
import yaml

from hlat.hardware import load_catalog, parse_cluster
from hlat.model.derived import count_parameters, flops_per_token
from hlat.planner.problem import parse_layout
from hlat.planner.problem.request import resolve_request
from hlat.planner.report import chrome_trace, explain, html_page, pareto_front_of_plans
from hlat.planner.report.comparison import plans_as_json, rank_plans
from hlat.planner.report.explain import compare
from hlat.planner.report.trace import step_timeline
from hlat.planner.search import fits, layout_json
from hlat.planner.search.plan import make_plan
from hlat.planner.search.search import predict_layout
from tests.support.planner.questions import question


@pytest.fixture(scope="module")
def hlat_7b():
    return make_plan(question())


def test_the_numbers_of_a_plan_belong_together(hlat_7b):
    said, asked = hlat_7b.as_json(), hlat_7b.request
    chosen, assumed = said["chosen"], said["assumptions"]
    assert chosen["days"] * 86400 * chosen["goodput"] * chosen["tokens_per_second"] == pytest.approx(assumed["tokens"])
    assert assumed["tokens"] == 20 * count_parameters(asked.model).total
    flops = flops_per_token(asked.model, 4096, "causal")
    assert chosen["mfu"] == pytest.approx(chosen["tokens_per_second"] * flops / (1024 * 190e12))  # chips of 190 TFLOP/s
    assert chosen["usd_per_billion_tokens"] * assumed["tokens"] / 1e9 == pytest.approx(chosen["cost_usd"])
    every = assumed["checkpoint_every_steps"] * chosen["step_seconds"]
    assert every == pytest.approx(assumed["checkpoint_every_seconds"], abs=chosen["step_seconds"])


def test_what_a_question_leaves_open(tmp_path):
    assert question(tokens=1024 * 4096 * 10 + 1).steps == 11
    cluster = parse_cluster("h100:8", load_catalog())
    assert resolve_request("llama-2-7b", cluster, sequence=2048).tokens_per_step == 4 * 2**20
    content = {"model": {"preset": "llama-2-7b"}, "data": {"path": "x", "sequence_length": 2048},
               "batch": {"global_batch": 32}, "training": {"steps": 7}, "precision": {"mode": "bf16-sr"}}  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    asked = resolve_request(str(tmp_path / "recipe.yaml"), cluster)
    assert (asked.mode, asked.sequence, asked.global_batch, asked.steps) == ("bf16-sr", 2048, 32, 7)
    assert asked.assumed == ()


@pytest.mark.parametrize(("mode", "each"), [("mixed", 12), ("bf16-sr", 6)])
def test_what_is_saved_is_weights_and_two_moments(mode, each):
    asked = question("llama-2-70b", "trn1.32xlarge:64", mode=mode)
    size = each * count_parameters(asked.model).total
    expected = predict_layout(asked, parse_layout("tp=8,pp=8", asked)).reliability
    assert expected.writing == pytest.approx(size / (64 * 2e9)) and expected.stall == pytest.approx(size / 2048 / 10e9)


def test_a_rank_exchanges_what_is_its_own():
    """In a V the first rank has embedding and head, two messages of hidden size for each, and the last one neither."""
    asked = question("llama-2-70b", "h100:8", global_batch=64)
    said = layout_json(asked, predict_layout(asked, parse_layout("tp=8,pp=4,schedule=zbv", asked)))[
        "exchanged_gib_per_step"
    ]
    hidden = 4096 * 8192 * 2 * 32 / 2**30
    assert said["0"]["tensor"] - said["3"]["tensor"] == pytest.approx(4 * hidden, abs=0.01)


def test_without_a_price_cost_does_not_count():
    unpriced, priced = (
        make_plan(question("llama-3-8b", name, global_batch=256)) for name in ("gb200:2", "p5.48xlarge:1")
    )
    assert rank_plans([unpriced, priced], "cost") == [priced, unpriced]
    slow = replace(priced.chosen, days=2 * priced.chosen.days)  # slower, as large, twice as dear
    free = replace(slow, cost_usd=None)
    plans = [replace(priced, ranked=(priced.chosen,)), replace(priced, chosen=free, ranked=(free,))]
    assert [found for _, found in pareto_front_of_plans(plans)] == [priced.chosen]


def test_the_fastest_is_on_the_front():
    plans = [make_plan(question("llama-3-8b", f"p5.48xlarge:{count}", global_batch=64)) for count in (1, 2)]
    said = [one for each in plans_as_json(plans) for one in (each["chosen"], *each["alternatives"])]
    assert min(said, key=lambda one: one["days"])["on_front"]
    assert sum(one["on_front"] for one in said) == len(pareto_front_of_plans(plans))


def test_words_are_those_of_the_numbers():
    for cluster, layout, where in (("h100:4", "tp=8", "over the network"), ("h100:1", "tp=2", "on the fast links")):
        asked = question("llama-2-7b", cluster, global_batch=64)
        assert f"replicas talks once a step, {where}" in " ".join(explain(make_plan(asked, layout)))
    fast, slow = (predict_layout(asked, parse_layout(text, asked)) for text in ("tp=2", "tp=2,recompute=full"))
    share = slow.step_seconds / fast.step_seconds - 1
    assert f": {share:.1%} slower (recomputation +" in compare(fast, slow)
    assert f": {1 - 1 / (1 + share):.1%} faster (recomputation -" in compare(slow, fast)


def attributes(text, tag):
    return [dict(re.findall(r'([\w-]+)="([^"]*)"', found)) for found in re.findall(rf"<{tag}\b([^>]*)>", text)]


def pictures(text):
    return re.findall(r"<svg.*?</svg>", text)


@pytest.mark.parametrize(("cluster", "layout"), [("h100:8", "tp=8,pp=4,recompute=full"), ("h100:1", "tp=8,zero=0")])
def test_parts_lie_side_by_side_and_within_the_picture(cluster, layout):
    asked = question("llama-2-70b", cluster, global_batch=128)
    given = make_plan(asked, layout)
    assert fits(asked, given.chosen) is (cluster == "h100:8")
    *bars, last = pictures(html_page([given]))
    for bar in bars if cluster == "h100:8" else [*bars, last]:
        boxes = [one for one in attributes(bar, "rect") if one["fill"] != "none"]
        for one, two in pairwise(boxes):
            assert float(two["x"]) == pytest.approx(float(one["x"]) + float(one["width"]), abs=0.11)
        assert float(boxes[-1]["x"]) + float(boxes[-1]["width"]) <= 960.2
    if cluster == "h100:8":
        boxes = attributes(last, "rect")
        assert min(float(one["x"]) for one in boxes) == 0
        assert max(float(one["x"]) + float(one["width"]) for one in boxes) == pytest.approx(960, abs=0.1)


def test_the_front_is_drawn_as_it_is(hlat_7b):
    dots = attributes(pictures(html_page([hlat_7b]))[0], "circle")
    assert len(dots) == len(hlat_7b.ranked)
    filled = sorted((float(dot["cx"]), float(dot["cy"])) for dot in dots if dot["fill"] != "none")
    assert len(filled) == len(pareto_front_of_plans([hlat_7b]))
    assert all(one[1] < two[1] for one, two in pairwise(filled)), "slower ones need less: they lie lower"


def test_a_trace_is_as_long_as_its_step():
    given = make_plan(question("llama-2-70b", "h100:8", global_batch=64), "tp=8,pp=4,recompute=full")
    events = [one for one in chrome_trace(given)["traceEvents"] if one["ph"] == "X"]
    line = step_timeline(given)
    assert max(one["ts"] + one["dur"] for one in events) == pytest.approx(line.seconds * 1e6)
    for rank in range(4):
        assert sum(one["dur"] for one in events if one["tid"] == rank) == pytest.approx(line.busy(rank) * 1e6)


def test_of_a_long_step_whole_rounds_are_traced():
    given = make_plan(question("llama-2-70b", "h100:8", global_batch=8192), "tp=8,pp=4,vpp=2,recompute=full")
    passes = [one for rank in step_timeline(given).ranks for one in rank]
    assert len({one.micro_batch for one in passes}) % 4 == 0 and 10_000 < len(passes) <= 20_000
