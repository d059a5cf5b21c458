"""An evaluation that fails costs no step: training goes on, with the same bits, and the next attempt leaves it out."""

import json
import os

import pytest

from hlat.training import run
from hlat.training.validation.evaluation import Evaluation, EvaluationAttempts
from tests.support.commands import forking
from tests.support.training.evaluated_runs import recipe_of
from tests.training.test_resume import model_of


def lines(folder):
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def evaluated(folder):
    """Steps with results of split, set and task."""
    names = {"val_loss", "val/log/loss", "val/log/bits_per_byte", "task/qa/acc", "task/qa/acc_norm"}
    return [line["step"] for line in lines(folder) if names <= line.keys()]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation") / "straight"
    run(recipe_of(folder))
    return folder


def test_split_set_and_task_are_evaluated_and_change_no_bit(straight, tmp_path):
    assert evaluated(straight) == [2, 4, 6]
    recipe = recipe_of(tmp_path)
    run(recipe.model_copy(update={"evaluation": type(recipe.evaluation)(every_steps=None)}))
    assert evaluated(tmp_path) == []
    assert model_of(tmp_path / "run").equal(model_of(straight / "run"))


def test_tokens_between_evaluations(tmp_path):
    """128 tokens a step: 300 are passed in steps 3 and 5; the last step evaluates too."""
    recipe = recipe_of(tmp_path)
    settings = recipe.evaluation.model_copy(update={"every_steps": None, "every_tokens": 300})
    run(recipe.model_copy(update={"evaluation": settings}))
    assert evaluated(tmp_path) == [3, 5, 6]


def test_an_evaluation_that_raises_is_reported_and_training_goes_on(straight, tmp_path, monkeypatch):
    evaluate, steps = Evaluation.run, []

    def failing(self, *arguments):
        steps.append(len(steps))
        if len(steps) == 2:
            raise MemoryError("no memory for the logits")
        return evaluate(self, *arguments)

    monkeypatch.setattr(Evaluation, "run", failing)
    run(recipe_of(tmp_path))
    assert evaluated(tmp_path) == [2, 6]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["event"] == "evaluation_failed"]
    assert (event["step"], event["error"]) == (4, "MemoryError: no memory for the logits")
    assert model_of(tmp_path / "run").equal(model_of(straight / "run"))


def _train_and_die(folder):
    evaluate = Evaluation.run

    def deadly(self, *arguments):
        if (folder / "run" / "metrics.jsonl").read_text().count("\n") == 3:
            os._exit(9)
        return evaluate(self, *arguments)

    Evaluation.run = deadly
    run(recipe_of(folder))


def test_an_evaluation_that_ends_the_process_is_tried_twice_and_then_left_out(straight, tmp_path):
    for _ in range(2):
        process = forking().Process(target=_train_and_die, args=(tmp_path,))
        process.start()
        process.join()
        assert process.exitcode == 9
        assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
    run(recipe_of(tmp_path))
    assert evaluated(tmp_path) == [2, 6]
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert model_of(tmp_path / "run").equal(model_of(straight / "run"))
    assert not (tmp_path / "run" / "evaluation.json").exists()


def test_after_two_steps_in_a_row_nothing_is_evaluated(tmp_path):
    def begun(step):
        attempts = EvaluationAttempts(tmp_path)
        assert attempts.refusal(step) == ""
        attempts.begin(step)

    begun(4)
    begun(4)
    assert "step 4" in EvaluationAttempts(tmp_path).refusal(4)
    begun(6)
    begun(6)
    EvaluationAttempts(tmp_path).done(2)
    assert "steps 4 and 6" in EvaluationAttempts(tmp_path).refusal(8)
    EvaluationAttempts(tmp_path).done(6)
    begun(4)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"unfinished": [4]}', '{"unfinished": {"x": 1}}', "null"])
def test_a_damaged_record_protects_from_nothing(tmp_path, content):
    (tmp_path / "evaluation.json").write_text(content)
    assert EvaluationAttempts(tmp_path).refusal(4) == ""
