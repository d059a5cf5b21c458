"""Every private name of PyTorch that hlat uses is listed, exists in this release, and is used."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packaging.version import Version

import hlat
from hlat.runtime.backend import torch_private
from hlat.runtime.backend.torch_private import TESTED_RELEASES as TESTED_TORCH
from hlat.runtime.backend.torch_private import untested_torch_warning
from tests.support.runtime.torch_names import COMPILED_NAMES, FIRST_RELEASE, PRIVATE_NAMES

SOURCES = Path(hlat.__file__).parent
# Names of Python's standard library that are documented although they begin with an underscore.
PYTHONS_OWN = {"_exit", "_replace", "_make", "_current_frames", "_fields", "_asdict"}


def resolve(name: str) -> None:
    """Find a name in torch; instance attributes are searched in the source of their class."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            holder = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        break
    for part in parts[length:]:
        if not hasattr(holder, part) and part == parts[-1] and inspect.isclass(holder):
            assert re.search(rf"\bself\.{part}\b", inspect.getsource(holder)), name
            return
        holder = getattr(holder, part)


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_a_private_name_exists_from_its_first_release(name: str) -> None:
    if Version(torch.__version__) >= Version(FIRST_RELEASE.get(name, "2.11")):
        resolve(name)
    else:
        with pytest.raises((AttributeError, AssertionError)):
            resolve(name)


def test_a_missing_name_is_detected() -> None:
    for name in ("torch._no_such_kernel", "torch._no_such_module.name", "torch.nn.Module._no_such_hooks"):
        with pytest.raises((AttributeError, AssertionError)):
            resolve(name)


def test_compiled_functions_have_the_listed_attributes() -> None:
    assert all(hasattr(torch.compile(lambda x: x), name) for name in COMPILED_NAMES)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def own_names(trees: list[ast.Module]) -> set[str]:
    """Names that hlat itself defines: functions, classes, attributes, variables, arguments."""
    own: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.arg):
            own.add(node.arg)
    return own


def foreign(tree: ast.Module, own: set[str]) -> Iterator[tuple[str, int]]:
    """Private names in a module that hlat does not define, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            yield from imported(node)
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own | PYTHONS_OWN:
            if ast.unparse(node) != "torch._C":  # its attributes are listed
                yield ast.unparse(node), node.lineno
        elif isinstance(node, ast.Call) and is_by_string(node.func):
            strings = [string.value for string in node.args[1:2] if isinstance(string, ast.Constant)]
            yield from (
                (str(string), node.lineno) for string in strings if is_private(str(string)) and string not in own
            )
        elif isinstance(node, ast.ClassDef):
            yield from inherited(node, tree)


BY_STRING = ("getattr", "hasattr", "setattr", "patch.object")


def is_by_string(function: ast.expr) -> bool:
    # Writing every call as text takes seconds: first by the last part of its name.
    last = getattr(function, "attr", "") or getattr(function, "id", "")
    return last.endswith(("attr", "object")) and ast.unparse(function).endswith(BY_STRING)


def imported(node: ast.ImportFrom | ast.Import) -> Iterator[tuple[str, int]]:
    head = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    for name in (head + alias.name for alias in node.names):
        if name.startswith("torch.") and any(map(is_private, name.split("."))):
            yield name, node.lineno


def inherited(node: ast.ClassDef, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Private methods that a subclass of a torch class calls on its base class."""
    imports = [
        statement
        for statement in ast.walk(tree)
        if isinstance(statement, ast.ImportFrom) and (statement.module or "")[:5] == "torch"
    ]
    of_torch = {alias.asname or alias.name for statement in imports for alias in statement.names}
    if any(ast.unparse(base) in of_torch for base in node.bases):
        for call in (inner for inner in ast.walk(node) if isinstance(inner, ast.Call)):
            name = ast.unparse(call.func)
            if name.startswith("super().") and is_private(name.removeprefix("super().")):
                yield name, call.lineno


def test_all_private_names_in_use_are_listed() -> None:
    files = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCES.rglob("*.py"))}
    own = own_names(list(files.values()))
    known = {name.rpartition(".")[2] for name in PRIVATE_NAMES} | set(COMPILED_NAMES)
    unknown = [
        f"{path.relative_to(SOURCES)}:{line}: {name}"
        for path, tree in files.items()
        for name, line in foreign(tree, own)
        if name.rpartition(".")[2] not in known
    ]
    assert not unknown, f"list them in tests/support/runtime/torch_names.py with their purpose: {unknown}"


def test_every_listed_name_is_used() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.py"))
    names = [*(name.rpartition(".")[2] for name in PRIVATE_NAMES), *COMPILED_NAMES]
    assert not [name for name in names if name not in text]


def test_the_search_finds_every_kind_of_use() -> None:
    """The search finds private names in each way in which they can occur in the code."""
    text = """
import torch
from torch._dynamo import reset
from torch.nn import Module
class Own(Module):
    def _named_members(self):
        return super()._named_members()
    def hooks(self):
        return self._backward_hooks, torch._assert_async, getattr(self, "_modules"), torch.ops.aten._softmax
"""
    tree = ast.parse(text)
    found = {name for name, _ in foreign(tree, own_names([tree]))}
    assert found == {
        "torch._dynamo.reset", "super()._named_members", "self._backward_hooks", "torch._assert_async", "_modules",
        "torch.ops.aten._softmax",
    }  # fmt: skip


def test_an_untested_release_gives_a_warning_and_no_error() -> None:
    assert torch.__version__.startswith(TESTED_TORCH), "the release that the tests run with"
    assert untested_torch_warning() == untested_torch_warning("2.13.1+cu130") == ""
    for installed in ("2.12.1", "2.15.0+cpu", "3.0.0.dev20270101", "2.130.0"):
        assert installed in untested_torch_warning(installed) and "2.13" in untested_torch_warning(installed)


def test_releases_before_2_13_cannot_split_backward_passes() -> None:
    for release in ("2.11", "2.12"):
        assert release in torch_private.split_backward_problem(f"{release}.1+cu130")
    assert not any(map(torch_private.split_backward_problem, ("2.13.0+cpu", "2.14.1", "2.110.0", "2.120.0")))


def test_the_warning_is_printed_once_at_the_start(tmp_path: Path) -> None:
    """Every verb prints the warning on standard error before anything else; a tested release prints nothing."""
    program = """
import sys, importlib.metadata as metadata
real = metadata.version
metadata.version = lambda name: "2.99.0" if name == "torch" and {pretend} else real(name)
from hlat.command import main
sys.argv = ["hlat", "checkpoint", "list", sys.argv[1]]
main()
"""
    (tmp_path / "checkpoints").mkdir()
    printed = {}
    for pretend in (True, False):
        command = [sys.executable, "-c", program.format(pretend=pretend), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        printed[pretend] = done.stderr
    assert printed[True].count("PyTorch 2.99.0 is installed; hlat was tested with 2.11, 2.13 and 2.14 only") == 1
    assert printed[False] == ""
