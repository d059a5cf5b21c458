"""A fork without another recipe is its parent; the command that a refused resume names makes one with it."""

import shlex
import shutil
from pathlib import Path

import yaml

from tests.support.commands import hlat
from tests.support.same_runs import assert_same_state, events_of, metrics_of


def test_a_fork_without_another_recipe_ends_with_its_parents_bits(cli, finished: Path, tmp_path: Path) -> None:
    """Weights, optimizer, generators, position in the data, and every line of metrics from the fork's step on."""
    trunk = Path(shutil.copytree(finished, tmp_path / "trunk"))
    made = cli("fork", f"{trunk}@30", "--to", tmp_path / "fork")
    assert made.returncode == 0 and "of state by hard link" in made.stdout, made.stderr
    done = cli("train", tmp_path / "fork/recipe.yaml")
    assert done.returncode == 0 and "resumed at step 30 of 40" in done.stdout, done.stderr
    assert_same_state(trunk, tmp_path / "fork")
    assert metrics_of(tmp_path / "fork") == [line for line in metrics_of(trunk) if line["step"] >= 30]
    assert [event["changes"] for event in events_of(tmp_path / "fork", "resume")] == [[]]


def test_a_refused_change_is_made_by_the_command_that_the_refusal_names(
    cli, recipe_file: Path, quick: list[str], finished: Path, tmp_path: Path
) -> None:
    trunk = Path(shutil.copytree(finished, tmp_path / "trunk"))
    change = ["training.steps=42", "optimizer.lr=1e-3", "schedule.kind=wsd"]
    refused = cli("train", recipe_file, *quick, f"run.dir={trunk}", *change)
    assert refused.returncode == 2 and "optimizer.lr: saved with 0.003, now 0.001" in refused.stderr, refused.stderr
    [line] = [line for line in refused.stderr.splitlines() if line.startswith("  hlat fork ")]
    made = hlat(*shlex.split(line)[1:])
    assert made.returncode == 0 and "learning rate of step 41: " in made.stdout, made.stderr
    fork = tmp_path / "trunk-fork"
    done = cli("train", fork / "recipe.yaml")
    assert done.returncode == 0 and "finished at step 42" in done.stdout, done.stderr
    recipe = yaml.safe_load((fork / "recipe.yaml").read_text())
    assert (recipe["optimizer"]["lr"], recipe["schedule"]["kind"], recipe["training"]["steps"]) == (1e-3, "wsd", 42)
