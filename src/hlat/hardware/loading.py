"""Loading of the hardware catalog: the shipped files, and a user's file on top.

    catalog.yaml + instances.yaml -----------+--> Catalog
    a user's file, if given -----------------+    (its entries replace shipped ones of the same name)

A user's file has the same three sections, ``sources``, ``chips`` and ``instances``; each is optional.
"""

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from hlat.config import load_yaml, short, size_problem
from hlat.hardware.catalog import Catalog, Chip
from hlat.runtime.errors import HardwareError
from hlat.runtime.storage.small_files import read_small_file
from hlat.runtime.terminal_text import escape_name

_GPU_FOLDER = Path("/proc/driver/nvidia/gpus")
_SECTIONS = ("chips", "instances")
_MAX_LISTED = 20  # mistakes listed in a message
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # 7 times as fast; not in every build of PyYAML


@cache
def load_catalog(user_file: str | None = None) -> Catalog:
    """Load the catalog of chips and instances.

    Args:
        user_file: a file with more entries; those of the same name replace shipped ones.

    Raises:
        HardwareError: the user's file cannot be read or is inconsistent; lists each mistake.
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
        section = yaml.load(files("hlat.hardware").joinpath(name).read_text(encoding="utf-8"), _LOADER)
        content["sources"] |= section.pop("sources")
        content |= section
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
        raise HardwareError(
            f"{path}: chips and instances are lists, as in `instances: [{{name: mybox, ...}}]`; sources is a mapping "
            "of names to publications; `hlat hardware show p5.48xlarge` shows the fields of an instance"
        )
    return content


def _merged(shipped: dict[str, Any], user: dict[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {"sources": shipped["sources"] | user.get("sources", {})}
    for section in _SECTIONS:
        added = user.get(section, [])
        names = [entry.get("name") for entry in added if isinstance(entry, dict)]
        merged[section] = [entry for entry in shipped[section] if entry["name"] not in names] + added
    return merged


def _mistakes(error: ValidationError, content: dict[str, Any]) -> str:
    """Message for each mistake, with the entry's name instead of its index."""
    lines = []
    for mistake in error.errors():
        location = list(mistake["loc"])
        if len(location) > 1 and location[0] in _SECTIONS and isinstance(location[1], int):
            entry = content[str(location[0])][location[1]]
            location[1] = entry.get("name", location[1]) if isinstance(entry, dict) else location[1]
        value = short(mistake["input"]) if isinstance(mistake["input"], str | int | float) else ""
        lines.append(f"{escape_name('.'.join(map(str, location)))} {value}: {mistake['msg']}".strip())
    more = f"; and {len(lines) - _MAX_LISTED:,} more" if len(lines) > _MAX_LISTED else ""
    return "; ".join(lines[:_MAX_LISTED]) + more


def installed_chip(catalog: Catalog) -> Chip | None:
    """Return the first GPU that NVIDIA's driver lists here, without starting it; None if none is known."""
    for file in sorted(_GPU_FOLDER.glob("*/information")):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2] for line in lines if line.startswith("Model:")]
        return catalog.chip_by_torch_name(names[0].strip()) if names else None
    return None
