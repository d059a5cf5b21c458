"""Every command of docs/tutorials and docs/gallery.md runs as written, in an empty folder, with no network or device.

A page's blocks count in their order: ``yaml`` and ``python`` blocks that begin with a file name are files, ``bash``
blocks are run line by line, ``text`` blocks are shown only. Lines that begin with ``hlat`` run in processes forked from
one that has imported it; others in a shell.
"""

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from hlat.config import load_recipe
from tests.support.commands import hlat
from tests.support.pages import ROOT, command_lines, parse

FOLDER = ROOT / "docs/tutorials"
TUTORIALS = sorted(page for page in FOLDER.glob("*.md") if page.stem != "README")
TEXTS = {page.stem: page.read_text(encoding="utf-8") for page in (*TUTORIALS, ROOT / "docs/gallery.md")}
QUICK = {"own-text"}
"""Pages that take a few seconds; the others are slow."""
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Step:
    """A file to write (``name``), or a command to run (no name)."""

    name: str
    content: str


def steps(page: str) -> list[Step]:
    """Files and commands of a page, in its order."""
    found = []
    for language, content in BLOCK.findall(page):
        if language == "bash":
            joined = content.replace("\\\n", " ")
            found += [Step("", line.strip()) for line in joined.splitlines() if line.strip()]
        elif language in ("yaml", "python"):
            head = re.match(r"# (\S+)\n", content)
            assert head is not None, f"which file is this? {content[:60]}"
            found.append(Step(head[1], content))
        else:
            assert language == "text", f"no such kind of block: {language}"
    return found


def run(command: str, folder: Path) -> None:
    """Run a command of a page; it has to succeed."""
    words = shlex.split(command)
    if words[0] == "hlat" and not re.search(r"[|&;$><`]", command):
        done = hlat(*words[1:], cwd=folder)
    else:
        command = re.sub(r"^python3\b", sys.executable, command)
        done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[] if page in QUICK else pytest.mark.slow) for page in sorted(TEXTS)]
)
def test_every_command_of_a_tutorial_succeeds(page: str, tmp_path: Path) -> None:
    for step in steps(TEXTS[page]):
        if step.name:
            (tmp_path / step.name).write_text(step.content, encoding="utf-8")
        else:
            run(step.content, tmp_path)


def test_there_is_a_tutorial_of_each_kind_and_the_index_names_them() -> None:
    kinds = (
        "first-model",
        "own-text",
        "mixture",
        "hugging-face",
        "processes",
        "nodes",
        "recovery-drill",
        "plan-to-bill",
    )
    assert {page.stem for page in TUTORIALS} == set(kinds)
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert tuple(re.findall(r"\]\(([\w-]+)\.md\)", index)) == kinds


@pytest.mark.parametrize("page", sorted(TEXTS))
def test_commands_are_read_by_the_parser_and_recipes_are_accepted(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that are shown only, and those of slow pages."""
    for step in steps(TEXTS[page]):
        if step.name:
            (tmp_path / step.name).write_text(step.content, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    lines = command_lines(TEXTS[page])
    assert len(lines) >= 3
    for words in lines:
        _, arguments = parse(words)
        recipe = arguments.get("recipe")
        if recipe is not None and page != "hugging-face":  # its model is made by its first command
            load_recipe(recipe, arguments.get("overrides") or [])
