"""Memory before a start, as launch, check and train judge it: the recipe as it is written, and changes that help."""

import json
import logging
from typing import Any

import pytest
import torch

from hlat.api import submit_slurm
from hlat.config import Problem, Recipe
from hlat.config.load import parse_recipe
from hlat.hardware import Cluster, load_catalog, parse_cluster
from hlat.launch import start_checks
from hlat.launch.start_checks import check_device_memory
from hlat.launch.start_place import Here, StartPlace
from hlat.planner import fit, recipe_fit
from hlat.runtime.backend.table import backend_of
from hlat.runtime.errors import LaunchError

EIGHT: dict[str, Any] = {
    "model": {"preset": "llama-3-8b"},
    "data": {"path": "none", "sequence_length": 8192},
    "batch": {"global_batch": 512, "micro_batch": 8},
    "memory": {"activation_checkpointing": "none"},
    "parallel": {"zero": 1},
    "training": {"steps": 1000},
}


def on(name: str) -> Cluster:
    return parse_cluster(name, load_catalog())


def recipe(overrides: str = "", world: int = 32) -> Recipe:
    return parse_recipe(EIGHT, overrides=overrides.split(), world=world)


def test_what_does_not_fit_names_changes_of_few_fields_with_which_it_does() -> None:
    found = recipe_fit(recipe(), on("p5.48xlarge:4"))
    assert not found.fits and found.needed > 4 * found.memory
    assert found.remedies and all(len(one.override.split()) <= 3 for one in found.remedies)
    for one in found.remedies:
        changed = recipe_fit(recipe(one.override), on("p5.48xlarge:4"))
        assert changed.fits and changed.needed == pytest.approx(one.needed), one
    assert "343." in str(found) and "`batch.micro_batch=1 parallel.zero=3`" in found.remedy
    fitting = recipe_fit(recipe(found.remedies[0].override), on("p5.48xlarge:4"))
    assert fitting.remedies == ()


def test_where_nothing_near_helps_the_plan_is_named() -> None:
    found = recipe_fit(parse_recipe(EIGHT | {"model": {"preset": "llama-3-405b"}}, world=32), on("p5.48xlarge:4"))
    assert not found.fits and found.remedies == ()
    assert "hlat plan --model RECIPE --cluster p5.48xlarge:4 --search" in found.remedy


def test_a_memory_budget_is_counted_as_it_is() -> None:
    budget = "memory.activation_checkpointing=budget memory.budget_gib="
    small, large = (recipe_fit(recipe(f"{budget}{gib}"), on("p5.48xlarge:4")) for gib in (10, 40))
    assert small.fits and small.needed < large.needed


def test_the_start_on_this_machine_is_judged_by_the_memory_that_its_device_has(monkeypatch) -> None:
    """A card that the catalog does not have: its memory decides, and a chip of its type stands for the rest."""
    backend = type(backend_of("cuda"))
    monkeypatch.setattr(fit, "choose_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(backend, "chip_name", lambda *_: "A card of tomorrow")
    monkeypatch.setattr(backend, "describe", lambda *_: "A card of tomorrow")
    monkeypatch.setattr(start_checks, "expects_accelerator", lambda *_: True)
    monkeypatch.setattr(start_checks, "absent_device", lambda *_: "")

    def problems(gib: float, processes: int | None = 1) -> list[Problem]:
        monkeypatch.setattr(backend, "memory_bytes", lambda *_: int(gib * 2**30))
        small = recipe("batch.micro_batch=1 model.layers=8", world=1)
        found = list(check_device_memory(StartPlace({}, small, Here(processes, 1))))
        assert all(isinstance(one, Problem) or one.rule == "device-memory" for one in found)
        return [one for one in found if isinstance(one, Problem)] or ([] if not found else [Problem("note", "")])

    [problem] = problems(24)
    assert problem.path == "batch.micro_batch" and "A card of tomorrow has 24.0 GiB" in problem.reason
    assert problems(140) == [] and problems(24, None) == []
    needed = recipe_fit(recipe("batch.micro_batch=1 model.layers=8", world=1), on("h100-pcie:1")).needed / 2**30
    assert [one.path for one in problems(0.9 * needed)] == ["note"], "near enough to try"


def test_a_launch_is_refused_or_warned_of(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "b.yaml"
    file.write_text(json.dumps(EIGHT))
    submit: dict[str, Any] = {"nodes": 4, "instance": "p5.48xlarge", "dry_run": True}
    with pytest.raises(
        LaunchError, match=r"memory: batch.micro_batch = 8: the fullest rank needs 343.*It fits with .*--anyway"
    ):
        submit_slurm(file, **submit)
    with caplog.at_level(logging.WARNING, "hlat"):
        assert "#SBATCH" in submit_slurm(file, anyway=True, **submit).script
    assert len(caplog.messages) == 1 and "needs 343" in caplog.messages[0]
    caplog.clear()
    assert submit_slurm(file, ["batch.micro_batch=1", "parallel.zero=3"], **submit).script and not caplog.messages


def test_check_answers_for_other_machines(tmp_path, cli) -> None:
    file = tmp_path / "b.yaml"
    file.write_text(json.dumps(EIGHT))
    refused = cli("check", file, "--on", "p5.48xlarge:4", "--no-files")
    assert refused.returncode == 2 and "the run cannot start on p5.48xlarge:4" in refused.stderr
    good = cli("check", file, "--on", "p5.48xlarge:4", "--no-files", "batch.micro_batch=1", "parallel.zero=3")
    assert good.returncode == 0, good.stderr
    assert "  memory the fullest rank needs 46" in good.stdout and "  time " in good.stdout
    assert "  layout 32 processes" in good.stdout


def test_a_launch_says_what_it_chooses_beside_the_script(tmp_path, cli) -> None:
    file = tmp_path / "b.yaml"
    file.write_text(json.dumps(EIGHT))
    machines = ("--nodes", "4", "--instance", "p5.48xlarge", "--dry-run")
    done = cli("launch", "slurm", file, *machines, "batch.micro_batch=1", "parallel.zero=3")
    assert done.returncode == 0 and "chosen: schedule.warmup_steps=" in done.stderr, done.stderr
    assert done.stdout.startswith("#!/bin/bash") and "chosen" not in done.stdout
