"""Every private name of PyTorch that hlat uses is on one list, is there in this release, and is used."""

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

import hlat
from hlat.runtime.backend import untested_torch_warning
from hlat.runtime.backend.torch_private import COMPILED_NAMES, PRIVATE_NAMES
from hlat.runtime.backend.torch_private import TESTED_RELEASES as TESTED_TORCH

SOURCES = Path(hlat.__file__).parent
LIST = SOURCES / "runtime" / "torch_private.py"
# Private by their underscore, and documented all the same: of Python's standard library.
OF_PYTHON = {"_exit", "_replace", "_make", "_current_frames", "_fields", "_asdict"}


def resolve(name: str) -> None:
    """Find a name in torch; one that instances get in __init__, or declare, counts by the source of their class."""
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
def test_a_private_name_is_there(name: str) -> None:
    resolve(name)


def test_a_name_that_is_gone_is_noticed() -> None:
    for name in ("torch._no_such_kernel", "torch._no_such_module.name", "torch.nn.Module._no_such_hooks"):
        with pytest.raises((AttributeError, AssertionError)):
            resolve(name)


def test_what_is_compiled_has_its_attribute() -> None:
    assert all(hasattr(torch.compile(lambda x: x), name) for name in COMPILED_NAMES)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def own_names(trees: list[ast.Module]) -> set[str]:
    """What hlat itself defines: functions, classes, attributes, variables, arguments."""
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
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own | OF_PYTHON:
            if ast.unparse(node) != "torch._C":  # what is asked of it is listed
                yield ast.unparse(node), node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(WITH_WORDS):
            words = [word.value for word in node.args[1:2] if isinstance(word, ast.Constant)]
            yield from ((str(word), node.lineno) for word in words if is_private(str(word)) and word not in own)
        elif isinstance(node, ast.ClassDef):
            yield from inherited(node, tree)


WITH_WORDS = ("getattr", "hasattr", "setattr", "patch.object")


def imported(node: ast.ImportFrom | ast.Import) -> Iterator[tuple[str, int]]:
    head = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    for name in (head + alias.name for alias in node.names):
        if name.startswith("torch.") and any(map(is_private, name.split("."))):
            yield name, node.lineno


def inherited(node: ast.ClassDef, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """What a subclass of one of torch's classes overrides, and calls in it."""
    imports = [one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom) and (one.module or "")[:5] == "torch"]
    of_torch = {alias.asname or alias.name for one in imports for alias in one.names}
    if any(ast.unparse(base) in of_torch for base in node.bases):
        for call in (inner for inner in ast.walk(node) if isinstance(inner, ast.Call)):
            name = ast.unparse(call.func)
            if name.startswith("super().") and is_private(name.removeprefix("super().")):
                yield name, call.lineno


def test_no_private_name_is_used_that_is_not_on_the_list() -> None:
    files = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCES.rglob("*.py"))}
    own = own_names([tree for path, tree in files.items() if path != LIST])
    known = {name.rpartition(".")[2] for name in PRIVATE_NAMES} | set(COMPILED_NAMES)
    unknown = [
        f"{path.relative_to(SOURCES)}:{line}: {name}"
        for path, tree in files.items()
        if path != LIST
        for name, line in foreign(tree, own)
        if name.rpartition(".")[2] not in known
    ]
    assert not unknown, f"list them in {LIST.name}, with what they are for: {unknown}"


def test_every_name_on_the_list_is_used() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.py") if path != LIST)
    names = [*(name.rpartition(".")[2] for name in PRIVATE_NAMES), *COMPILED_NAMES]
    assert not [name for name in names if name not in text]


def test_the_search_finds_what_it_looks_for() -> None:
    """The instrument works, for each way in which a private name can come into the code."""
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


def test_another_release_is_named_and_not_refused() -> None:
    assert torch.__version__.startswith(TESTED_TORCH), "the release that the tests run with"
    assert untested_torch_warning() == untested_torch_warning("2.13.1+cu130") == ""
    for installed in ("2.12.1", "2.14.0+cpu", "3.0.0.dev20270101", "2.130.0"):
        assert installed in untested_torch_warning(installed) and "2.13" in untested_torch_warning(installed)


def test_the_line_is_said_once_at_the_start(tmp_path: Path) -> None:
    """By every verb, on standard error, before anything else; by a release that was tested, not a word."""
    program = """
import sys, importlib.metadata as metadata
real = metadata.version
metadata.version = lambda name: "2.99.0" if name == "torch" and {pretend} else real(name)
from hlat.command import main
sys.argv = ["hlat", "checkpoint", "list", sys.argv[1]]
main()
"""
    (tmp_path / "checkpoints").mkdir()
    said = {}
    for pretend in (True, False):
        command = [sys.executable, "-c", program.format(pretend=pretend), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        said[pretend] = done.stderr
    assert said[True].count("PyTorch 2.99.0 is installed; hlat was tested with 2.13 only") == 1
    assert said[False] == ""
