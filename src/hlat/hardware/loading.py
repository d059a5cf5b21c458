"""From files to a catalog: the one that ships with hlat, and a user's own on top of it.

    catalog.yaml + instances.yaml --+--> Catalog
    a user's file, if there is one -+    (entries of the same name replace ours)

A user's file has the same three sections, ``sources``, ``chips`` and ``instances``, each of which may be missing.
"""

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from hlat.config import short, size_problem
from hlat.config.files import load_yaml
from hlat.hardware.catalog import Catalog
from hlat.runtime import HardwareError, escape_name
from hlat.runtime.storage import read_small_file

_SECTIONS = ("chips", "instances")
_NAMED = 20  # mistakes that a message lists


@cache
def load_catalog(user_file: str | None = None) -> Catalog:
    """All chips and instances that are known.

    Args:
        user_file: a file with more of them; entries of the same name replace those that ship with hlat.

    Raises:
        HardwareError: the user's file cannot be read or does not hold together; says each mistake.
    """
    content = _shipped()
    if user_file is not None:
        content = _merged(content, _read(Path(user_file)))
    try:
        return Catalog.model_validate(content)
    except ValidationError as error:
        raise HardwareError(f"{user_file}: {_mistakes(error, content)}") from error


def _shipped() -> dict[str, Any]:
    content: dict[str, Any] = {"sources": {}}
    for name in ("catalog.yaml", "instances.yaml"):
        part = yaml.safe_load(files("hlat.hardware").joinpath(name).read_text(encoding="utf-8"))
        content["sources"] |= part.pop("sources")
        content |= part
    return content


def _read(path: Path) -> dict[str, Any]:
    try:
        content = load_yaml(read_small_file(path))
    except (OSError, ValueError) as error:
        raise HardwareError(f"{path} cannot be read as YAML: {error}") from error
    if (too_large := size_problem(content)) is not None:
        raise HardwareError(f"{path}: {too_large}")
    if not isinstance(content, dict) or not content.keys() <= {"sources", *_SECTIONS}:
        raise HardwareError(f"{path}: a catalog is a mapping with the sections sources, chips, instances")
    wrong = [name for name in _SECTIONS if not isinstance(content.get(name, []), list)]
    if wrong or not isinstance(content.get("sources", {}), dict):
        raise HardwareError(f"{path}: chips and instances are lists, sources is a mapping of names to publications")
    return content


def _merged(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {"sources": ours["sources"] | theirs.get("sources", {})}
    for section in _SECTIONS:
        added = theirs.get(section, [])
        names = [one.get("name") for one in added if isinstance(one, dict)]
        merged[section] = [one for one in ours[section] if one["name"] not in names] + added
    return merged


def _mistakes(error: ValidationError, content: dict[str, Any]) -> str:
    """Each mistake by the entry's name instead of its number."""
    lines = []
    for mistake in error.errors():
        place = list(mistake["loc"])
        if len(place) > 1 and place[0] in _SECTIONS and isinstance(place[1], int):
            entry = content[str(place[0])][place[1]]
            place[1] = entry.get("name", place[1]) if isinstance(entry, dict) else place[1]
        value = short(mistake["input"]) if isinstance(mistake["input"], str | int | float) else ""
        lines.append(f"{escape_name('.'.join(map(str, place)))} {value}: {mistake['msg']}".strip())
    more = f"; and {len(lines) - _NAMED:,} more" if len(lines) > _NAMED else ""
    return "; ".join(lines[:_NAMED]) + more
