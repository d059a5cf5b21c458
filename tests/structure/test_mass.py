"""Each room has a ceiling: lines of code, and nodes of its syntax trees, which no formatting can move.

A feature that breaks the ceiling of its room removes something, or raises it here, in the same commit, which says why.
"""

import ast
import io
import tokenize
from pathlib import Path

import hlat

ROOT = Path(hlat.__file__).parent
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
CEILINGS = {
    # room: (lines of code, nodes), 3 % above what there was on 2026-11-27
    "": (363, 2836),  # with precision and quickstart, a module each
    "activation_checkpointing": (546, 5796),
    "api": (804, 6016),
    "checkpoint": (4749, 46639),
    "cli": (2526, 21820),
    "compilation": (305, 3119),
    "config": (3868, 35343),
    "data": (9536, 99672),
    "draft": (360, 3676),
    "evaluation": (2487, 26756),
    "hardware": (762, 7360),
    "launch": (6866, 66666),
    "model": (3849, 43198),
    "optim": (1083, 11738),
    "page": (590, 6123),
    "parallel": (3086, 33713),
    "planner": (4296, 45614),
    "rehearsal": (1504, 15288),
    "reporting": (1216, 12598),
    "resilience": (1177, 12225),
    "runtime": (5193, 46509),
    "sweep": (306, 3325),
    "tracking": (1483, 13943),
    "training": (3176, 30630),
}


def docstrings(tree: ast.Module) -> list[ast.Expr]:
    """Docstrings of a module and of everything defined in it."""
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
    firsts = [body[0] for body in bodies if body and isinstance(body[0], ast.Expr)]
    return [first for first in firsts if isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)]


def mass(file: Path) -> tuple[int, int]:
    """Lines of code (no blank line, comment or docstring), and nodes of the syntax tree without docstrings."""
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    not_code = {number for doc in docstrings(tree) for number in range(doc.lineno, doc.end_lineno + 1)}
    lines = [line.strip() for line in text.splitlines()]
    not_code |= {number for number, line in enumerate(lines, 1) if not line or line.startswith("#")}
    nodes = sum(1 for _ in ast.walk(tree)) - 2 * len(docstrings(tree))  # a statement and its constant
    return len(lines) - len(not_code), nodes


def masses() -> dict[str, tuple[int, int]]:
    """Mass of every room; modules of the package itself are the room ""."""
    found: dict[str, tuple[int, int]] = {}
    for file in ROOT.rglob("*.py"):
        parts = file.relative_to(ROOT).parts
        room = parts[0] if len(parts) > 1 else ""
        lines, nodes = mass(file)
        before = found.get(room, (0, 0))
        found[room] = (before[0] + lines, before[1] + nodes)
    return found


def test_no_room_is_above_its_ceiling():
    found = masses()
    assert found.keys() == CEILINGS.keys()
    above = {
        room: (found[room], most) for room, most in CEILINGS.items() if found[room] > most or found[room][1] > most[1]
    }
    assert above == {}


def test_a_file_has_one_subject():
    """Past 500 lines a file is split by idea."""
    long = {str(file.relative_to(ROOT)): number for file in ROOT.rglob("*.py") if (number := _length(file)) > 500}
    assert long == {}


def _length(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def test_at_least_five_comments_in_a_hundred_lines_of_code():
    """Comments say why; docstrings say what."""
    comments = code = 0
    for file in ROOT.rglob("*.py"):
        source = io.StringIO(file.read_text(encoding="utf-8"))
        comments += len({t.start[0] for t in tokenize.generate_tokens(source.readline) if t.type == tokenize.COMMENT})
        code += mass(file)[0]
    assert comments >= 0.05 * code
