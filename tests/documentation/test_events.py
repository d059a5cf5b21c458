"""docs/operators.md lists every event that hlat records, with its level and fields, and every metric that it serves."""

import ast
import re
from pathlib import Path

import pytest

from hlat.launch.metrics_server import ObservedRun, RunObservation, metric_families
from hlat.tracking.console import _LEVELS, _LONG

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/operators.md").read_text(encoding="utf-8")
RECORDERS = {"event": 0, "_report": 0, "TrackerNote": 0, "TierEvent": 0, "_add_event": 0}
OTHER_FILES = {"open", "sample"}  # notes between processes; records of samples.jsonl
ELSEWHERE = ("step", "message", *_LONG)


def rows(head: str) -> dict[str, tuple[str, str]]:
    """Cells of the table with this head, by the names in its first column."""
    table = PAGE.split(head, 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    found = {}
    for line in table:
        first, second, third = re.split(r"\s*\|\s*", line.strip("| "), maxsplit=2)
        names = re.findall(r"`(\w+)`", first)
        levels = second.split(", ") if ", " in second else [second] * len(names)
        found |= {name: (level, third) for name, level in zip(names, levels, strict=True)}
    return found


def recorded() -> dict[str, set[str]]:
    """Fields of every event that the source names, by event."""
    found: dict[str, set[str]] = {}
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "src/hlat").rglob("*.py")]
    # Every worker of the tests collects this: files without such a call need no syntax tree.
    for text in (text for text in texts if any(f"{name}(" in text for name in RECORDERS)):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                kind = node.args[0].value
                if name in RECORDERS and isinstance(kind, str) and kind not in OTHER_FILES:
                    found.setdefault(kind, set()).update(word.arg for word in node.keywords if word.arg)
    return found


EVENTS = rows("| event | level | values |\n")


@pytest.mark.parametrize(("kind", "fields"), sorted(recorded().items()))
def test_an_event_is_listed_with_its_fields(kind: str, fields: set[str]) -> None:
    level, values = EVENTS[kind]
    assert level == _LEVELS.get(kind, "info")
    assert fields - set(ELSEWHERE) <= set(re.findall(r"`(\w+)`", values)), (kind, values)


def test_levels_are_of_listed_events() -> None:
    assert {kind: EVENTS[kind][0] for kind in _LEVELS} == _LEVELS


def test_every_metric_is_listed_with_its_type() -> None:
    status = RunObservation(1, [], {}, None, False, {}, {}, None, {"productive": 0.0})
    run = ObservedRun("x", Path(), Path(), 1, None, 1, 0.0)
    served = {family.name: family.kind for family in metric_families(run, status)}
    listed = rows("| metric | type | meaning |\n")
    assert {name: kind for name, (kind, _) in listed.items()} == served
