"""The loss that a ladder forecasts, wherever a plan is shown: terminal, JSON, page; and what it chooses."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

import hlat
from hlat.forecast import CHINCHILLA, Ladder, model_sizes, write_ladder
from hlat.planner import (
    grid_lines,
    grid_page,
    html_page,
    model_size_json,
    model_size_lines,
    plan_lines,
    plan_words,
    purchase_json,
    purchase_lines,
)
from hlat.planner.problem import question as questions
from hlat.planner.report.html_report import answers
from hlat.runtime.errors import PlanError
from hlat.runtime.terminal import wrapped
from tests.support.planner.ladders import SEQUENCE, ladder_of_law, law_of_fits, write_law

RUN = {"sequence": SEQUENCE, "global_batch": 512, "precision": "mixed"}


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_law(tmp_path_factory.mktemp("ladder"))


def test_a_plan_shows_the_loss_with_its_range_and_distance(ladder: Path) -> None:
    plan = hlat.plan("llama-3.2-1b", "p5.48xlarge:1", tokens=10**10, ladder=ladder, **RUN)
    loss, content = plan.request.loss, plan.to_dict()["forecast"]
    assert content["loss"] == loss.range.loss and content["loss_interval"] == [loss.range.low, loss.range.high]
    wanted = CHINCHILLA.loss(model_sizes(plan.request.model, SEQUENCE)["flops"], 10**10)
    # The ladder's fit leans on what is known beforehand; the law it was made of is well inside of its range.
    assert content["loss"] == pytest.approx(wanted, rel=0.02) and loss.range.low < wanted < loss.range.high
    lines = list(plan_lines([plan], 80))
    lines += [line for sentence, indent in plan_words(plan, False, None) for line in wrapped(sentence, 80, indent)]
    text = " ".join(" ".join(lines).split())
    assert f"loss {loss}, in 4 of 5 runs" in text and "times the FLOPs of the largest of them" in text
    assert max(map(len, lines)) <= 80
    shown = {name: (value, span) for name, value, span in answers(plan)}
    assert shown["loss"] == (f"{loss.range.loss:.3f}", f"{loss.range.low:.3f} to {loss.range.high:.3f} in 4 of 5 runs")
    page = html_page([plan])
    assert f"{loss.range.loss:.3f}" in page and "margin" in page
    without = hlat.plan("llama-3.2-1b", "p5.48xlarge:1", tokens=10**10, **RUN)
    assert without.request.loss is None and "forecast" not in without.to_dict()
    assert {key: value for key, value in plan.to_dict().items() if key not in ("forecast", "assumptions")} == {
        key: value for key, value in without.to_dict().items() if key != "assumptions"
    }


def test_a_plan_shows_accuracies_of_tasks_that_the_ladder_scored(tmp_path: Path) -> None:
    runs = tuple(
        replace(run, scores={"arc/bits_per_byte": run.loss / 4, "arc/acc": 1 / (1 + math.exp(run.loss - 4))})
        for run in ladder_of_law().runs
    )
    write_ladder(tmp_path, Ladder(runs, ladder_of_law().conditions))
    plan = hlat.plan("llama-3.2-1b", "p5.48xlarge:1", tokens=10**10, ladder=tmp_path, **RUN)
    found = plan.to_dict()["forecast"]
    value, (low, high) = found["tasks"]["arc"].values()
    assert value == pytest.approx(1 / (1 + math.exp(found["loss"] - 4)), abs=0.01)
    assert low < value < high
    said = " ".join(" ".join(sentence for sentence, _ in plan_words(plan, False, None)).split())
    assert f"accuracy in 4 of 5 runs: arc {value:.2f}, {low:.2f} to {high:.2f}" in said


def test_rows_that_differ_in_tokens_differ_in_loss(ladder: Path) -> None:
    found = hlat.choose_cluster("llama-3.2-1b", chips="p5.48xlarge", budget="2k", ladder=ladder, **RUN)
    content, lines = purchase_json(found), list(purchase_lines(found, 80))
    most_first = sorted(content["sizes"], key=lambda offer: -offer["tokens"])
    losses = [offer["forecast"]["loss"] for offer in most_first]
    assert losses == sorted(losses) and len(set(losses)) > 2
    shown = f"{content['chosen']['forecast']['loss']:.3f}"
    assert " loss " in lines[3] and shown in lines[4] and max(map(len, lines)) <= 80


def test_a_grid_has_the_loss_of_each_model(ladder: Path) -> None:
    found = hlat.plan_grid("0.5b,1b", clusters=["p5.48xlarge:1"], tokens=10**10, ladder=ladder)
    losses = [cell["forecast"]["loss"] for cell in found.to_dict()["cells"]]
    assert losses[0] > losses[1]
    lines = list(grid_lines(found, 80))
    assert any(line.split()[:2] == ["1b", f"{losses[1]:.3f}"] for line in lines) and max(map(len, lines)) <= 80
    assert f"{losses[1]:.3f}" in grid_page(found)


def test_a_model_too_far_from_the_ladder_leaves_a_grid_the_losses_of_others(ladder: Path) -> None:
    found = hlat.plan_grid("0.5b,70b", clusters=["p5.48xlarge:4"], tokens=10**13, ladder=ladder)
    near, far = found.to_dict()["cells"]
    assert near["forecast"]["loss"] and far["forecast"] is None and "too uncertain" in far["no_forecast"]
    lines = list(grid_lines(found, 80))
    text = " ".join("\n".join(lines).split())
    assert "No loss: llama-class-70b" in text and "too uncertain" in grid_page(found) and max(map(len, lines)) <= 80


@pytest.mark.parametrize("generated", [None, 10**11])
def test_the_size_for_a_budget_follows_the_ladder(generated: int | None, ladder: Path) -> None:
    found = hlat.choose_model_size(chips="p5.48xlarge", budget="3k", inference_tokens=generated, ladder=ladder, **RUN)
    law = questions.LadderLaw.read(ladder)
    for run in found.runs:
        best = law.best_size(run.flops, run.generated, SEQUENCE)
        # Neighbouring shapes are at most a tenth apart, and the budget buys unlike compute for them.
        assert run.parameters == pytest.approx(best.parameters, rel=0.1)
        low, high, _ = run.size_range
        assert low <= best.parameters <= high <= 2 * low
    content, lines = model_size_json(found)["runs"][0], list(model_size_lines(found, 80))
    assert content["loss"] == content["forecast"]["loss"] and len(content["law_parameters_interval"]) == 2
    assert max(map(len, lines)) <= 80
    assert re.search(r"parameters, \S+ to \S+ in 4 of 5 fits", " ".join(" ".join(lines).split()))


def test_a_size_that_the_ladder_leaves_open_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = [CHINCHILLA, *(type(CHINCHILLA)(1.8, 482.0, 2085.0, alpha, 0.366) for alpha in (0.30, 0.32, 0.38, 0.40))]
    monkeypatch.setattr(questions.LadderLaw, "read", lambda folder: law_of_fits("flops", *wide))
    with pytest.raises(PlanError, match=r"does not determine the size for 1e20 FLOPs: .* want \S+ to \S+ parameters"):
        hlat.choose_model_size(chips="p5.48xlarge", flops=1e20, ladder="runs/ladder", **RUN)


def test_a_size_below_all_shapes_asks_for_other_flops_and_not_for_more_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions.LadderLaw, "read", lambda folder: law_of_fits("flops"))
    with pytest.raises(PlanError, match=r"ask for other FLOPs: hlat knows shapes of \S+ to \S+; more runs do not"):
        hlat.choose_model_size(chips="p5.48xlarge", flops=1e13, ladder="runs/ladder", **RUN)
