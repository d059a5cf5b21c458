"""Problems of a recipe: all of them in one error, each with its field, value, reason and remedy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hlat.runtime.distributed.sendable_types import sendable
from hlat.runtime.errors import HlatError
from hlat.runtime.terminal_text import escape_name
from hlat.runtime.urls import redact_value

_SCANNED = 10_000  # characters of a value that are searched for secrets
_LISTED = 100  # problems that a message lists
_LONGEST = 200  # characters of a name or path that a message repeats


@sendable
@dataclass(frozen=True)
class Fix:
    """A value of one field that would solve a problem."""

    path: str  # dotted field path, or "world", the number of processes
    value: Any


@sendable
@dataclass(frozen=True)
class Problem:
    """One thing wrong with a recipe."""

    path: str  # dotted field path, or a file name
    reason: str  # what is wrong, and why
    remedy: str = ""  # what would work
    value: Any = None
    has_value: bool = False
    fixes: tuple[Fix, ...] = ()  # the values that the remedy names, for programs; empty if no value would help
    is_default: bool = False  # the value is the field's default: the recipe does not give it

    def __str__(self) -> str:
        path = _shortened(escape_name(redact_value(self.path)), _LONGEST)
        shown = f" = {short(self.value)}" if self.has_value and not (self.is_default and self.value is None) else ""
        shown += " (the default)" if shown and self.is_default else ""
        remedy = f" {self.remedy}" if self.remedy else ""
        return f"{path}{shown}: {self.reason}{remedy}"


class RecipeError(HlatError):
    """A recipe with one or more problems; the message lists them.

    Attributes:
        problems: every problem found, in the order of the recipe's sections.
        source: name of the recipe.
        sections: the sections that are valid on their own, by name; empty if the error is not about fields.
    """

    def __init__(
        self, problems: Sequence[Problem], source: str = "recipe", sections: Mapping[str, Any] | None = None
    ) -> None:
        self.problems = tuple(problems)
        self.source = source
        self.sections = sections or {}
        count = len(self.problems)
        head = f"{_shortened(escape_name(source), _LONGEST)}: {count} problem{'s' if count > 1 else ''}"
        more = [f"  and {count - _LISTED:,} more"] if count > _LISTED else []
        super().__init__("\n".join([head, *(f"  {problem}" for problem in self.problems[:_LISTED]), *more]))


def short(value: Any, limit: int = 60) -> str:
    """A value as a recipe writes it, shortened to ``limit`` characters, without secrets in URLs."""
    if isinstance(value, str):
        value = redact_value(value[:_SCANNED])
    return _shortened(repr(list(value) if isinstance(value, tuple) else value), limit)


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
