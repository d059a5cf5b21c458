"""Values of a recipe by dotted path, as rules see them, and the types of rules and checks.

Values -> check -> reasons why it fails; none if it holds
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

from hlat.config.batch_schedule import BatchSchedule
from hlat.config.errors import Problem


class Unavailable(Exception):
    """Raised when a rule reads a field that has no valid value, or depends on another check that failed."""


class Values:
    """Validated values by dotted path; reading a missing one raises ``Unavailable``.

    Besides the fields of the recipe there is ``world``, the number of processes, if it was given.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __call__(self, path: str) -> Any:
        """Return the value at a dotted path; raise ``Unavailable`` if there is none."""
        try:
            return self._values[path]
        except KeyError:
            raise Unavailable(path) from None

    def __contains__(self, path: str) -> bool:
        return path in self._values

    def having(self, path: str, value: Any) -> "Values":
        """Return a copy with another value for one path."""
        return Values({**self._values, path: value})


class TracedValues(Values):
    """The same values; ``read`` has the paths that were asked for, of its changed copies too."""

    def __init__(self, values: Values, read: set[str] | None = None) -> None:
        super().__init__(values._values)
        self.read: set[str] = set() if read is None else read

    def __call__(self, path: str) -> Any:
        """Return the value at a dotted path; raise ``Unavailable`` if there is none."""
        self.read.add(path)
        return super().__call__(path)

    def __contains__(self, path: str) -> bool:
        self.read.add(path)
        return super().__contains__(path)

    def having(self, path: str, value: Any) -> "Values":
        """Return a copy with another value for one path."""
        return TracedValues(super().having(path, value), self.read)


Rule = Callable[[Values], Iterator[Problem]]
"""Yields problems, each with its remedy."""
Check = Callable[[Values], Iterator[str]]
"""Yields reasons why it fails; each ends with a full stop."""


def batches(v: Values) -> BatchSchedule:
    """Return the boundaries of the global batches."""
    return BatchSchedule.of(v("batch.global_batch"), v("batch.ramp"), v("data.sequence_length"))


def holds(check: Check, v: Values) -> bool:
    """True if a check passes or does not apply."""
    try:
        return passes(check, v)
    except Unavailable:
        return True


def passes(check: Check, v: Values) -> bool:
    """True if a check passes.

    Raises:
        Unavailable: the check does not apply.
    """
    return next(check(v), None) is None


def divisors(n: int, factor_limit: int = 1 << 16) -> list[int]:
    """Divisors of n > 0, ascending: all of them up to 2**32; beyond, those up to factor_limit and their cofactors."""
    small = [d for d in range(1, min(factor_limit, math.isqrt(n)) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
