"""Differences of newer Pythons from 3.11, read from the syntax trees of all files.

3.14 starts processes by another method unless one is named, and warns of a jump out of ``finally``, which hides errors.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STARTING = {"Process", "Pool", "Manager", "Queue", "SimpleQueue", "JoinableQueue"}


def last_name(node: ast.AST) -> str:
    """The last part of a dotted name; writing all calls of all files as text takes seconds."""
    return getattr(node, "attr", "") or getattr(node, "id", "")


def started_without_a_method(tree: ast.AST) -> Iterator[ast.AST]:
    """Processes of ``multiprocessing`` itself, not of a context; executors without a context."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "multiprocessing":
            if STARTING & {name.name for name in node.names}:
                yield node
        elif isinstance(node, ast.Call) and last_name(node.func) in {*STARTING, "ProcessPoolExecutor"}:
            called = ast.unparse(node.func)
            has_context = len(node.args) > 1 or "mp_context" in {word.arg for word in node.keywords}
            started = called in {f"multiprocessing.{name}" for name in STARTING}
            if started or (called == "ProcessPoolExecutor" and not has_context):
                yield node


def jumps_out_of_finally(tree: ast.AST) -> Iterator[ast.AST]:
    """``return``, ``break`` and ``continue`` that leave a ``finally`` block."""
    for node in ast.walk(tree):
        pending = list(node.finalbody) if isinstance(node, ast.Try | ast.TryStar) else []
        while pending:
            inner = pending.pop()
            if isinstance(inner, ast.Return | ast.Break | ast.Continue):
                yield inner
            if not isinstance(inner, ast.FunctionDef | ast.Lambda | ast.ClassDef | ast.For | ast.While):
                pending += list(ast.iter_child_nodes(inner))


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks"])
def test_nothing_depends_on_what_newer_versions_changed(folder: str) -> None:
    wrong = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in (*started_without_a_method(tree), *jumps_out_of_finally(tree)):
            wrong.append(f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)[:80]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "multiprocessing.Process(target=f)",
        "from multiprocessing import Pool",
        "ProcessPoolExecutor(4)",
        "def f():\n try:\n  g()\n finally:\n  return 1",
        "while x:\n try:\n  g()\n finally:\n  if y:\n   break",
    ],
)
def test_it_is_found(source: str) -> None:
    tree = ast.parse(source)
    assert [*started_without_a_method(tree), *jumps_out_of_finally(tree)]


@pytest.mark.parametrize(
    "source",
    [
        'multiprocessing.get_context("spawn").Process(target=f)',
        "from multiprocessing import Pipe",
        "ProcessPoolExecutor(4, context)",
        "try:\n g()\nfinally:\n for x in y:\n  break",
    ],
)
def test_other_code_is_not(source: str) -> None:
    tree = ast.parse(source)
    assert not [*started_without_a_method(tree), *jumps_out_of_finally(tree)]
