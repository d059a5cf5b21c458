"""The plan's page: numbers of the command line, options that exist, no internals; in Chromium, its charts."""

import html
import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import typer

from hlat.cli import app
from hlat.planner.expected import median_usd
from hlat.planner.plan import TrainingPlan, make_plan
from hlat.planner.problem.question import PlanQuestion
from hlat.planner.report.comparison import compare_clusters, pareto_front_of_plans
from hlat.planner.report.explanation import energy_sentence, recipe_sentence
from hlat.planner.report.html_report import answers, assumptions, html_page
from hlat.planner.report.terminal import WIDE, headline, plan_lines
from tests.support.browser import DESKTOP, PHONE, serious_problems, visit
from tests.support.planner.requests import request_for


@pytest.fixture(scope="module")
def plan() -> TrainingPlan:
    """A plan with a pipeline, a price and a power limit."""
    found = make_plan(request_for("llama-2-70b", "p5.48xlarge:32", global_batch=1024))
    assert found.chosen.candidate.pipeline > 1 and found.chosen.cost_usd and found.chosen.kwh
    return found


@pytest.fixture(scope="module")
def text(plan: TrainingPlan) -> str:
    return html_page([plan])


def words(page: str) -> str:
    """Text that a reader sees, folded parts included."""
    return html.unescape(re.sub(r"<[^>]*>", " ", re.sub(r"(?s)<(script|style)\b.*?</\1>", "", page)))


def figures(page: str) -> list[dict]:
    return [json.loads(found) for found in re.findall(r'(?s)<script type="application/json">(.*?)</script>', page)]


def test_the_headline_has_the_numbers_of_the_command_line(plan, text):
    found = {name: (value, note) for name, value, note in answers(plan)}
    table = list(plan_lines([plan], WIDE))
    row = next(line for line in table if line.startswith(">"))
    days, usd = ", ".join(found["time"]), ", ".join(found["cost"])
    assert headline(plan) == f"p5.48xlarge:32: {days.removesuffix(' in 4 of 5 runs')}; {usd}, in 4 of 5 runs"
    memory, limit = re.fullmatch(r"([\d.]+) of (\d+) GiB", found["fits into memory"][0]).groups()
    assert limit == "80" and f" {memory} " in row and f" {found['MFU'][0]} " in row
    energy, its_range = found["energy"][0], found["energy"][1].removesuffix(", at full power")
    assert f"at most about {energy}, {its_range}:" in energy_sentence(plan.request, plan.chosen)
    assert all(value in words(text) and note in words(text) for value, note in found.values())


def test_a_layout_that_does_not_fit_and_numbers_that_nobody_knows_are_said():
    over = make_plan(request_for("llama-2-70b", "h100:1", global_batch=64), "tp=8,zero=0")
    assert "does not fit" in {name for name, *_ in answers(over)} and "DOES NOT FIT" in html_page([over])
    chosen = replace(over.chosen, cost_usd=None, kwh=None)
    found = {name: value for name, value, _ in answers(replace(over, chosen=chosen))}
    assert found["cost"] == found["energy"] == "not known"


