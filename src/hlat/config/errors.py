"""Problems of a recipe, and the checks of every value, whatever its field.

    Problem: field, value, reason, remedy; Fix --> RecipeError: all problems of a recipe in one error
    mapping, as read --plain_content--> the same mapping with every refused value replaced, problems

Every value is plain, of bounded size and without secrets. One walk over the whole tree looks at every string, so that
no field can be forgotten: not the path of a tokenizer, nor one that a later version adds.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hlat.runtime.distributed.sendable_types import sendable
from hlat.runtime.errors import HlatError
from hlat.runtime.terminal import escape_name, first_of
from hlat.runtime.urls import find_secret, redact_value

_SCANNED = 10_000  # characters of a value that are searched for secrets
_LISTED = 30  # fields of which a message lists problems
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")  # in the path of a field of a list
_LONGEST_SHOWN = 200  # characters of a name or path that a message repeats


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
        path = _shortened(escape_name(redact_value(self.path)), _LONGEST_SHOWN)
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
        head = f"{_shortened(escape_name(source), _LONGEST_SHOWN)}: {count} problem{'s' if count > 1 else ''}"
        super().__init__("\n".join([head, *(f"  {line}" for line in _lines(self.problems))]))


def _lines(problems: Sequence[Problem]) -> list[str]:
    """Return a line for each problem, but three for a field of many list elements or mapping keys, and the rest."""
    alike: dict[str, list[Problem]] = {}
    for problem in problems:
        alike.setdefault(_NUMBER.sub("*", problem.path), []).append(problem)
    groups = list(alike.values())
    shown, more = first_of(groups, _LISTED)
    lines = []
    for group in shown:
        named, others = first_of(group)
        lines += [*map(str, named), *([f"{others} of {_NUMBER.sub('N', group[0].path)}"] if others else [])]
    hidden = sum(map(len, groups[len(shown) :]))
    return [*lines, *([f"and {hidden:,} more"] if more else [])]


def short(value: Any, limit: int = 60) -> str:
    """A value as a recipe writes it, shortened to ``limit`` characters, without secrets in URLs."""
    if isinstance(value, str):
        value = redact_value(value[:_SCANNED])
    return _shortened(repr(list(value) if isinstance(value, tuple) else value), limit)


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


_MOST_VALUES = 100_000
_DEEPEST_VALUE = 32
_LONGEST_TEXT = 10_000  # characters of a text; paths of file systems end at 4,096 bytes
_MOST_BITS = 63  # more do not fit into the signed integers of torch and numpy
_PATHS_WITH_HOME = (
    # Paths of which ~ is filled in here. Those of texts and tokenizers are recorded as they are written.
    *("run.dir", "run.compile_cache", "data.prepared_dir", "data.cache_dir", "checkpoint.local.dir"),
    *("checkpoint.init_from", "model.from", "model.hf_config", "evaluation.tasks."),
)

NO_SECRETS = (
    "Remove that part; credentials come from the environment (docs/data.md). Where a server asks for more in the URL, "
    "fetch the file and give its path: the same text is the same data, and a run that has begun goes on."
)


def size_problem(value: Any) -> str | None:
    """Return the reason why a value is too large or too deep for a recipe; None if it is neither."""
    # A few lines of YAML can name a list a thousand times, and that list another: the count is of the values written
    # out, level by level, before anything else walks over them.
    count, level = 0, [value]
    for _ in range(_DEEPEST_VALUE):
        inner: list[Any] = []
        for value_here in level:
            if isinstance(value_here, Mapping):
                inner.extend(value_here.values())
            elif isinstance(value_here, list | tuple):
                inner.extend(value_here)
            if count + len(inner) > _MOST_VALUES:
                return f"there are more than {_MOST_VALUES:,} values in it."
        if not inner:
            return None
        count, level = count + len(inner), inner
    return f"it is nested more than {_DEEPEST_VALUE} levels deep."


def plain_content(content: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Replace every value that no field may hold, in sections of bounded size; return them and the problems."""
    problems: list[Problem] = []
    plain = _plain(content, "", problems)
    assert isinstance(plain, dict), "a mapping remains one"
    return plain, problems


def _plain(value: Any, path: str, problems: list[Problem]) -> Any:
    if isinstance(value, Mapping):
        plain = {}
        for key, inner in value.items():
            below = f"{path}.{key}" if path else str(key)
            # Keys too: names of sources and components are the user's.
            plain[_plain_text(str(key), below, problems)] = _plain(inner, below, problems)
        return plain
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{path}.{index}", problems) for index, inner in enumerate(value)]
    if isinstance(value, str):
        return _plain_text(value, path, problems)
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        digits = value.bit_length() * 1233 >> 12  # log10(2) = 1233 / 4096
        problems.append(Problem(path, f"no field takes a number of about {digits} digits.", "Use one below 2**63."))
        return 1
    if value is not None and not isinstance(value, bool | int | float):
        problems.append(Problem(path, f"a recipe holds numbers and texts, not a {type(value).__name__}."))
        return ""
    return value


def _plain_text(text: str, path: str, problems: list[Problem]) -> str:
    reason, remedy, plain = "", "", text
    if len(text) > _LONGEST_TEXT:
        reason, plain = f"a text of {len(text):,} characters; {_LONGEST_TEXT:,} are the most.", text[:_LONGEST_TEXT]
    elif "\0" in text:
        reason, plain = "no path or name holds a zero character.", text.replace("\0", "?")
    elif any("\ud800" <= char <= "\udfff" for char in text):
        reason = "invalid Unicode: an unpaired surrogate, or an undecodable byte."
        remedy, plain = "Write it in UTF-8; rename a file whose name is not.", text.encode(errors="replace").decode()
    elif (secret := find_secret(text)) is not None:
        reason = f"the URL holds {secret}, and recipes are copied into checkpoints and logs."
        remedy, plain = NO_SECRETS, redact_value(text)
    elif text.startswith("~") and path.startswith(_PATHS_WITH_HOME):
        # A shell leaves ~ in within a.b=~/c, and a file has no shell.
        plain = os.path.expanduser(text)  # noqa: PTH111 - pathlib raises if there is no such user
        if plain == text:
            reason, plain = "no user of this name has a home on this machine.", text.replace("~", "_", 1)
            remedy = "Write the path out; a file of that name is named with its folder."
    if reason:
        problems.append(Problem(path, reason, remedy, text, True))
    return plain
