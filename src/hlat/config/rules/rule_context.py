"""What rules see of a recipe: validated values by dotted path, and the checks that may be made on them.

Values -> check -> reasons why not, none where it holds
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

from hlat.config.errors import Problem


class Unavailable(Exception):
    """A rule asked for a field that has no valid value, or builds on something that is wrong."""


class Values:
    """Validated values by dotted path; asking for one that is missing raises ``Unavailable``.

    Beside the fields of the recipe there is ``world``, the number of processes, where it has been stated.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __call__(self, path: str) -> Any:
        try:
            return self._values[path]
        except KeyError:
            raise Unavailable(path) from None

    def __contains__(self, path: str) -> bool:
        return path in self._values

    def having(self, path: str, value: Any) -> "Values":
        """The same values but for one."""
        return Values({**self._values, path: value})


Rule = Callable[[Values], Iterator[Problem]]
"""What is wrong and what would work."""
Check = Callable[[Values], Iterator[str]]
"""Only what is wrong: each reason ends with a full stop."""


def holds(check: Check, v: Values) -> bool:
    """Whether a check finds nothing wrong, be it that it does not apply."""
    try:
        return passes(check, v)
    except Unavailable:
        return True


def passes(check: Check, v: Values) -> bool:
    """Whether a check finds nothing wrong.

    Raises:
        Unavailable: it does not apply.
    """
    return next(check(v), None) is None


def divisors(n: int, factor_limit: int = 1 << 16) -> list[int]:
    """Divisors of n > 0, ascending: all of them up to 2**32; beyond, those with or beside a factor up to the limit."""
    small = [d for d in range(1, min(factor_limit, math.isqrt(n)) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
