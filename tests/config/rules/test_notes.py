"""Settings that are allowed but odd are pointed out."""

import pytest
from typer.testing import CliRunner

from hlat.cli import app
from hlat.config import RecipeError
from hlat.config.load import parse_recipe
from hlat.config.notes import odd_settings


def recipe(steps: int, warmup: int, horizon: int | None):
    return parse_recipe(
        {
            "model": {"preset": "tiny-1m"},
            "data": {"path": "x"},
            "optimizer": {"lr": 0.01},
            "schedule": {"warmup_steps": warmup, "horizon_steps": horizon},
            "training": {"steps": steps},
        }
    )


@pytest.mark.parametrize(
    ("steps", "warmup", "horizon", "said"),
    [
        (100, 500, 1000, "no further than 0.002; optimizer.lr=0.01 is never reached"),
        (500, 500, 1000, "reached in its last step"),
        (501, 500, 1000, None),
        (1000, 500, None, None),
        (100, 0, 1000, None),
    ],
)
def test_a_run_that_ends_within_its_warm_up_is_told_so(steps, warmup, horizon, said):
    notes = [str(note) for note in odd_settings(recipe(steps, warmup, horizon)) if "ends" in note.text]
    assert len(notes) == (said is not None)
    assert said is None or said in notes[0]


def with_ramp(steps: int):
    return parse_recipe(
        {
            "model": {"preset": "tiny-1m"},
            "data": {"path": "x", "sequence_length": 100},
            "batch": {
                "global_batch": 64,
                "ramp": [{"tokens": 8001, "global_batch": 16}, {"tokens": 6400, "global_batch": 32}],
            },
            "training": {"steps": steps},
        }
    )


@pytest.mark.parametrize(("steps", "stage"), [(6, 1), (7, 2), (8, 2), (9, None)])
def test_a_run_that_ends_within_its_ramp_is_told_so(steps, stage):
    notes = [str(note) for note in odd_settings(with_ramp(steps)) if note.rule == "ramp"]
    assert len(notes) == (stage is not None)
    if stage is not None:
        assert f"step {steps}, in stage {stage} of 2; batch.global_batch=64 is never reached" in notes[0]


def test_check_lists_the_stages_of_a_ramp():
    ramp = "batch.ramp=[{tokens: 1000, global_batch: 4}]"
    asked = ["check", "--no-files", "quickstart", "data.path=x", "data.sequence_length=100", "batch.global_batch=8"]
    done = CliRunner().invoke(
        app, [*asked, "batch.micro_batch=2", "training.steps=10", ramp, "schedule.warmup_steps=0"]
    )
    assert done.exit_code == 0, done.output
    assert "run    10 steps: 3 of 400 tokens, then 7 of 800 tokens = 6,800 tokens" in done.output


def test_a_schedule_that_is_all_warm_up_is_refused_as_before():
    with pytest.raises(RecipeError, match="peak is never reached"):
        recipe(100, 100, None)
    with pytest.raises(RecipeError, match="peak is never reached"):
        recipe(2000, 1000, 1000)


def test_check_says_it_and_the_precision():
    asked = ["check", "--no-files", "quickstart", "data.path=x", "training.steps=10", "schedule.warmup_steps=20"]
    done = CliRunner().invoke(app, [*asked, "schedule.horizon_steps=100"])
    assert done.exit_code == 0 and "warning: schedule.warmup_steps=20: the run ends at step 10" in done.output
    assert "precision auto: mixed where every device has fast bf16, else fp32" in done.output