def test_every_assumption_names_options_that_exist_and_says_who_stated_it():
    model, cluster = "llama-3.2-1b", ["p5.48xlarge:2"]
    (open_plan,) = compare_clusters(PlanQuestion(model, clusters=cluster)).plans
    stated = {
        "--tokens": ({"tokens": 10**10}, "10B"),
        "--sequence-length": ({"sequence": 2048}, "2,048 tokens"),
        "--global-batch": ({"global_batch": 256}, "256 sequences, 524,288 tokens"),
        "--precision": ({"precision": "bf16-sr"}, "bf16-sr"),
        "--price, --quotes": ({"price": "2.10/h"}, "33.60 USD per hour"),
        "--network": ({"network": "100 GB/s"}, "100 GB/s"),
        "--storage": ({"storage": "5GB/s"}, "5 GB/s"),
        "--interruptions": ({"interruptions": 0.5}, "one in 2 days on each instance"),
        "--pue": ({"pue": 1.5}, "1.5 times"),
    }
    given = {name: value for one, _ in stated.values() for name, value in one.items()}
    (full_plan,) = compare_clusters(PlanQuestion(model, clusters=cluster, **given)).plans
    by_option = {option: (value, source) for _, value, source, option in assumptions(full_plan)}
    assert {source for *_, source, _ in assumptions(open_plan)} == {"default", "catalog"}
    assert by_option.keys() == {*stated, "--hardware"}
    for option, (_, said) in stated.items():
        assert said in by_option[option][0] and by_option[option][1] == "you", option
    group = typer.main.get_command(app)
    known = {name for parameter in group.commands["plan"].params for name in parameter.opts}
    assert {name for option in by_option for name in option.split(", ")} <= known
    (alone,) = compare_clusters(PlanQuestion(model, clusters=["p5.48xlarge:1"])).plans
    assert "--network" not in {option for *_, option in assumptions(alone)}, "one instance sends nothing to others"


def test_nothing_internal_is_on_the_page(text):
    said = words(text)
    for internal in ("tie", "undecided", "bytes per second", "constants", "None", "median_over", "{", "["):
        assert not re.search(rf"(?<!\w){re.escape(internal)}(?!\w)", said), internal
    assert not re.search(r"\d{7}|\d\.\d{6}", said), "numbers are for people"


def test_names_are_texts_and_the_page_refers_to_nothing_else(plan):
    name = "<img src=x onerror=alert(1)>"
    instance = plan.request.cluster.instance.model_copy(update={"name": name})
    request = replace(plan.request, name=name, cluster=replace(plan.request.cluster, instance=instance))
    named = html_page([replace(plan, request=request)], refused=[name])
    own = re.sub(r"(?s)<script>.*?</script>", "", named)  # Plotly's and the page's
    assert "<img" not in own and own.count("&lt;img src=x") > 5
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", own)
    for trace in (trace for figure in figures(named) for trace in figure["data"]):
        assert all("<img" not in text for text in trace.get("hovertext", ())), "Plotly reads tags in texts"


def test_the_frontier_and_the_choice_are_drawn(plan, text):
    line, dots = figures(text)[0]["data"]
    assert len(dots["x"]) == len(plan.ranked)
    best = [index for index, symbol in enumerate(dots["marker"]["symbol"]) if symbol != "circle-open"]
    front = pareto_front_of_plans([plan])
    assert len(line["x"]) == len(front) > 2 and set(line["x"]) <= {dots["x"][index] for index in best}
    assert all(one < two for one, two in pairwise(line["x"])) and all(one > two for one, two in pairwise(line["y"]))
    (star,) = [index for index, symbol in enumerate(dots["marker"]["symbol"]) if symbol == "star"]
    assert dots["x"][star] == plan.chosen.days and dots["y"][star] * 2**30 == plan.chosen.peak_memory
    last = figures(text)[0]["layout"]["xaxis"]["range"][1]
    hidden = sum(days > last for days in dots["x"])
    assert last > plan.chosen.days and (f"{hidden} slower layout" in words(text)) is (hidden > 0)


def test_bars_are_the_parts_of_the_fullest_rank_and_of_the_step(plan, text):
    memory, step = figures(text)[1:3]
    whole = max(rank.total for rank in plan.chosen.memory.values()) / 2**30
    assert sum(part["x"][0] for part in memory["data"]) == pytest.approx(whole)
    assert memory["layout"]["shapes"][0]["x0"] == pytest.approx(80)
    assert sum(part["x"][0] for part in step["data"]) == pytest.approx(plan.chosen.step_seconds)
    for bar in (memory, step):
        *sizes, _ = [part["x"][0] for part in bar["data"]]
        assert sizes == sorted(sizes, reverse=True) and bar["data"][-1]["name"].startswith("other")
        assert len({part["marker"]["color"] for part in bar["data"]}) == len(sizes) + 1


