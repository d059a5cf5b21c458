"""From a YAML file with includes, and overrides, to one plain mapping.

    file --include--> base files, merged first --> the file's own keys --> a.b=c overrides

Mappings merge key by key, everything else replaces. Relative includes start at the file that names them.
"""

import re
from collections.abc import Hashable, Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from hlat.config.errors import Problem, RecipeError


class _Loader(yaml.SafeLoader):
    """Safe YAML where 3e-4 is a number, as in YAML 1.2, and a key given twice is a mistake."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*\.?[\d_]*|\.[\d_]+)(?:[eE][-+]?\d+)$"),
    list("-+0123456789."),
)


def _mapping_without_duplicates(loader: _Loader, node: yaml.MappingNode) -> dict[Hashable, Any]:
    seen: set[str] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if not isinstance(key, str):
            problem = f"key {key!r} is not a name"
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands here twice", key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_duplicates)


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise RecipeError([Problem(source, f"is not valid YAML: {error}", "Correct that line.")]) from error


def find_recipe(name: str | Path) -> Path:
    """The recipe file of that path or, if there is none, the shipped recipe of that name.

    Raises:
        RecipeError: neither exists; the shipped names are listed.
    """
    path = Path(name)
    if path.is_file():
        return path
    shipped = {file.stem: file for file in _shipped_folder().glob("*.yaml")}
    if path.name == str(name) and path.stem in shipped:
        return shipped[path.stem]
    problem = Problem(str(name), "there is no such recipe file.", f"Shipped recipes: {', '.join(sorted(shipped))}.")
    raise RecipeError([problem])


def _shipped_folder() -> Path:
    """Inside the installed package, or beside the sources when hlat is installed in editable mode."""
    package = Path(str(files("hlat")))
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parents[1] / "recipes"


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``over`` on top of ``base``; mappings merge key by key, everything else replaces."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def read_file(path: Path, _including: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The mapping in a recipe file, with its includes merged in.

    Raises:
        RecipeError: unreadable, not YAML, not a mapping, or includes that form a circle.
    """
    here = path.resolve()
    if here in _including:
        circle = " -> ".join(str(p) for p in (*_including, here))
        raise RecipeError([Problem(str(path), f"includes form a circle: {circle}.", "Remove one of them.")])
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError([Problem(str(path), f"cannot be read: {error}.")]) from error
    content = _parse(text, str(path))
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise RecipeError(
            [Problem(str(path), "is not a mapping of sections.", "Start with 'run:', 'model:', 'data:'.")]
        )
    includes = content.pop("include", [])
    names = [includes] if isinstance(includes, str) else includes
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RecipeError([Problem("include", "is not a file name or a list of them.", "", includes, True)])
    base: dict[str, Any] = {}
    for name in names:
        base = merge(base, read_file(path.parent / name, (*_including, here)))
    return merge(base, content)


def apply_overrides(content: dict[str, Any], overrides: Iterable[str]) -> tuple[dict[str, Any], list[Problem]]:
    """``a.b=c`` overrides put into a copy of the mapping; values are YAML, list elements are named by number."""
    problems = []
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.split(".")
        if not equals or not all(keys):
            problems.append(
                Problem(override, "is not an override.", "Write section.field=value, as in training.steps=100.")
            )
            continue
        try:
            # An alias would mean nothing here, but a glob does: data.path=*.jsonl
            value = text if text.startswith("*") else _parse(text, override)
            content = _put(content, keys, value)
        except (RecipeError, LookupError, ValueError, TypeError) as error:
            problems.append(Problem(override, f"cannot be applied: {error}"))
    return content, problems


def _put(node: Any, keys: list[str], value: Any) -> Any:
    if not keys:
        return value
    head, *rest = keys
    if isinstance(node, list):
        index = int(head)
        if not 0 <= index < len(node):
            raise IndexError(f"there is no element {index}, the list has {len(node)}")
        return [*node[:index], _put(node[index], rest, value), *node[index + 1 :]]
    if node is None or isinstance(node, dict):
        mapping = node or {}
        return {**mapping, head: _put(mapping.get(head), rest, value)}
    raise TypeError(f"{node!r} is a value, it has no field {head!r}")
