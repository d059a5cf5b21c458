"""Checks of every value of a recipe, whatever its field: plain, of bounded size, without secrets.

    mapping, as read --plain_content--> the same mapping with every refused value replaced, problems

One walk over the whole tree looks at every string, so that no field can be forgotten: not the path of a tokenizer, nor
one that a later version adds.
"""

import os
from collections.abc import Mapping
from typing import Any

from hlat.config.errors import Problem
from hlat.runtime.urls import find_secret, redact_value

_MOST_VALUES = 100_000
_DEEPEST = 32
_LONGEST = 10_000  # characters of a text; paths of file systems end at 4,096 bytes
_BITS = 63
_FILLED = (
    # Paths of which ~ is filled in here. Those of texts and tokenizers are recorded as they are written.
    *("run.dir", "run.compile_cache", "data.prepared_dir", "data.cache_dir", "checkpoint.local.dir"),
    *("checkpoint.init_from", "model.from", "model.hf_config", "evaluation.tasks."),
)

NO_SECRETS = (
    "Remove that part; credentials come from the environment (docs/data.md). Where a server asks for more in the URL, "
    "fetch the file and give its path: the same text is the same data, and a run that has begun goes on."
)


def size_problem(value: Any) -> str | None:
    """The reason why a value is too large or too deep for a recipe; None if it is neither.

    A few lines of YAML can name a list a thousand times, and that list another: the count is of the values written out.
    Call this before anything else walks over a value.
    """
    count, level = 0, [value]
    for _ in range(_DEEPEST):
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
    return f"it is nested more than {_DEEPEST} levels deep."


def plain_content(content: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Replace every value that no field may hold; return the sections and the problems.

    Args:
        content: sections of bounded size (see ``size_problem``).
    """
    problems: list[Problem] = []
    plain = _plain(content, "", problems)
    assert isinstance(plain, dict), "a mapping remains one"
    return plain, problems


def _plain(value: Any, path: str, problems: list[Problem]) -> Any:
    if isinstance(value, Mapping):
        plain = {}
        for key, inner in value.items():
            below = f"{path}.{key}" if path else str(key)
            plain[_plain_text(str(key), below, problems)] = _plain(inner, below, problems)
        return plain
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{path}.{index}", problems) for index, inner in enumerate(value)]
    if isinstance(value, str):
        return _plain_text(value, path, problems)
    if isinstance(value, int) and value.bit_length() > _BITS:
        digits = value.bit_length() * 1233 >> 12  # log10(2) = 1233 / 4096
        problems.append(Problem(path, f"no field takes a number of about {digits} digits.", "Use one below 2**63."))
        return 1
    if value is not None and not isinstance(value, bool | int | float):
        problems.append(Problem(path, f"a recipe holds numbers and texts, not a {type(value).__name__}."))
        return ""
    return value


def _plain_text(text: str, path: str, problems: list[Problem]) -> str:
    if len(text) > _LONGEST:
        problems.append(
            Problem(path, f"a text of {len(text):,} characters; {_LONGEST:,} are the most.", "", text, True)
        )
        return text[:_LONGEST]
    if "\0" in text:
        problems.append(Problem(path, "no path or name holds a zero character.", "", text, True))
        return text.replace("\0", "?")
    if any("\ud800" <= char <= "\udfff" for char in text):
        remedy = "Write it in UTF-8; rename a file whose name is not."
        problems.append(
            Problem(path, "invalid Unicode: an unpaired surrogate, or an undecodable byte.", remedy, text, True)
        )
        return text.encode(errors="replace").decode()
    if (secret := find_secret(text)) is not None:
        reason = f"the URL holds {secret}, and recipes are copied into checkpoints and logs."
        problems.append(Problem(path, reason, NO_SECRETS, text, True))
        return redact_value(text)
    return _fill_home(text, path, problems) if text.startswith("~") and path.startswith(_FILLED) else text


def _fill_home(text: str, path: str, problems: list[Problem]) -> str:
    """Replace ~: a shell leaves it in within a.b=~/c, and a file has no shell."""
    filled = os.path.expanduser(text)  # noqa: PTH111 - pathlib raises if there is no such user
    if filled == text:
        remedy = "Write the path out; a file of that name is named with its folder."
        problems.append(Problem(path, "no user of this name has a home on this machine.", remedy, text, True))
        return text.replace("~", "_", 1)
    return filled
