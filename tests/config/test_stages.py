"""Stages of a recipe: what each changes, where it lies, and what is refused."""

from typing import Any

import pytest

from hlat.config import Recipe, parse_recipe
from hlat.config.errors import RecipeError
from hlat.optim import placed, rate_at

BASE: dict[str, Any] = {
    "model": {"vocab_size": 260, "layers": 2, "hidden_size": 32, "intermediate_size": 64, "heads": 2},
    "data": {"path": "text", "sequence_length": 64},
    "batch": {"global_batch": 8, "micro_batch": 4, "ramp": [{"tokens": 1024, "global_batch": 4}]},
    "optimizer": {"lr": 1e-3},
    "schedule": {"kind": "wsd", "warmup_steps": 4, "decay_fraction": 0.25, "min_ratio": 0.5},
}
STAGES: list[dict[str, Any]] = [
    {"name": "trunk", "steps": 20},
    {"name": "more", "tokens": 5000, "training": {"ema": {"decay": 0.9}}},
    {"name": "anneal", "steps": 10, "data": {"path": "better"}, "schedule": {"kind": "linear", "min_ratio": 0}},
    {"name": "long", "steps": 5, "data": {"path": "text", "sequence_length": "1Ki"}, "batch": {"global_batch": 2,
     "micro_batch": 1}, "model": {"rope": {"theta": 5e5}}, "optimizer": {"lr": 2e-4}, "schedule": {"warmup_steps": 2}},
]  # fmt: skip

CONSTANT = {"kind": "constant"}
MUON = {"optimizer": {"kind": "muon", "lr": 1e-3, "adamw_lr": 3e-4}}


def staged(*stages: dict[str, Any], **sections: Any) -> Recipe:
    return parse_recipe({**BASE, **sections, "stages": list(stages or STAGES)})


def test_each_stage_is_a_recipe_with_what_it_names_and_the_rest_of_the_stages_before():
    recipe = staged()
    trunk, more, anneal, long = recipe.each_stage()
    spans = [(each.place.first, each.place.stop) for each in (trunk, more, anneal, long)]
    # 5,000 tokens are 10 steps of 8 sequences of 64, rounded up.
    assert spans == [(0, 20), (20, 30), (30, 40), (40, 45)]
    assert recipe.total_steps == long.total_steps == 45 and not long.stages
    assert recipe.total_tokens == 4 * 4 * 64 + (16 + 10 + 10) * 8 * 64 + 5 * 2 * 1024
    assert [each.training.ema is not None for each in recipe.each_stage()] == [False, True, True, True]
    assert [each.data.path for each in recipe.each_stage()] == ["text", "text", "better", "text"]
    assert [str(each.prepared_dir) for each in recipe.each_stage()] == [
        "runs/run/data", "runs/run/data", "runs/run/data-anneal", "runs/run/data"]  # fmt: skip
    assert anneal.data.tokenizer.path == "runs/run/data/tokenizer" and long.data.tokenizer.path is None
    assert {each.model.max_sequence_length for each in recipe.each_stage()} == {1024}, "declared for the longest"
    assert (trunk.model.rope.theta, long.model.rope.theta) == (1e4, 5e5)
    assert long.batch.ramp == () and trunk.batch.ramp != ()
    # What was read with units is kept as numbers, and a recipe that was written out says the same.
    assert recipe.stages[3].data["sequence_length"] == 1024
    again = Recipe.model_validate(recipe.model_dump(mode="json"))
    assert [each.model_dump() for each in again.each_stage()] == [each.model_dump() for each in recipe.each_stage()]


