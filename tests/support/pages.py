"""Commands, messages and names in pages of the documentation, to be compared with the program.

page --command_lines--> words of each `hlat` command --parse--> arguments, as hlat's own parser reads them
src/hlat --message_texts--> texts of all string literals, by module --is_message--> a message that a page quotes is one
"""

import ast
import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import typer

from hlat.cli import app
from hlat.config import recipe_schema

ROOT = Path(__file__).resolve().parents[2]
HOLE = "\0"
"""What stands for a placeholder in the text of a literal."""

_ENDS = {"&&", "||", ";", "|", ">"}


def command_lines(page: str) -> list[list[str]]:
    """Words of every `hlat` command in the indented and fenced blocks of a page; they begin with "hlat".

    Lines that end with a backslash go on. Words before `hlat` (srun, kubectl exec) and comments are left out, and so
    are diagrams.
    """
    found = []
    for line in _block_lines(page):
        if "-->" in line or "hlat" not in line or line.lstrip().startswith(("#SBATCH", "FROM")):
            continue
        words = shlex.split(line, comments=True)
        while "hlat" in words:
            words = words[words.index("hlat") :]
            end = next((place for place, word in enumerate(words) if word in _ENDS), len(words))
            found.append([word.removesuffix(";") for word in words[:end]])
            words = words[end:]
    return found


def _block_lines(page: str) -> Iterator[str]:
    fenced, pending = False, ""
    for line in page.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            pending += line.strip()
            if pending.endswith("\\"):
                pending = pending[:-1]
                continue
            yield pending
            pending = ""


def parse(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Verb and arguments of a command, read by hlat's own parser, which raises an exception for what it refuses."""
    command, verb, rest = _command(), [], list(words[1:])
    while hasattr(command, "commands"):
        assert rest and rest[0] in command.commands, f"no such verb: {' '.join(words)}"
        verb.append(rest.pop(0))
        command = command.commands[verb[-1]]
    return " ".join(verb), command.make_context(verb[-1], rest).params


@cache  # building it takes 50 ms, and the pages have hundreds of commands
def _command() -> Any:
    return typer.main.get_command(app)


def spans(text: str) -> list[str]:
    """Code spans of a text without blocks, each in one line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def without_blocks(page: str) -> str:
    """A page without its fenced and indented blocks."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^    .*$", "", text, flags=re.MULTILINE)


@cache
def message_texts() -> dict[str, list[str]]:
    """Texts of the string literals of src/hlat, except docstrings, by module; placeholders are ``HOLE``."""
    found = {}
    for file in sorted((ROOT / "src/hlat").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [_text(node) for node in ast.walk(tree) if id(node) not in bare]
        found[str(file)] = [" ".join(text.split()) for text in texts if text]
    return found


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    parts = node.values if isinstance(node, ast.JoinedStr) else []
    return "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in parts)


def is_message(quoted: str) -> bool:
    """True if one module of src/hlat has all fragments of a message, which are separated by ``...``, in its literals.

    A message is often put together from several literals, so they need not be in one.
    """
    fragments = [" ".join(part.split()) for part in quoted.split("...")]
    fragments = [part for part in fragments if part]
    assert max(map(len, fragments), default=0) >= 5, f"too little to be recognised: {quoted}"
    return any(
        all(any(fragment in text for text in texts) for fragment in fragments) for texts in message_texts().values()
    )


def is_recipe_field(path: str) -> bool:
    """True if recipes have a field with this path, such as ``checkpoint.local.dir``."""
    schema = _schema()
    nodes = [schema]
    for key in path.split("."):
        nodes = [child for node in nodes for child in _children(schema, node, key)]
    return bool(nodes)


@cache
def _schema() -> dict[str, Any]:
    return recipe_schema()


def _children(schema: dict[str, Any], node: dict[str, Any], key: str) -> Iterator[dict[str, Any]]:
    for plain in _alternatives(schema, node):
        if key in plain.get("properties", {}):
            yield plain["properties"][key]
        if key.isdecimal() and "items" in plain:
            yield plain["items"]


def _alternatives(schema: dict[str, Any], node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A node of the schema with its references resolved, and each of its alternatives."""
    if "$ref" in node:
        yield from _alternatives(schema, schema["$defs"][node["$ref"].rpartition("/")[2]])
    yield node
    for kind in ("anyOf", "oneOf", "allOf"):
        for child in node.get(kind, ()):
            yield from _alternatives(schema, child)
