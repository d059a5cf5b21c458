"""Rehearsals of the stages of a run: what each needs by the plan, and which one is meant."""

import json

import pytest
import yaml

from hlat.config import RecipeError
from hlat.parallel.layout import StepShape
from hlat.parallel.stages.rank_memory import rank_bytes
from hlat.parallel.stages.stage_layers import stage_layer_counts
from hlat.rehearsal import rehearse
from tests.support.distributed.stage_bytes import peak_memory_rank
from tests.support.training.staged import plain_of, staged, staged_content

# Large enough for the tolerance of 3 %, which all planned memory has.
MODEL = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "heads": 8, "kv_heads": 4}


@pytest.mark.parametrize("name", [pytest.param("short", marks=pytest.mark.slow), "long"])
def test_plan_and_rehearsal_of_a_stage_agree_within_3_percent(name: str) -> None:
    run = staged(model=MODEL, data={"sequence_length": 256}, stages=[*staged_content()["stages"][:2], LONG])
    stage = run.stage(name)
    step = StepShape.of(stage, 2)
    rank = peak_memory_rank(step)
    (report,) = rehearse(stage, 2, [step.first_rank(rank)]).ranks
    assert abs(rank_bytes(step, rank, stage_layer_counts(step)[rank]).total / report.peak_bytes - 1) < 0.03


LONG = {**staged_content()["stages"][2], "data": {"sequence_length": 1024}}


def test_a_stage_is_rehearsed_as_a_recipe_of_its_own() -> None:
    ours, alone = (rehearse(recipe, 2, [1]).to_dict() for recipe in (staged().stage("long"), plain_of(2)))
    assert ours == alone
    with pytest.raises(RecipeError, match="short, anneal, long"):
        staged().stage("middle")


def test_the_command_rehearses_each_stage_or_one(cli, tmp_path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(staged_content()), encoding="utf-8")
    every = json.loads(cli("rehearse", file, "--world", "2", "--rank", "0", "--json").stdout)["stages"]
    assert [each["stage"] for each in every] == ["short", "anneal", "long"]
    assert [each["layout"]["context"] for each in every] == [1, 1, 2]
    refused = cli("rehearse", file, "--world", "2", "--stage", "middle")
    assert refused.returncode == 2 and "short, anneal, long" in refused.stderr