def test_clusters_are_compared_before_each_has_its_tab():
    found = compare_clusters(PlanQuestion("llama-3.2-1b", clusters=["p5.48xlarge:1", "trn2.48xlarge:1"], tokens=10**10))
    text = html_page(found.plans, refused=["trn1.32xlarge:1: why not"])
    said = words(text)
    assert said.index("Fastest: ") < said.index("Cost against the deadline") < said.index("Assumptions that you can")
    assert "why not" in said and text.count('<section class="tab"') == 2
    times, costs, *_ = figures(text)
    assert {trace["name"] for trace in times["data"]} == {plan.request.cluster.name for plan in found.plans}
    assert len({trace["marker"]["color"] for trace in times["data"] if trace["mode"] == "markers+text"}) == 2
    stars = [trace for trace in costs["data"] if trace["mode"] == "markers+text"]
    assert [trace["y"] for trace in stars] == [[plan.chosen.cost_usd] for plan in found.plans]
    free = [replace(plan, chosen=replace(plan.chosen, cost_usd=None)) for plan in found.plans]
    assert "Cost against" not in words(html_page(free))


def test_what_would_change_in_a_recipe_is_said_before_the_charts():
    (found,) = compare_clusters(PlanQuestion("recipes/hlat-7b.yaml", clusters=["h100:8"], layout="tp=8,zero=3")).plans
    said = words(html_page([found]))
    assert recipe_sentence(found) in said and said.index(recipe_sentence(found)) < said.index("Memory of a device")


_OBSERVE = """
    for (const part of document.querySelectorAll("main details:not(.values)")) part.open = true;
    for (const plot of document.querySelectorAll(".plot")) {
        plot.scrollIntoView();
        for (let tries = 0; tries < 100 && !plot.querySelector(".main-svg"); tries++)
            await new Promise((done) => setTimeout(done, 50));
    }
    const table = [...document.querySelectorAll("table")].find((one) => one.textContent.includes("may be fastest"));
    const cost = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent.trim() === "cost");
    table.tHead.rows[0].cells[cost].querySelector("button").click();
    table.tHead.rows[0].cells[cost].querySelector("button").click();
    document.querySelector("[data-do=reset]").click();
    return {
        width: document.documentElement.scrollWidth, title: document.title,
        last: document.querySelector(".plot")._fullLayout.xaxis.range[1],
        undrawn: [...document.querySelectorAll(".plot")].filter((plot) => !plot.querySelector(".main-svg")).length,
        points: document.querySelector(".plot").querySelectorAll(".scatterlayer .point").length,
        dearest: table.tBodies[0].rows[0].cells[cost].textContent.trim(),
    };
"""


@pytest.mark.browser
def test_charts_are_drawn_and_nothing_is_requested(plan, text, tmp_path: Path):
    file = tmp_path / "plan.html"
    file.write_text(text, encoding="utf-8")
    seen = visit(file.as_uri(), _OBSERVE)
    assert seen.requests == [file.as_uri()] and seen.console == []
    for result, view in zip(seen.results, (PHONE, DESKTOP), strict=True):
        assert result["width"] <= view["width"] and result["undrawn"] == 0
        assert result["title"] == "llama-2-70b on p5.48xlarge:32" and result["points"] == len(plan.ranked)
        assert result["last"] > max(one.days for one in plan.ranked), "Reset shows all"
        assert result["dearest"] == median_usd(max(plan.ranked, key=lambda one: one.days))


@pytest.mark.browser
def test_axe_core_finds_nothing_serious(text, tmp_path: Path):
    file = tmp_path / "plan.html"
    file.write_text(text, encoding="utf-8")
    assert serious_problems(file.as_uri()) == []
