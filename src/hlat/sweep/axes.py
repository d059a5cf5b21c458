"""Axes of a sweep, as the command line gives them.

    optimizer.lr=1e-3,2e-3  training.seed=1..3  --parse_axes--> 2 axes --combinations--> 6 lists of overrides

An argument with one value is an override of every run. Commas within brackets, braces and quotes belong to a value.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from hlat.config import Problem, RecipeError

_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?::(\d+))?")
_OPEN, _CLOSE = "[{(", ")}]"
MOST_RUNS = 10_000
"""Runs of a sweep; more are a mistake in an axis."""


@dataclass(frozen=True)
class SweepAxis:
    """A field of the recipe, and the values that it takes.

    Attributes:
        field: dotted path of the field.
        values: the texts after ``=``; a single one is the same in every run.
    """

    field: str
    values: tuple[str, ...]

    @property
    def varies(self) -> bool:
        """True if runs differ in it."""
        return len(self.values) > 1


def parse_axes(words: Sequence[str]) -> list[SweepAxis]:
    """Parse the arguments of a sweep.

    Args:
        words: ``a.b=x,y,z``, ``a.b=1..3`` (with 1 and 3), ``a.b=10..50:10`` (in steps of 10), or ``a.b=x``.

    Raises:
        RecipeError: lists every argument that is none of these.
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
    """Yield the values of the axes for each run, in order: the last axis changes fastest."""
    yield from product(*(axis.values for axis in axes))


def _values(text: str) -> list[str]:
    if found := _RANGE.fullmatch(text.strip()):
        first, last, step = int(found[1]), int(found[2]), int(found[3] or 1)
        if step:
            length = abs(last - first) // step + 1
            sign = 1 if last >= first else -1
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
