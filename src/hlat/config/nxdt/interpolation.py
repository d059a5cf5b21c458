"""Interpolations of OmegaConf in a configuration: ``${a.b}`` from the root, ``${.b}`` from the same section."""

import re
from collections.abc import Mapping
from typing import Any

_REFERENCE = re.compile(r"\$\{(?P<dots>\.*)(?P<path>\w+(?:\.\w+)*)\}")
_DEEPEST = 16  # references to references


def resolve(content: Mapping[str, Any]) -> dict[str, Any]:
    """Replace values that consist of one reference by what they refer to; others, and unresolvable ones, are kept."""
    return _resolved(content, content, ())


def _resolved(node: Mapping[str, Any], root: Mapping[str, Any], place: tuple[str, ...]) -> dict[str, Any]:
    return {
        key: _resolved(value, root, (*place, key)) if isinstance(value, Mapping) else _value(value, root, place, 0)
        for key, value in node.items()
    }


def _value(value: Any, root: Mapping[str, Any], place: tuple[str, ...], depth: int) -> Any:
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if match is None or depth == _DEEPEST:
        return value
    up = len(match["dots"])  # one dot means the section itself, two its parent
    start = place[: len(place) - up + 1] if up else ()
    path = (*start, *match["path"].split("."))
    found: Any = root
    for name in path:
        if not isinstance(found, Mapping) or name not in found:
            return value
        found = found[name]
    return _value(found, root, path[:-1], depth + 1)
