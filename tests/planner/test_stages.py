"""Plans of a recipe with stages: each stage as a recipe of its own, the run as their sum."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hlat.config.load import parse_recipe
from hlat.hardware import load_catalog, parse_cluster
from hlat.planner.defaults import LAYOUT, resolve_defaults
from hlat.planner.plan import layout_json
from hlat.planner.problem.question import PlanQuestion
from hlat.planner.purchase import choose_cluster
from hlat.planner.report.comparison import compare_clusters
from hlat.planner.report.html_report import html_page
from hlat.planner.report.terminal import plan_lines
from hlat.runtime.errors import PlanError
from tests.support.training.staged import plain_of, staged, staged_content

ON, NAMES = "p5.48xlarge:1", ["short", "anneal", "long"]
# A model for which layouts differ: the last stage has 32 times the sequence.
LARGE = {
    "model": {"preset": "llama-3.2-1b", "max_sequence_length": 131072},
    "data": {"path": "none", "sequence_length": 4096},
    "batch": {"global_batch": 256},
    "stages": [
        {"name": "short", "tokens": 10**10},
        {"name": "anneal", "tokens": 10**9, "schedule": {"kind": "linear"}},
        {"name": "long", "tokens": 10**9, "data": {"sequence_length": 131072}, "batch": {"global_batch": 8}},
    ],
}


def written(tmp_path: Path, content: dict[str, Any]) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory):
    return compare_clusters(PlanQuestion(written(tmp_path_factory.mktemp("staged"), LARGE), [ON]))


def test_a_run_is_the_sum_of_its_stages_and_needs_the_memory_of_the_fullest(found):
    (plan,) = found.plans
    stages = [stage.chosen for stage in plan.stages.values()]
    assert list(plan.stages) == NAMES
    assert plan.chosen.days == pytest.approx(sum(one.days for one in stages))
    assert plan.chosen.cost_usd == pytest.approx(sum(one.cost_usd or 0 for one in stages))
    assert plan.chosen.peak_memory == max(one.peak_memory for one in stages)
    assert plan.request.tokens == sum(stage.request.tokens for stage in plan.stages.values())
    assert min(one.mfu for one in stages) < plan.chosen.mfu < max(one.mfu for one in stages)


def test_each_stage_is_planned_as_a_recipe_of_its_own(found, tmp_path):
    """The outside witness is a recipe without stages: same layout, step, memory and days."""
    for number, (name, stage) in enumerate(found.plans[0].stages.items()):
        content = {key: dict(value) for key, value in LARGE.items() if isinstance(value, dict)}
        content["training"] = {"tokens": stage.request.tokens}
        if number == 2:
            content["data"] |= {"sequence_length": 131072}
            content["batch"] = {"global_batch": 8}
        (alone,) = compare_clusters(PlanQuestion(written(tmp_path, content), [ON])).plans
        assert layout_json(stage.request, stage.chosen) == layout_json(alone.request, alone.chosen), name


def test_the_table_fits_into_80_columns_and_has_a_row_for_each_stage_and_for_all(found):
    lines = list(plan_lines(list(found.plans), 80))
    assert max(map(len, lines)) <= 80
    firsts = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    assert firsts[1:] == ["stage", *NAMES, "all"]


def test_json_and_page_have_every_stage(found):
    (content,) = found.to_dict()
    assert [one["stage"] for one in content["stages"]] == NAMES
    assert content["chosen"]["days"] == pytest.approx(sum(one["chosen"]["days"] for one in content["stages"]))
    assert all(one["chosen"]["fits"] and one["alternatives"] for one in content["stages"])
    assert "step_seconds" not in content["chosen"], "no run has a step of its own"
    json.dumps(content)
    page = html_page(found.plans)
    assert all(f">{name}<" in page for name in [*NAMES, "all"])


def test_the_written_layouts_make_a_recipe(found):
    layouts = {stage.pop("name"): stage for stage in yaml.safe_load(found.plans[0].fragment())["stages"]}
    stages = [{**stage, **layouts[stage["name"]]} for stage in LARGE["stages"]]
    recipe = parse_recipe({**LARGE, "stages": stages}, world=8)
    for stage, plan in zip(recipe.each_stage(), found.plans[0].stages.values(), strict=True):
        assert stage.parallel.context == plan.chosen.candidate.context
        assert stage.batch.micro_batch == plan.chosen.candidate.micro_batch


def test_the_layout_of_the_recipe_is_predicted_on_request(tmp_path):
    question = PlanQuestion(written(tmp_path, staged_content()), ["p5.48xlarge:2"], layout="recipe")
    with pytest.raises(PlanError, match=r"stage long: --layout recipe.*\n.*global_batch"):
        compare_clusters(question)  # 16 devices are too many for four sequences
    two = parse_cluster("p5.48xlarge:2", load_catalog(), "chip")
    (plan,) = compare_clusters(
        PlanQuestion(written(tmp_path, staged_content()), ["p5.48xlarge:2"], per="chip", layout="recipe")
    ).plans
    assert plan.request.cluster.devices == two.devices == 2
    assert [one.chosen.candidate.context for one in plan.stages.values()] == [1, 1, 2]


def test_numbers_that_each_stage_gives_are_refused_for_all_of_them(tmp_path):
    with pytest.raises(PlanError, match="--tokens: each stage"):
        compare_clusters(PlanQuestion(written(tmp_path, LARGE), [ON], tokens=10**9))


def test_a_cluster_is_chosen_by_the_days_of_all_stages(found, tmp_path):
    question = PlanQuestion(written(tmp_path, LARGE), chips="p5.48xlarge", deadline="36h")
    chosen = choose_cluster(question).chosen
    (plan,) = compare_clusters(PlanQuestion(question.model, [chosen.cluster.name])).plans
    assert chosen.days == pytest.approx(plan.chosen.days, rel=0.05)


def test_what_a_stage_leaves_open_is_chosen_for_it():
    """Twice: on devices, and on a CPU; what the recipe gives stays."""
    content = {**LARGE, "optimizer": {"lr": 1e-3}}
    recipe, choices = resolve_defaults(parse_recipe(content, world=8), 8, parse_cluster(ON, load_catalog()))
    first, anneal, long = recipe.each_stage()
    assert first.memory == anneal.memory and first.batch == anneal.batch
    assert long.batch.micro_batch < first.batch.micro_batch or long.memory != first.memory
    assert anneal.schedule.warmup_steps == 0 < first.schedule.warmup_steps, "it goes on from the rate before"
    for number, stage in enumerate(recipe.each_stage()):
        prefix = f"stages.{number}." if number else ""
        chosen = {path: value for one in choices for path, value in one.values.items()}
        layout = [name for name in LAYOUT if prefix + name in chosen]
        assert len(layout) == 3
        for path in layout:
            section, _, name = path.partition(".")
            assert getattr(getattr(stage, section), name) == chosen[prefix + path], path
    again = parse_recipe(content, "", [word for one in choices for word in one.overrides], world=8)
    assert [one.batch for one in again.each_stage()] == [one.batch for one in recipe.each_stage()]
    assert resolve_defaults(recipe, 8) == (recipe, []), "nothing is left open"


@pytest.mark.parametrize("number", range(3))
def test_a_stage_has_the_defaults_of_a_recipe_of_its_own(number):
    """A default that gives way in one stage does so there alone."""
    stage, alone = staged().each_stage()[number], plain_of(number)
    for section in ("model", "data", "batch", "parallel", "memory", "optimizer", "precision"):
        ours, theirs = getattr(stage, section), getattr(alone, section)
        if section == "data":
            names = {"prepared_dir": None, "tokenizer": theirs.tokenizer}
            ours = ours.model_copy(update=names)
        assert ours == theirs
        filled = {"prepared_dir", "tokenizer", "sources"}
        assert ours.model_fields_set - filled == theirs.model_fields_set - filled
