"""Rooms and wings (docs/architecture.md): imports go through doors, a name has one door, both are small."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import hlat

ROOT = Path(hlat.__file__).parent
MOST_FILES = 15
MOST_NAMES = 39


def module_of(file: Path) -> tuple[str, ...]:
    """Dotted name of a source file, as a tuple."""
    parts = ("hlat", *file.relative_to(ROOT).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def is_module(name: tuple[str, ...]) -> bool:
    """True if a file of this name exists."""
    return ROOT.joinpath(*name[1:]).with_suffix(".py").is_file()


def imports(file: Path) -> Iterator[tuple[ast.ImportFrom, tuple[str, ...], str]]:
    """Every ``from hlat... import name`` of a file, inside functions too: (statement, module, name)."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "hlat":
            for alias in node.names:
                yield node, tuple(node.module.split(".")), alias.name


def sources() -> list[Path]:
    """All source files."""
    return sorted(ROOT.rglob("*.py"))


def doors() -> dict[str, list[str]]:
    """The names that each ``__init__.py`` exports."""
    found = {}
    for file in sources():
        if file.name == "__init__.py":
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                    found[".".join(module_of(file))] = ast.literal_eval(node.value)
    return found


def test_another_folder_is_imported_from_through_its_door():
    wrong = []
    for file in sources():
        importer = module_of(file)
        folder = importer if file.name == "__init__.py" else importer[:-1]
        for node, module, _ in imports(file):
            above = (
                module[:-1] == folder[: len(module) - 1]
            )  # a file of this folder, or of one that this folder lies in
            if is_module(module) and len(module) > 2 and not above:
                wrong.append(f"{file.relative_to(ROOT)}:{node.lineno}: from {'.'.join(module)}")
    assert not wrong, "import from the door (the __init__ of the folder) instead:\n" + "\n".join(wrong)


def test_what_is_imported_from_a_door_is_exported_by_it():
    """A door that imports on first use answers for any name, so that mypy sees no mistake."""
    exported = {(tuple(door.split(".")), name) for door, names in doors().items() for name in names}
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {'.'.join(module)} has no {name}"
        for file in sources()
        for node, module, name in imports(file)
        if not is_module(module) and not is_module((*module, name)) and (module, name) not in exported
        if not ROOT.joinpath(*module[1:], name, "__init__.py").is_file()
    ]
    assert not wrong, "\n".join(wrong)


def test_a_name_has_one_door():
    homes = defaultdict(list)
    for door, names in doors().items():
        for name in names if door != "hlat.api" else ():  # the API names its functions as the rooms do
            homes[name].append(door)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_a_door_has_fewer_than_forty_names():
    assert {door: len(names) for door, names in doors().items() if len(names) > MOST_NAMES} == {}


def test_a_door_exports_what_other_folders_import_and_nothing_else():
    project = ROOT.parents[1]
    users = [*sources(), *(project / "tests").rglob("*.py"), *(project / "benchmarks").glob("*.py")]
    used = {(module, name) for file in users for _, module, name in imports(file) if not is_module(module)}
    exported = {(tuple(door.split(".")), name) for door, names in doors().items() for name in names}
    public = {("hlat",)}  # for people who import hlat
    assert sorted((".".join(door), name) for door, name in exported - used if door not in public) == []


def test_a_folder_has_no_more_than_fifteen_files():
    count = defaultdict(int)
    for file in (*sources(), *Path(__file__).parents[1].rglob("*.py")):
        count[file.parent] += 1
    assert {str(folder): number for folder, number in count.items() if number > MOST_FILES} == {}
