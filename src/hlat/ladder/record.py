"""The record of a ladder's design in its folder: drawn once, so that the same command goes on with the same runs.

LadderPlan --write_plan--> design.json --read_plan--> LadderPlan; PlanError if it is the ladder of another recipe
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from hlat.config import Recipe
from hlat.ladder.planned_runs import PlannedRun, Target
from hlat.reporting import flat_settings
from hlat.runtime.errors import PlanError
from hlat.runtime.storage.local_files import read_small_file, write_atomic

DESIGN_FILE = "design.json"
_OWN = ("run.name", "run.dir", "tracking.", "recovery.")  # settings that change no loss
_SHOWN = 3  # differences that a message names


@dataclass(frozen=True)
class LadderPlan:
    """A ladder before its runs: the target, and every run with what it is expected to take."""

    target: Target
    folder: Path
    runs: tuple[PlannedRun, ...]  # by size, then by length

    def by_size(self) -> list[list[PlannedRun]]:
        return [list(runs) for _, runs in groupby(self.runs, key=lambda run: run.name.partition("-")[0])]

    def folder_of(self, run: PlannedRun) -> Path:
        return self.folder / run.name

    @property
    def flops(self) -> float:
        """FLOPs of all training."""
        return sum(run.own_tokens * run.flops for run in self.runs)

    @property
    def seconds(self) -> float | None:
        """Expected seconds of all runs, one after the other; None if no speed was measured."""
        each = [run.seconds for run in self.runs if run.seconds is not None]
        return sum(each) if len(each) == len(self.runs) else None


def write_plan(plan: LadderPlan, asked: Mapping[str, Any]) -> None:
    """Write the design, with the options that it was drawn for, into the folder of the ladder."""
    content = {
        "version": 1,
        "asked": dict(asked),
        "recipe": _settings(plan.target.recipe),
        "runs": [asdict(run) for run in plan.runs],
    }
    plan.folder.mkdir(parents=True, exist_ok=True)
    write_atomic(plan.folder / DESIGN_FILE, json.dumps(content, indent=1, allow_nan=False).encode())


def read_plan(target: Target, folder: Path, asked: Mapping[str, Any]) -> LadderPlan | None:
    """Read the design in a folder; None if there is none yet.

    PlanError: it was drawn for another recipe, or other options, of which None stands for any; or it is damaged.
    """
    file = folder / DESIGN_FILE
    if not file.exists():
        return None
    try:
        content = json.loads(read_small_file(file, kind="the design of a ladder"))
        runs = [PlannedRun(**{**run, "overrides": tuple(run["overrides"])}) for run in content["runs"]]
        drawn_for, recipe = dict(content["asked"]), dict(content["recipe"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{file}: cannot be read ({error}). Name another folder with --to.") from error
    now = _settings(target.recipe)
    changed = [name for name in sorted({*now, *recipe}) if now.get(name) != recipe.get(name)]
    problems = [f"{name} is {now.get(name)}, and was {recipe.get(name)}" for name in changed]
    problems += [
        f"--{name} is {value}, and was {drawn_for.get(name)}"
        for name, value in asked.items()
        if value is not None and value != drawn_for.get(name)
    ]
    if problems:
        shown = "\n  ".join([*problems[:_SHOWN], *([f"{len(problems) - _SHOWN} more"] if problems[_SHOWN:] else [])])
        raise PlanError(f"{folder}: has the ladder of another recipe. Name a folder for this one with --to.\n  {shown}")
    return LadderPlan(target, folder, tuple(runs))


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that decide a ladder, as JSON values by dotted path."""
    flat = flat_settings(recipe.model_dump(mode="json"))
    return {name: value for name, value in flat.items() if not name.startswith(_OWN)}
