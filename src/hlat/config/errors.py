"""What is wrong with a recipe: every problem at once, each with its field, value, reason and remedy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hlat.runtime import HlatError


@dataclass(frozen=True)
class Fix:
    """A value of one field that would put a problem right."""

    path: str  # dotted field path, or "world", the number of processes
    value: Any


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a recipe."""

    path: str  # dotted field path, or a file name
    reason: str  # what is wrong, and why
    remedy: str = ""  # what would work
    value: Any = None
    has_value: bool = False
    fixes: tuple[Fix, ...] = ()  # what the remedy names, for programs; empty where it is not a matter of values

    def __str__(self) -> str:
        shown = f" = {_short(self.value)}" if self.has_value else ""
        remedy = f" {self.remedy}" if self.remedy else ""
        return f"{self.path}{shown}: {self.reason}{remedy}"


class RecipeError(HlatError):
    """A recipe with one or more problems; all of them are listed.

    Attributes:
        problems: every problem found, in the order of the recipe's sections.
    """

    def __init__(self, problems: Sequence[Problem], source: str = "recipe") -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = f"{source}: {count} problem{'s' if count > 1 else ''}"
        super().__init__("\n".join([head, *(f"  {problem}" for problem in self.problems)]))


def _short(value: Any, limit: int = 60) -> str:
    text = repr(list(value) if isinstance(value, tuple) else value)  # as a recipe writes it
    return text if len(text) <= limit else text[: limit - 3] + "..."
