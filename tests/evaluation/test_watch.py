"""Evaluation of a run's checkpoints by another process gives the numbers that the run itself computes."""

import json

import pytest

from hlat.evaluation import evaluate_checkpoint, watch_run
from hlat.runtime.errors import CheckpointError
from hlat.training import run
from tests.support.reporting import event, write_lines
from tests.support.training.evaluated_runs import recipe_of


def columns(line):
    return {name: value for name, value in line.items() if name.startswith(("val", "task/"))}


def results(folder):
    return [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]


def test_results_are_those_of_the_run_and_nothing_is_computed_twice(tmp_path):
    """The watcher starts before the run; it evaluates what the run saves meanwhile, and ends with it."""
    recipe = recipe_of(tmp_path)
    # bf16 activations: an evaluation in fp32 differs in the third digit.
    updates = {"checkpoint": {"every_steps": 2}, "precision": {"mode": "mixed"}}
    recipe = recipe.model_copy(update={name: getattr(recipe, name).model_copy(update=u) for name, u in updates.items()})
    (tmp_path / "run").mkdir()
    messages = []
    waits = iter([lambda: None, lambda: run(recipe)])
    found = list(watch_run(tmp_path / "run", skipped=messages.append, sleep=lambda seconds: next(waits)()))
    assert [(each.step, each.tokens) for each in found] == [(2, 256), (4, 512), (6, 768)]
    assert messages == []
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    wanted = {line["step"]: columns(line) for line in lines if columns(line)}
    assert len(wanted[2]) == 7
    for line in results(tmp_path / "run"):
        assert columns(line) == pytest.approx(wanted[line["step"]], rel=1e-6)  # fp32 sums in another order
    alone = evaluate_checkpoint(tmp_path / "run")
    assert alone.loss == pytest.approx(wanted[6]["val_loss"], rel=1e-6)
    assert list(watch_run(tmp_path / "run")) == []
    assert len(results(tmp_path / "run")) == 3


def test_the_watcher_ends_when_the_run_is_finished_not_when_it_is_stopped(tmp_path):
    """A run that was stopped, failed or resumed goes on, sooner or later."""
    history = [event("start", 0, step=0), event("end", 1, step=3, reason="SIGTERM"), event("resume", 2, step=3)]
    history += [event("error", 3, message="disk full"), event("resume", 4, step=3), event("checkpoint", 5, step=5)]
    history += [event("end", 6, step=6, reason="finished"), event("goodput", 7)]
    waited = []

    def sleep(seconds):
        waited.append(seconds)
        write_lines(tmp_path / "events.jsonl", history[: len(waited)])

    assert list(watch_run(tmp_path, sleep=sleep)) == []
    assert len(waited) == 7, "until the event of the end, which is the seventh"
    write_lines(tmp_path / "events.jsonl", [*history, event("resume", 8, step=6), event("end", 9, reason="finished")])
    assert list(watch_run(tmp_path, sleep=sleep)) == [] and len(waited) == 7


def test_a_checkpoint_that_is_being_written_is_evaluated_when_it_is_complete(tmp_path):
    run(recipe_of(tmp_path))
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    hidden = {file: file.with_name(f"hidden-{file.name}") for file in (tmp_path / "run" / "events.jsonl",)}
    hidden[checkpoint / "COMMITTED"] = tmp_path / "marker"
    for file, place in hidden.items():
        file.rename(place)
    messages = []

    def sleep(seconds):
        for file, place in hidden.items():
            place.rename(file)

    (found,) = watch_run(tmp_path / "run", skipped=messages.append, sleep=sleep)
    assert found.step == 6 and messages == []


def test_further_tasks_and_only_once(tmp_path):
    """A result of other weights, the average, is no result of these."""
    run(recipe_of(tmp_path))
    line = event("evaluation", 0, checkpoint="step-00000006", weights="ema")
    write_lines(tmp_path / "run" / "evaluations.jsonl", [line])
    (more,) = watch_run(tmp_path / "run", [tmp_path / "qa.jsonl"], once=True)
    assert more.step == 6 and more.result.tasks["qa"].examples == 1
    with pytest.raises(CheckpointError, match="no such folder"):
        list(watch_run(tmp_path / "nothing", once=True))
