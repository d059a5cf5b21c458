"""With a recipe, what it says is planned: its micro-batch, recomputation, precision, compile and determinism."""

from pathlib import Path

import pytest

import hlat
from hlat.planner.plan import recipe_fragment
from hlat.planner.problem.devices import planned_execution
from hlat.planner.report.explanation import recipe_sentence
from hlat.planner.report.html_report import html_page
from hlat.runtime.errors import PlanError

RECIPE = """
run: {name: b, compile: none, deterministic: true}
model: {preset: llama-3.2-1b}
data: {path: none, sequence_length: 2048}
parallel: {zero: 1}
batch: {global_batch: 64, micro_batch: 8}
memory: {activation_checkpointing: full}
precision: {mode: bf16-sr}
training: {steps: 1000}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("recipes") / "b.yaml"
    file.write_text(RECIPE)
    return file


def test_every_layout_has_the_settings_of_the_recipe(recipe: Path) -> None:
    for plan in (hlat.plan(recipe, "h100:1"), hlat.plan(recipe, "h100:1", layout="tp=2")):
        for one in (plan.chosen, *plan.alternatives):
            assert (one.candidate.micro_batch, one.candidate.recompute) == (8, "full")
            execution = planned_execution(plan.request, one.candidate)
            assert execution.deterministic and not execution.compiled
        assert plan.request.mode == "bf16-sr"
        assert not {"batch.micro_batch", "memory.activation_checkpointing", "precision.mode"} & plan.changes.keys()


def test_what_would_change_in_the_recipe_is_listed(recipe: Path) -> None:
    """A layout as written changes nothing; one with other settings, those alone."""
    same = hlat.plan(recipe, "h100:1", layout="tp=1")
    assert same.changes == {} and recipe_sentence(same) == "" and same.to_dict()["would_change"] == {}
    other = hlat.plan(recipe, "h100:1", layout="tp=2,zero=3,mbs=4", precision="mixed")
    changed = {
        "parallel.tensor": (1, 2),
        "parallel.zero": (1, 3),
        "batch.micro_batch": (8, 4),
        "precision.mode": ("bf16-sr", "mixed"),
    }
    assert other.changes == changed
    assert other.to_dict()["would_change"]["batch.micro_batch"] == {"recipe": 8, "plan": 4}
    assert "would change in your recipe: parallel.tensor 1 to 2, " in recipe_sentence(other)
    assert recipe_sentence(other) in html_page([other])
    assert "micro_batch: 4" in recipe_fragment(other.request, other.chosen.candidate)


def test_searching_is_asked_for_and_suggested_where_the_recipe_does_not_fit(recipe: Path) -> None:
    found = hlat.plan(recipe, "h100:1", search=True)
    assert {one.candidate.micro_batch for one in found.ranked} > {
        8
    } and "memory.activation_checkpointing" in found.changes
    with pytest.raises(PlanError, match=r"micro-batch, 8.* divide --global-batch 12(?s:.*)fit on h100:1 with --search"):
        hlat.plan(recipe, "h100:1", global_batch=12)


def test_a_purchase_takes_the_settings_of_the_recipe(recipe: Path) -> None:
    found = hlat.choose_cluster(recipe, chips="p5.48xlarge", tokens=10**10, deadline="20d")
    layouts = [offer.prediction.candidate for offer in found.sizes]
    assert layouts and {(one.micro_batch, one.recompute) for one in layouts} == {(8, "full")}
