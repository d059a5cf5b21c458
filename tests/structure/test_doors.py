"""Rooms and wings (docs/architecture.md): a room has one door, what it hands on is used, folders are small."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import hlat
from hlat.checkpoint import protocol
from hlat.checkpoint.protocol.reader import open_checkpoint, resolve
from hlat.config import Section, sections
from hlat.data import tokenizers
from hlat.data.tokenizers.load import load_tokenizer

ROOT = Path(hlat.__file__).parent
PROJECT = ROOT.parents[1]
MOST_FILES = 15
MOST_NAMES = 80
"""Names of a door. The largest is that of model: every room that shards, counts or stores parameters asks it."""
OPEN_ROOMS = {"runtime"}
"""Rooms whose modules are imported by name: runtime is the standard library of the house."""


def module_of(file: Path) -> str:
    """Dotted name of a source file."""
    parts = ("hlat", *file.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> list[Path]:
    """All source files."""
    return sorted(ROOT.rglob("*.py"))


@cache
def imports(file: Path) -> list[tuple[int, str, str]]:
    """Every ``from hlat... import name`` of a file, inside functions too: (line, module, name)."""
    return [
        (node.lineno, node.module, alias.name)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and not node.level and node.module and node.module.split(".")[0] == "hlat"
        for alias in node.names
    ]


def is_module(name: str) -> bool:
    """True if a module or a folder has this name."""
    path = ROOT.joinpath(*name.split(".")[1:])
    return path.with_suffix(".py").is_file() or path.is_dir()


def room_of(module: str) -> str:
    """Room of a module; "" for the package itself."""
    return module.split(".")[1] if "." in module else ""


@cache
def defined_names(file: Path) -> set[str]:
    """Names that a file binds at its top level, other than by importing them from hlat."""
    names: set[str] = set()
    bodies = [ast.parse(file.read_text()).body]
    while bodies:
        for node in bodies.pop():
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
            elif isinstance(node, (ast.If, ast.Try, ast.With)):
                bodies += [node.body, getattr(node, "orelse", []), *[h.body for h in getattr(node, "handlers", [])]]
    return names


@cache
def doors() -> dict[str, dict[str, str]]:
    """Rooms that hand names on -> name -> module, as ``lazily`` is told."""
    found = {}
    for file in ROOT.glob("*/__init__.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "lazily":
                table = ast.literal_eval(node.args[1])
                found[module_of(file)] = {
                    name: f"{module_of(file)}.{module}" for module, names in table.items() for name in names.split()
                }
    return found


def test_another_room_is_imported_from_through_its_door():
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: from {module} import {name}"
        for file in sources()
        for line, module, name in imports(file)
        if module.count(".") > 1 and room_of(module) not in {room_of(module_of(file)), *OPEN_ROOMS}
    ]
    assert not wrong, "import from the door (the __init__ of the room) instead:\n" + "\n".join(wrong)


def test_within_a_room_a_name_is_imported_from_where_it_is_defined():
    files = {module_of(file): file for file in sources()}
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: from {module} import {name}"
        for file in sources()
        for line, module, name in imports(file)
        if room_of(module) in {room_of(module_of(file)), *OPEN_ROOMS} - {""}
        if not is_module(f"{module}.{name}") and name not in defined_names(files[module])
        if (name, file.name) != ("*", "__init__.py")
    ]
    assert not wrong, "\n".join(wrong)


def test_a_door_hands_on_what_its_modules_define():
    """Type checkers read the same modules: by name, or all names of a module, which the table chooses from."""
    files = {module_of(file): file for file in sources()}
    for door, homes in doors().items():
        own = [(name, module) for _, module, name in imports(files[door]) if room_of(module) == room_of(door)]
        whole = {module for name, module in own if name == "*"}
        typed = dict(each for each in own if each[0] != "*") | {n: m for n, m in homes.items() if m in whole}
        assert typed == homes and whole <= set(homes.values()), door
        assert [name for name, module in homes.items() if name not in defined_names(files[module])] == [], door


def test_what_is_imported_from_a_door_is_handed_on_by_it():
    """A door that imports on first use answers for any name, so that mypy sees no mistake."""
    homes = doors()
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {module} has no {name}"
        for file in sources()
        for line, module, name in imports(file)
        if module in homes and name not in homes[module] and not is_module(f"{module}.{name}")
    ]
    assert not wrong, "\n".join(wrong)


def test_a_name_has_one_door():
    found = defaultdict(list)
    for door, names in doors().items():
        for name in names if door != "hlat.api" else ():  # the API names its functions as the rooms do
            found[name].append(door)
    assert {name: found for name, found in found.items() if len(found) > 1} == {}


def test_a_door_has_few_names():
    assert {door: len(names) for door, names in doors().items() if len(names) > MOST_NAMES} == {}


def test_a_door_hands_on_what_others_import_and_nothing_else():
    users = [*sources(), *(f for folder in ("tests", "benchmarks") for f in (PROJECT / folder).rglob("*.py"))]
    used = {
        (module, name)
        for file in users
        for _, module, name in imports(file)
        if file.name != "__init__.py" or room_of(module_of(file) if ROOT in file.parents else "") != room_of(module)
    }
    unused = [(door, name) for door, names in doors().items() for name in names if (door, name) not in used]
    assert unused == []


def test_names_that_scripts_of_users_import_from_a_wing_are_there():
    assert (protocol.open_checkpoint, protocol.resolve) == (open_checkpoint, resolve)
    assert tokenizers.load_tokenizer is load_tokenizer and sections.Section is Section


def test_a_folder_has_two_to_fifteen_files():
    count: dict[Path, int] = defaultdict(int)
    for file in (*sources(), *(PROJECT / "tests").rglob("*.py")):
        count[file.parent] += 1
    assert {str(folder): number for folder, number in count.items() if number > MOST_FILES} == {}
    lonely = [f for f, number in count.items() if ROOT in f.parents and number < 3 and not any(f.glob("*/*.py"))]
    assert lonely == [], "a folder with a single file: move the file up"
