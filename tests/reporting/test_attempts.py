"""A run leaves its recipe and what it was started with, before anything can go wrong with its data."""

import json
from pathlib import Path

import hlat
from hlat.config import load_recipe
from tests.support.same_runs import assert_same_run


def attempts(run: Path) -> list[dict[str, object]]:
    return [json.loads(text) for text in (run / "attempts.jsonl").read_text().splitlines()]


def test_the_recorded_recipe_is_the_same_run(cli, recipe_file, tiny, tmp_path):
    assert cli("train", recipe_file, *tiny, "optimizer.lr=1.0e-3").returncode == 0
    run = tmp_path / "run"
    loaded = load_recipe(run / "recipe.yaml")
    assert loaded == load_recipe(recipe_file, [*tiny, "optimizer.lr=1.0e-3"])
    assert cli("train", run / "recipe.yaml", f"run.dir={tmp_path / 'again'}").returncode == 0
    assert_same_run(run, tmp_path / "again")
    [attempt] = attempts(run)
    assert attempt["text"] == recipe_file.read_text() and attempt["overrides"][-1] == "optimizer.lr=1.0e-3"
    assert {"hlat", "torch", "python", "tokenizers"} <= set(attempt["versions"]) and attempt["processes"] == 1


def test_a_run_that_dies_before_its_first_step_leaves_its_recipe(cli, recipe_file, tiny, tmp_path):
    """The text ends within a row that the checks before a start do not reach."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "the cat sees a river."}\n' * 2000 + '{"text": "the c')
    done = cli("train", recipe_file, *tiny, f"data.path={texts}", "data.validation.by=tail")
    assert done.returncode == 2, done.stderr
    assert load_recipe(tmp_path / "run" / "recipe.yaml").run.name == "tiny"
    assert cli("show", tmp_path / "run").stdout.startswith("tiny: failed (")
    [found] = hlat.runs(tmp_path)
    assert found.state == "failed" and str(texts) in found.reason and found.total_steps == 40
    others = tmp_path / "others.jsonl"
    others.write_text('{"text": "the cat sees a river."}\n' * 2000 + '{"text": 5}\n')
    done = cli("train", recipe_file, *tiny, f"data.path={others}", "data.validation.by=tail", "training.steps=30")
    assert done.returncode == 2, done.stderr
    [found] = hlat.runs(tmp_path)
    assert str(others) in found.reason and found.total_steps == 30, "the last attempt, not the first one"


def test_a_resumed_run_appends_its_attempt_with_the_changed_fields(cli, recipe_file, tiny, tmp_path):
    assert cli("train", recipe_file, *tiny, "training.stop_after=5").returncode == 0
    events = tmp_path / "run" / "events.jsonl"
    events.write_bytes(b"\0\0\0\n" + events.read_bytes())  # a damaged line ends no resuming
    assert cli("train", recipe_file, *tiny, "evaluation.sequences=3", "training.stop_after=5").returncode == 0
    refused = cli("train", recipe_file, *tiny, "evaluation.sequences=4", "model.layers=3")
    assert refused.returncode == 2 and "model.layers: saved with" in refused.stderr, "no attempt: nothing is recorded"
    first, second = attempts(tmp_path / "run")
    assert first["changes"] == [] and [change["path"] for change in second["changes"]] == ["evaluation.sequences"]
    assert "changed: evaluation.sequences: 8 -> 3" in cli("show", tmp_path / "run").stdout
    assert load_recipe(tmp_path / "run" / "recipe.yaml").evaluation.sequences == 3


def test_no_secret_of_a_url_or_of_the_environment_is_recorded(cli, recipe_file, tiny, tmp_path):
    secret = "tok3n-s3cret"
    url = f"https://user:{secret}@127.0.0.1:1/text.jsonl?signature={secret}"
    recipe_file.write_text(recipe_file.read_text() + f"# from {url}\n")
    done = cli("train", recipe_file, *tiny, f"data.path={url}", env={"WANDB_API_KEY": secret})
    assert done.returncode != 0
    for file in (tmp_path / "run").rglob("*"):
        assert not file.is_file() or secret not in file.read_text(errors="replace"), file


def test_weights_that_a_run_begins_with_are_told(cli, recipe_file, tiny, tmp_path):
    assert cli("train", recipe_file, *tiny, "training.stop_after=1").returncode == 0
    start = tmp_path / "run" / "checkpoints"
    next_run = [f"run.dir={tmp_path / 'next'}", f"checkpoint.init_from={start}", "training.stop_after=1"]
    done = cli("train", recipe_file, *tiny, *next_run)
    assert f"weights: loaded from {start}" in done.stdout
    events = [json.loads(text) for text in (tmp_path / "next" / "events.jsonl").read_text().splitlines()]
    assert [event["init_from"] for event in events if event["event"] == "start"] == [str(start)]
