"""Mutants of the source: the places where code can be changed, and a random draw of them.

source --ast--> places, each with its replacement --seed--> mutants, evenly from every room and of every kind
"""

import ast
import random
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path("src/hlat")

FILES: dict[str, tuple[str, ...]] = {
    "optim": ("optim/adamw*.py", "optim/cpu_kernels.py", "optim/base.py", "optim/schedules.py"),
    "parallel": ("parallel/**/*.py",),
    "training": ("training/**/*.py",),
    "checkpoint": ("checkpoint/**/*.py",),
    "data": ("data/samples/*.py",),
    "launch": (
        "launch/hosts/*.py",
        "launch/hosts_job.py",
        "launch/supervision/agent.py",
        "launch/supervision/cluster_attempts.py",
        "launch/supervision/remote_ranks.py",
        "launch/preflight/**/*.py",
        "launch/run_request.py",
        "launch/schedulers/slurm.py",
        "launch/schedulers/kubernetes.py",
        "launch/metrics_*.py",
    ),
}
_NO_DEVICE = {"adamw_triton.py"}  # kernels that run on a GPU only

_COMPARED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "%", ast.Mod: "//", ast.LShift: ">>",
    ast.RShift: "<<", ast.BitAnd: "|",
}  # fmt: skip
_TALK = re.compile(r"(^|\.)(message|event|warning|info|debug|say|tell\w*|_tell\w*)$")
_NOT_COMPUTED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Global)


@dataclass(frozen=True)
class Mutant:
    """A change of the source: bytes ``start`` to ``stop`` of a file, and their replacement."""

    id: str
    room: str
    file: str
    line: int
    operator: str
    start: int
    stop: int
    before: str
    after: str


class _Places(ast.NodeVisitor):
    """Finds the places of a file that may be changed."""

    def __init__(self, source: bytes) -> None:
        self._source = source
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self.found: list[tuple[str, int, int, str]] = []

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._lines[node.lineno - 1] + node.col_offset
        return start, self._lines[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr | ast.stmt) -> str:
        start, stop = self._span(node)
        return self._source[start:stop].decode()

    def _add(self, operator: str, node: ast.expr | ast.stmt, text: str) -> None:
        self.found.append((operator, *self._span(node), text))

    def visit(self, node: ast.AST) -> None:
        """Visit everything below a node except messages, which are not computed with."""
        if isinstance(node, _NOT_COMPUTED):
            return
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Call) and _TALK.search(ast.unparse(node.func)):
            return
        super().visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for default in (*node.args.defaults, *(default for default in node.args.kw_defaults if default is not None)):
            self.visit(default)
        for statement in node.body:
            self.visit(statement)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:  # not its decorators
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets):
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("constant", node, str(not node.value))
        elif isinstance(node.value, int):
            self._add("constant", node, f"({self._text(node)} + 1)" if node.value else "1")
        elif isinstance(node.value, float):
            self._add("constant", node, f"({self._text(node)} * 2)" if node.value else "1.0")

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            left, right = self._text(node.left), self._text(node.comparators[0])
            self._add("comparison", node, f"({left} {_COMPARED[type(node.ops[0])]} {right})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        both = (node.left, node.right)
        text = any(
            isinstance(operand, ast.JoinedStr) or isinstance(getattr(operand, "value", None), str) for operand in both
        )
        if type(node.op) in _ARITHMETIC and not text:
            left, right = self._text(node.left), self._text(node.right)
            self._add("arithmetic", node, f"(({left}) {_ARITHMETIC[type(node.op)]} ({right}))")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = " or " if isinstance(node.op, ast.And) else " and "
        self._add("and, or", node, "(" + word.join(f"({self._text(value)})" for value in node.values) + ")")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, (ast.Not, ast.USub)):
            self._add("sign", node, f"({self._text(node.operand)})")
        self.generic_visit(node)

    def _condition(self, node: ast.If | ast.IfExp | ast.While) -> None:
        self._add("condition", node.test, f"(not ({self._text(node.test)}))")
        self.generic_visit(node)

    visit_If = visit_IfExp = visit_While = _condition

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, (ast.Call, ast.Await)):
            talk = isinstance(node.value, ast.Call) and _TALK.search(ast.unparse(node.value.func))
            if not talk:
                self._add("statement left out", node, "pass")
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add("statement left out", node, "pass")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if len(node.args) >= 2 and not any(isinstance(argument, ast.Starred) for argument in node.args[:2]):
            first, second = self._span(node.args[0]), self._span(node.args[1])
            between = self._source[first[1] : second[0]].decode()
            text = self._text(node.args[1]) + between + self._text(node.args[0])
            if self._text(node.args[0]) != self._text(node.args[1]):
                self.found.append(("arguments swapped", first[0], second[1], text))
        if isinstance(node.func, ast.Name) and node.func.id == "range" and node.args:
            self._add("off by one", node.args[-1], f"({self._text(node.args[-1])} + 1)")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self._add("result left out", node, "return None")
        self.generic_visit(node)


def mutants_of(room: str, file: Path) -> Iterator[Mutant]:
    """All mutants of a file."""
    source = (ROOT / SOURCE / file).read_bytes()
    places = _Places(source)
    places.visit(ast.parse(source))
    for operator, start, stop, text in places.found:
        line, column = source.count(b"\n", 0, start) + 1, start - source.rfind(b"\n", 0, start)
        name = f"{file}:{line}:{column}:{operator.replace(' ', '-').replace(',', '')}"
        yield Mutant(name, room, str(file), line, operator, start, stop, source[start:stop].decode(), text)


def draw(seed: int, count: int, rooms: Collection[str]) -> list[Mutant]:
    """Draw mutants, alternating between the rooms and, in a room, between the kinds; one per line of a file at most."""
    rng = random.Random(seed)
    found = [list(_of_room(room, patterns, rng)) for room, patterns in FILES.items() if room in rooms]
    drawn = [mutant for turn in zip(*found, strict=False) for mutant in turn]
    return drawn[:count]


def _of_room(room: str, patterns: tuple[str, ...], rng: random.Random) -> Iterator[Mutant]:
    files = sorted({path for pattern in patterns for path in (ROOT / SOURCE).glob(pattern)})
    names = [path.relative_to(ROOT / SOURCE) for path in files if path.name not in {"__init__.py", *_NO_DEVICE}]
    kinds: defaultdict[str, list[Mutant]] = defaultdict(list)
    for name in names:
        for mutant in mutants_of(room, name):
            kinds[mutant.operator].append(mutant)
    turns = [rng.sample(kinds[kind], len(kinds[kind])) for kind in rng.sample(sorted(kinds), len(kinds))]
    taken: set[tuple[str, int]] = set()
    for turn in zip_longest(*turns):
        for mutant in turn:
            if mutant is not None and (mutant.file, mutant.line) not in taken:
                taken.add((mutant.file, mutant.line))
                yield mutant


def faulty(record: dict[str, Any], source: bytes) -> bytes | None:
    """Source with the mutant in it; None if the original text is no longer at its place."""
    start, stop = record["start"], record["stop"]
    if source[start:stop].decode(errors="replace") != record["before"]:
        return None
    return source[:start] + record["after"].encode() + source[stop:]