def test_rates_go_on_from_the_current_one_and_warm_up_to_one_that_a_stage_names():
    """By hand: wsd over 30 steps decays in its last 7.5, rounded to 8; linear to 0; 2 steps up; wsd's shape again."""
    each = [placed(stage) for stage in staged().each_stage()]
    rate = {step: rate_at(each[sum(step > stage.place.stop for stage in each)], step) for step in range(1, 46)}
    assert rate[4] == rate[22] == 1e-3 and rate[2] == 5e-4
    assert rate[26] == pytest.approx(1e-3 * (1 - 0.5 * 4 / 8)) and rate[30] == pytest.approx(5e-4)
    assert rate[31] == pytest.approx(5e-4 * 0.9) and rate[40] == pytest.approx(0, abs=1e-12)
    assert rate[41] == pytest.approx(1e-4) and rate[42] == pytest.approx(2e-4)
    assert rate[43] == pytest.approx(2e-4 * (1 - 1 / 3)) and rate[45] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("stages", "sections", "paths"),
    [
        ([{"name": "a"}], {}, ["stages.0"]),
        ([{"name": "a", "steps": 1}, {"name": "a", "tokens": 5}], {}, ["stages.1.name"]),
        ([{"name": "a", "steps": 1, "restart": True}], {}, ["stages.0.restart"]),
        ([{"name": "a", "steps": 9}, {"name": "b", "steps": 9, "restart": ["x"]}], {}, ["stages.1.restart"]),
        ([{"name": "a", "steps": 9, "optimizer": {"kind": "muon"}}], {}, ["stages.0.optimizer.kind"]),
        ([{"name": "a", "steps": 9}, {"name": "b", "steps": 9, "optimizer": {"base_hidden_size": 16}}],
         {"optimizer": {"transfer": "mup", "base_hidden_size": 32}}, ["stages.1.optimizer.base_hidden_size"]),
        ([{"name": "a", "steps": 9}, {"name": "b", "steps": 9, "schedule": CONSTANT, "optimizer": {"adamw_lr": 1e-4}}],
         MUON, ["stages.1.optimizer.adamw_lr"]),
        ([{"name": "a", "steps": 9},
          {"name": "b", "steps": 9, "schedule": {"warmup_steps": 2}, "optimizer": {"lr": 5e-4}}],
         MUON, ["stages.1.optimizer.lr"]),
        ([{"name": "a", "steps": 9, "model": {"layers": 3}}], {}, ["stages.0.model.layers"]),
        ([{"name": "a", "steps": 9, "weights": {"x": 1}}], {}, ["stages.0.weights"]),
        ([{"name": "a", "steps": 3}], {}, ["schedule.warmup_steps"]),
        ([{"name": "a", "steps": 9}, {"name": "b", "steps": 2, "schedule": {"warmup_steps": 2}}], {},
         ["stages.1.schedule.warmup_steps"]),
        ([{"name": "a", "steps": 9}, {"name": "b", "steps": 2, "batch": {"micro_batch": 3}}], {},
         ["stages.1.batch.micro_batch"]),
        ([{"name": "a", "steps": 9, "schedule": {"min_ratio": 0}},
          {"name": "b", "steps": 2, "schedule": {"kind": "cosine"}}], {}, ["stages.1.schedule"]),
        ([{"name": "a", "steps": 9}, {"name": "b", "steps": 9, "restart": ["x"]}],
         {"data": {"sources": [{"path": "x"}, {"path": "y"}]}}, ["stages.1.restart"]),
        ([{"name": "a", "steps": 9, "data": {"sequence_length": "x", "tokenizer": {}}}], {"training": {"steps": 3}},
         ["training.steps", "stages.0.data.tokenizer", "stages.0.data.sequence_length"]),
        ([{"name": "a", "steps": 9}], {"data": {"path": "text", "mode": "online"}}, ["data.mode"]),
        ([{"name": "a", "steps": 9, "data": {"sequence_length": 128}}],
         {"model": {**BASE["model"], "max_sequence_length": 64}}, ["stages.0.data.sequence_length"]),
    ],
)  # fmt: skip
def test_what_is_wrong_with_stages_is_said_all_at_once(stages, sections, paths):
    with pytest.raises(RecipeError) as error:
        staged(*stages, **sections)
    assert sorted(problem.path for problem in error.value.problems) == sorted(paths)


def test_two_rates_that_change_by_the_same_factor_go_on_together():
    changes = {"schedule": {"warmup_steps": 2}, "optimizer": {"lr": 5e-4, "adamw_lr": 1.5e-4}}
    _, second = staged({"name": "a", "steps": 9}, {"name": "b", "steps": 9, **changes}, **MUON).each_stage()
    assert second.optimizer.rate_factor(False) == pytest.approx(0.3)
    # Without a warm-up and with a rate of its own, a stage does not go on from the rate that holds.
    staged({"name": "a", "steps": 9}, {"name": "b", "steps": 9, "optimizer": {"lr": 5e-4}}, **MUON)
