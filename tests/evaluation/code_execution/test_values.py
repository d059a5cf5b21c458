"""Bytes from the program become plain values or an error, whatever they are."""

import math
import random
from decimal import Decimal
from fractions import Fraction

import pytest

from hlat.evaluation.code_execution.inside.values import from_bytes, to_bytes

PLAIN = [None, True, False, 0, -1, 2**200, 10**5000, 0.1, -0.0, float("inf"), 2 - 1j, "", "ü\ud800\0", b"\xff", ()]
PLAIN += [[[]], {}, {"a": [1, (2,)], (1, 2): None}, {1, 2}, frozenset({"x"}), bytearray(b"y"), Decimal("1.10")]
PLAIN += [Fraction(1, 3), slice(1, None, -1), range(0, 9, 2)]


def refuse(value: object) -> int:
    raise AssertionError(value)


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_values_are_the_same_afterwards(value: object) -> None:
    found = from_bytes(to_bytes(value, refuse), refuse)
    assert found == value and type(found) is type(value)
    assert not isinstance(value, float) or math.copysign(1, found) == math.copysign(1, value)


def test_subclasses_lose_their_methods() -> None:
    class Any(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    found = from_bytes(to_bytes([Any(3), {Any(4): "x"}], refuse), refuse)
    assert found == [3, {4: "x"}] and found[0] != 5 and type(found[0]) is int


def test_damaged_bytes_are_errors_or_other_plain_values() -> None:
    rng, whole = random.Random(1), to_bytes([[1, "two", 3.0], {"four": (5,)}], refuse)
    outcomes = set()
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            outcomes.add(type(from_bytes(bytes(data[: rng.randrange(1, len(data) + 1)]), lambda number: number)))
        except (ValueError, TypeError, OverflowError):  # TypeError: a list as a key
            outcomes.add(ValueError)
    assert outcomes == {ValueError, list}
