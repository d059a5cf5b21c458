"""The record of a ladder's design in its folder: drawn once, so that the same command goes on with the same runs.

LadderPlan --write_plan--> design.json --read_plan--> LadderPlan; PlanError if other settings made it
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from hlat.config import Recipe, load_recipe
from hlat.forecast import conditions_of
from hlat.ladder.planned_runs import PlannedRun, Target, places
from hlat.runtime.errors import PlanError
from hlat.runtime.storage.local_files import read_small_file, write_atomic
from hlat.runtime.terminal import listed

DESIGN_FILE = "design.json"
_SIZES = ("layers", "hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim")
_OF_LENGTH = ("schedule.warmup_share", "batch.tokens")  # compared in steps and samples
_ABSENT = "not given"
_SHOWN = 3  # differences that a message names


@dataclass(frozen=True)
class LadderPlan:
    """A ladder before its runs: the target, and every run with what it is expected to take."""

    target: Target
    folder: Path
    runs: tuple[PlannedRun, ...]  # by size, then by seed, then by length
    conditions: Mapping[str, Any]  # of the recipe when the design was drawn: its length may be another one now

    def by_size(self) -> list[list[PlannedRun]]:
        return [list(runs) for _, runs in groupby(self.runs, key=lambda run: run.size)]

    def folder_of(self, run: PlannedRun) -> Path:
        return self.folder / run.name

    def trunk_of(self, run: PlannedRun) -> PlannedRun:
        """Return the first run of a chain of forks; the run itself if it is no fork."""
        while run.parent is not None:
            run = next(one for one in self.runs if one.name == run.parent)
        return run

    def words_of(self, run: PlannedRun) -> tuple[str, ...]:
        """Overrides of the target's recipe that make it the recipe of a run."""
        trunk = () if run.parent is None else self.trunk_of(run).overrides
        return (*self.target.words, *trunk, *run.overrides, *places(self.target, self.folder, run.name))

    def recipe_of(self, run: PlannedRun) -> Recipe:
        """Return the recipe that a run has, or is to have."""
        return load_recipe(self.target.source, self.words_of(run))

    @property
    def flops(self) -> float:
        """FLOPs of all training and validations."""
        return sum(run.own_flops for run in self.runs)

    @property
    def seconds(self) -> float | None:
        """Expected seconds of all runs, one after the other; None if no speed was measured."""
        each = [run.seconds or 0.0 for run in self.runs]
        return sum(each) if all(each) else None


def write_plan(plan: LadderPlan, asked: Mapping[str, Any]) -> None:
    """Write the design, with the options that it was drawn for, into the folder of the ladder."""
    content = {
        "version": 1,
        "asked": dict(asked),
        "conditions": dict(plan.conditions),
        "recipe": _design_settings(plan.target),
        "runs": [asdict(run) for run in plan.runs],
    }
    plan.folder.mkdir(parents=True, exist_ok=True)
    write_atomic(plan.folder / DESIGN_FILE, json.dumps(content, indent=1, allow_nan=False).encode())


def read_plan(target: Target, folder: Path, asked: Mapping[str, Any]) -> LadderPlan | None:
    """Read the design in a folder; None if there is none yet.

    The length of the target may be another one: its loss is foretold by the same runs.

    PlanError: it was drawn for other settings, or other options, of which None stands for any; or it is damaged.
    """
    file = folder / DESIGN_FILE
    if not file.exists():
        return None
    try:
        content = json.loads(read_small_file(file, kind="the design of a ladder"))
        runs = [PlannedRun(**{**run, "overrides": tuple(run["overrides"])}) for run in content["runs"]]
        drawn_for, recipe, conditions = (dict(content[name]) for name in ("asked", "recipe", "conditions"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{file}: cannot be read ({error}). Name another folder with --to.") from error
    # Earlier versions recorded the horizon in steps, although it is scaled as the length.
    recipe = {"schedule.horizon_share": conditions.get("schedule.horizon_share"), **recipe}
    recipe.pop("schedule.horizon_steps", None)
    now = _design_settings(target)
    recipe = {**{name: now[name] for name in ("data.mode", "data.shuffle")}, **recipe}  # nor these
    problems = changed(recipe, now)
    problems += [
        f"--{name} is {value}, and was {drawn_for.get(name) or _ABSENT}"
        for name, value in asked.items()
        if value is not None and value != drawn_for.get(name)
    ]
    if problems:
        raise PlanError(
            f"{folder}: has a ladder that was made with other settings ({listed(problems, _SHOWN, '; ')}). Use those, "
            "or another folder: --to NEW"
        )
    return LadderPlan(target, folder, tuple(runs), conditions)


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs between settings, a phrase for each."""
    pairs = {name: (before.get(name, _ABSENT), now.get(name, _ABSENT)) for name in sorted({*before, *now})}
    if "auto" in pairs.get("precision.mode", ()):
        del pairs["precision.mode"]  # any mode: a run records the one that it chose
    return [f"{name} is {b}, and was {a}" for name, (a, b) in pairs.items() if a != b]


def loss_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that change the losses of a recipe's runs, its length left out, as JSON values by path."""
    found = {name: value for name, value in conditions_of(recipe).items() if name not in _OF_LENGTH}
    found |= {f"model.{name}": getattr(recipe.model, name) for name in _SIZES}
    return found | {
        "batch.global_batch": recipe.batch.global_batch,
        "schedule.warmup_steps": recipe.schedule.warmup_steps,
        "training.seed": recipe.training.seed,
    }


def _design_settings(target: Target) -> dict[str, Any]:
    """Return the settings that decide a ladder: not those that hlat chooses by the length of the target."""
    return {name: value for name, value in loss_settings(target.recipe).items() if name not in target.chosen}
