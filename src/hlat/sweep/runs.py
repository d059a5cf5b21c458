"""The runs of a sweep: their values, names, folders and overrides, all checked before the first one starts.

    optimizer.lr=1e-3,2e-3  training.seed=1..3  --parse_axes--> 2 axes --combinations--> 6 lists of overrides
    recipe, axes --plan_sweep--> Sweep: folder, runs

    sweep folder / "lr=1e-3,seed=2" of each run
    sweep folder / "data", prepared once where no axis is about the data

An argument with one value is an override of every run. Commas within brackets, braces and quotes belong to a value.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from hlat.config import Problem, RecipeError, load_recipe

_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?::(\d+))?")
_OPEN, _CLOSE = "[{(", ")}]"
MOST_RUNS = 10_000
"""Runs of a sweep; more are a mistake in an axis."""


@dataclass(frozen=True)
class SweepAxis:
    """A field of the recipe, and the values that it takes."""

    field: str  # dotted path
    values: tuple[str, ...]  # the texts after "="; a single one is the same in every run

    @property
    def varies(self) -> bool:
        return len(self.values) > 1


def parse_axes(words: Sequence[str]) -> list[SweepAxis]:
    """Parse the arguments of a sweep.

    ``a.b=x,y,z``, ``a.b=1..3`` (with 1 and 3), ``a.b=10..50:10`` (in steps of 10), or ``a.b=x``. RecipeError lists
    every argument that is none of these.
    """
    axes: list[SweepAxis] = []
    problems: list[Problem] = []
    for word in words:
        field, equals, text = word.partition("=")
        values = _values(text)
        repeated = sorted({value for value in values if values.count(value) > 1})
        if not equals or not field:
            before = words[words.index(word) - 1] if words.index(word) else ""
            joined = f"{before}{word}, without blanks" if before.endswith(",") else "FIELD=X,Y,Z or FIELD=1..3"
            problems.append(Problem(word, "is no field with values.", f"Write {joined}."))
        elif field in {axis.field for axis in axes}:
            problems.append(Problem(field, "is given twice.", "Write all its values in one argument."))
        elif not values or "" in values[1:] or (len(values) > 1 and not values[0]):
            problems.append(Problem(field, "has an empty value.", "Remove a comma, or write null.", text, True))
        elif repeated:
            remedy = "Give each value once; for repetitions vary training.seed."
            problems.append(Problem(field, f"has a value twice: {', '.join(repeated)}.", remedy, text, True))
        else:
            axes.append(SweepAxis(field, tuple(values)))
    count = 1
    for axis in axes:
        count *= len(axis.values)
    if count > MOST_RUNS:
        problems.append(Problem("the sweep", f"has {count:,} runs, more than {MOST_RUNS:,}.", "Give fewer values."))
    if problems:
        raise RecipeError(problems, "sweep")
    return axes


def combinations(axes: Sequence[SweepAxis]) -> Iterator[tuple[str, ...]]:
    """Values of the axes for each run, in order: the last axis changes fastest."""
    yield from product(*(axis.values for axis in axes))


def _values(text: str) -> list[str]:
    if found := _RANGE.fullmatch(text.strip()):
        first, last, step = int(found[1]), int(found[2]), int(found[3] or 1)
        if step:
            length = abs(last - first) // step + 1
            sign = 1 if last >= first else -1
            # One more than allowed, so that a huge range is refused without being built.
            return [str(first + sign * step * number) for number in range(min(length, MOST_RUNS + 1))]
    values, depth, quote, begin = [], 0, "", 0
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'" and not text[begin:index].strip():  # elsewhere it is an apostrophe
            quote = character
        elif character in _OPEN:
            depth += 1
        elif character in _CLOSE:
            depth -= 1
        elif character == "," and depth == 0:
            values.append(text[begin:index].strip())
            begin = index + 1
    return [*values, text[begin:].strip()]


_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")
_LONGEST_NAME = 120  # characters of a folder
_DATA_FIELDS = ("data", "model.vocab_size", "model.preset", "model.hf_config", "model.from")
_OWN_FIELDS = ("run.dir",)


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep, as it will be started."""

    name: str  # of its folder: what it differs in, as in lr=1e-3,seed=2
    values: dict[str, str]  # of the fields that vary
    overrides: tuple[str, ...]  # all of them
    folder: Path
    steps: int
    device: str  # run.device of its recipe


@dataclass(frozen=True)
class Sweep:
    """A recipe trained with several values of some fields."""

    recipe: str  # file, or the name of a shipped recipe
    folder: Path  # of all runs
    runs: tuple[SweepRun, ...]  # in order


def plan_sweep(recipe: str, words: Sequence[str], folder: str | None) -> Sweep:
    """Name the runs of a sweep and check each of their recipes.

    Args:
        recipe: recipe file, or the name of a shipped recipe.
        words: axes and overrides, as ``parse_axes`` takes them.
        folder: folder of the runs; None for runs/NAME-sweep, NAME being that of the recipe.

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
            loaded = load_recipe(recipe, fixed)  # for some number of processes
        except RecipeError as error:
            problems += [problem for problem in error.problems if problem not in problems]
            continue
        root = root or Path("runs") / f"{loaded.run.name}-sweep"
        # Tokens that all runs share are prepared once.
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
    """The last word of each field, with as many words before it as tell it from the others."""
    names = {}
    for field in fields:
        words = field.split(".")
        shorter = (".".join(words[-count:]) for count in range(1, len(words) + 1))
        names[field] = next(name for name in shorter if sum(f".{other}".endswith(f".{name}") for other in fields) == 1)
    return names


def _run_name(values: Sequence[tuple[str, str]], number: int) -> str:
    """Name that is safe as that of a folder."""
    text = ",".join(f"{name}={value}" for name, value in values) or "run"
    safe = ",".join(f"{name}={_UNSAFE.sub('_', value)}" for name, value in values) or "run"
    # The number keeps names apart that are equal once made safe, or cut.
    return safe if safe == text and len(safe) <= _LONGEST_NAME else f"{number:03d},{safe}"[:_LONGEST_NAME]
