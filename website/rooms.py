"""Lists of docs/architecture.md: rooms with their purpose, their order, and the layers of modules in each.

first sentence of __init__.py of rooms and wings ---> table of rooms
layers of import-linter, pyproject.toml ---> order of the rooms, layers of modules --> between two marks of the page

python -m website.rooms     writes the lists again; tests/structure/test_rooms.py holds the page against the code
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
_SOURCE = ROOT / "src"
_LIST = re.compile(r"(<!-- (\w+): written by python -m website\.rooms -->\n).*?(<!-- end -->)", re.DOTALL)


def page_with_lists(page: str) -> str:
    """Return the page with its three lists as the code has them now."""
    lists = {"rooms": _rooms, "order": _order, "layers": _layers}
    return _LIST.sub(lambda match: "\n".join((match[1], *lists[match[2]](), "", match[3])), page)


def contracts() -> Iterator[tuple[str, list[str]]]:
    """Each contract of layers: (package whose modules it orders, layers from top to bottom)."""
    tables: Any = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for contract in tables["tool"]["importlinter"]["contracts"]:
        yield contract.get("containers", ["hlat"])[0], contract["layers"]


def _rooms() -> Iterator[str]:
    yield from ("| room | purpose | wings |", "|---|---|---|")
    for layer in dict(contracts())["hlat"]:
        for room in layer.replace("hlat.", "").split(" | "):
            folder = _SOURCE / "hlat" / room
            wings = (f"`{path.parent.name}`: {_purpose(path)}" for path in _wings(folder))
            door = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
            yield f"| `{room}` | {_purpose(door)} | {'<br>'.join(wings)} |"


def _order() -> Iterator[str]:
    for layer in dict(contracts())["hlat"]:
        yield "    " + layer.replace("hlat.", "")


def _layers() -> Iterator[str]:
    yield from ("| room | its modules and **wings**, from top to bottom |", "|---|---|")
    for package, layers in contracts():
        if package != "hlat":
            marked = (", ".join(_marked(package, name) for name in re.split(r" [|:] ", layer)) for layer in layers)
            yield f"| `{package.removeprefix('hlat.')}` | {'; '.join(marked)} |"


def _wings(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/__init__.py"))


def _marked(package: str, name: str) -> str:
    return f"**{name}**" if (_SOURCE / package.replace(".", "/") / name).is_dir() else name


def _purpose(file: Path) -> str:
    """First paragraph of a module's docstring, up to the first diagram."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        raise SystemExit(__doc__)
    PAGE.write_text(page_with_lists(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
