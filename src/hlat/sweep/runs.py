"""The runs of a sweep: their names, folders and overrides, all checked before the first one starts.

recipe, axes --plan_sweep--> Sweep: folder, runs
sweep folder / "lr=1e-3,seed=2" of each run
sweep folder / "data", prepared once where no axis is about the data
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hlat.config import Problem, RecipeError, load_recipe
from hlat.sweep.axes import SweepAxis, combinations, parse_axes

_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")
_LONGEST_NAME = 120  # characters of a folder
_DATA_FIELDS = ("data", "model.vocab_size", "model.preset", "model.hf_config", "model.from")
_OWN_FIELDS = ("run.dir",)


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        name: what it differs in, as in ``lr=1e-3,seed=2``; also the name of its folder.
        values: value by field, of the fields that vary.
        overrides: all its overrides of the recipe.
        folder: its run folder.
        steps: its steps.
        device: field ``run.device`` of its recipe.
    """

    name: str
    values: dict[str, str]
    overrides: tuple[str, ...]
    folder: Path
    steps: int
    device: str


@dataclass(frozen=True)
class Sweep:
    """A recipe trained with several values of some fields.

    Attributes:
        recipe: recipe file, or the name of a shipped recipe.
        folder: folder of all its runs.
        runs: the runs, in order.
    """

    recipe: str
    folder: Path
    runs: tuple[SweepRun, ...]


def plan_sweep(recipe: str, words: Sequence[str], folder: str | None, world: int | None = None) -> Sweep:
    """Name the runs of a sweep and check each of their recipes.

    Args:
        recipe: recipe file, or the name of a shipped recipe.
        words: axes and overrides, as ``parse_axes`` takes them.
        folder: folder of the runs; None for runs/NAME-sweep, NAME being that of the recipe.
        world: number of processes of each run; None checks only that some number fits.

    Raises:
        RecipeError: a mistake in the axes; or in the recipe of some run, with every problem named once.
    """
    axes = parse_axes(words)
    if own := [axis for axis in axes if axis.field in _OWN_FIELDS]:
        remedy = "Name the folder of the sweep with --to."
        raise RecipeError([Problem(own[0].field, "is chosen by the sweep, a folder for each run.", remedy)], "sweep")
    if any(axis.field == "run.name" and axis.varies for axis in axes):
        remedy = "Leave it out: each run is named after the values in which it differs, and --to names their folder."
        raise RecipeError([Problem("run.name", "does not change how a run trains.", remedy)], "sweep")
    names = _short_names([axis.field for axis in axes if axis.varies])
    root = Path(folder) if folder is not None else None
    runs: list[SweepRun] = []
    problems: list[Problem] = []
    for values in combinations(axes):
        varied = {axis.field: value for axis, value in zip(axes, values, strict=True) if axis.varies}
        name = _run_name([(names[field], value) for field, value in varied.items()], len(runs))
        fixed = [f"{axis.field}={value}" for axis, value in zip(axes, values, strict=True)]
        try:
            loaded = load_recipe(recipe, fixed, world=world)
        except RecipeError as error:
            problems += [problem for problem in error.problems if problem not in problems]
            continue
        root = root or Path("runs") / f"{loaded.run.name}-sweep"
        shared = [] if _is_about_data(axes) or loaded.data.prepared_dir else [f"data.prepared_dir={root / 'data'}"]
        overrides = (*fixed, *shared, f"run.dir={root / name}")
        runs.append(SweepRun(name, varied, overrides, root / name, loaded.total_steps, loaded.run.device))
    if problems:
        raise RecipeError(problems, recipe)
    assert root is not None, "a sweep has at least one run"
    return Sweep(recipe, root, tuple(runs))


def _is_about_data(axes: Sequence[SweepAxis]) -> bool:
    """True if runs may prepare different tokens."""
    fields = [axis.field for axis in axes if axis.varies]
    return any(field == own or field.startswith(f"{own}.") for field in fields for own in _DATA_FIELDS)


def _short_names(fields: Sequence[str]) -> dict[str, str]:
    """Return the last word of each field, with as many words before it as tell it from the others."""
    names = {}
    for field in fields:
        words = field.split(".")
        shorter = (".".join(words[-count:]) for count in range(1, len(words) + 1))
        names[field] = next(name for name in shorter if sum(f".{other}".endswith(f".{name}") for other in fields) == 1)
    return names


def _run_name(values: Sequence[tuple[str, str]], number: int) -> str:
    """Return a name that is safe as the name of a folder; the number keeps names apart that a file system cannot."""
    text = ",".join(f"{name}={value}" for name, value in values) or "run"
    safe = ",".join(f"{name}={_UNSAFE.sub('_', value)}" for name, value in values) or "run"
    return safe if safe == text and len(safe) <= _LONGEST_NAME else f"{number:03d},{safe}"[:_LONGEST_NAME]
