"""The list of cases that the default suite leaves out names tests that there are."""

import pytest

from tests.support.slow_cases import UNKNOWN, read_slow_cases, slow_names, unknown_names

LIST = """# head
tests/a.py
    test_one
    test_two[x, y]
    [z]
    test_gone
tests/b.py
    test_one[0]
tests/a.py
    test_four
"""


def test_every_name_stands_for_a_test(request: pytest.FixtureRequest) -> None:
    """Check the files that pytest has collected: the complete suite checks the complete list."""
    assert request.config.stash[UNKNOWN] == []


def test_a_name_stands_for_a_function_a_case_or_a_case_of_all_functions() -> None:
    cases = read_slow_cases(LIST)
    slow = ["test_one", "test_one[a]", "test_two[x, y]", "test_three[z]", "test_four"]
    assert all(slow_names(f"tests/a.py::{name}", cases) for name in slow)
    fast = ["a.py::test_two[x]", "a.py::test_three", "b.py::test_one", "b.py::test_one[z]", "c.py::test_one"]
    assert not any(slow_names(f"tests/{name}", cases) for name in fast)
    assert unknown_names([f"tests/a.py::{name}" for name in slow], cases) == ["tests/a.py: test_gone"]
