"""The language of the source: docstrings that name their subject, one class per name, lines of at most 120 columns."""

import ast
import re
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUESTION = re.compile(r"(What|Whether|Where|Which|How|Who|Whose|When|Why|Of|That|Those)\b")
LONGEST = 120


def tracked(*patterns: str) -> list[Path]:
    """Files of the checkout; all that match where it is no checkout of git."""
    done = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout:
        return [path for pattern in patterns for path in ROOT.glob(f"**/{pattern}")]
    return [path for name in done.stdout.splitlines() if (path := ROOT / name).is_file()]


def documented(file: Path) -> list[tuple[int, str]]:
    """(Line, docstring) of a module and of everything defined in it."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)]
    return [(getattr(node, "lineno", 1), text) for node in nodes if (text := ast.get_docstring(node))]


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks"])
def test_a_docstring_begins_with_a_verb_or_a_noun(folder: str):
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for file in tracked(f"{folder}/*.py")
        for line, text in documented(file)
        if QUESTION.match(text)
    ]
    assert not wrong, "\n".join(wrong)


def test_a_class_name_is_one_class():
    places = defaultdict(list)
    for file in tracked("src/*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_line_is_longer_than_120_characters():
    tables = re.compile(r"\s*\||.*https?://\S+")  # rows of a table and addresses cannot be broken
    wrong = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in tracked("src/*.py", "tests/*.py", "benchmarks/*.py", "*.md", "src/*.c", "src/*.h")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > LONGEST and not (file.suffix == ".md" and tables.match(line))
    ]
    assert not wrong, "\n".join(wrong)
