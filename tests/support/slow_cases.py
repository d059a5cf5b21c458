"""Cases that the default suite leaves out, by a list: see the head of tests/slow_cases.txt."""

from collections.abc import Iterable
from pathlib import Path

import pytest

SLOW_CASES = Path(__file__).parents[1] / "slow_cases.txt"

UNKNOWN = pytest.StashKey[list[str]]()
"""Names of the list that stand for no test among those that were collected."""


def read_slow_cases(text: str) -> dict[str, set[str]]:
    """Return the indented names below each file of the list."""
    cases: dict[str, set[str]] = {}
    file = ""
    for line in text.splitlines():
        if line.startswith(" "):
            cases[file].add(line.strip())
        elif line and not line.startswith("#"):
            file = line
            cases.setdefault(file, set())
    return cases


def slow_names(node_id: str, cases: dict[str, set[str]]) -> set[str]:
    """Return the names of the list that stand for a test: its own, its function's, and its case's."""
    file, _, name = node_id.partition("::")
    function, bracket, case = name.partition("[")
    return cases.get(file, set()) & {name, function, bracket + case}


def unknown_names(node_ids: Iterable[str], cases: dict[str, set[str]]) -> list[str]:
    """Return the names of the list that stand for no test of their file.

    Args:
        node_ids: all tests of some files; files without a test here are not looked at.
        cases: the list.
    """
    found: dict[str, set[str]] = {}
    for node_id in node_ids:
        found.setdefault(node_id.partition("::")[0], set()).update(slow_names(node_id, cases))
    return [f"{file}: {name}" for file in found for name in sorted(cases.get(file, set()) - found[file])]
