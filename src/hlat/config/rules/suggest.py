"""Suggestions: the values nearest to the recipe's with which a layout is possible.

    failed check, candidates for some fields -> each tried with every check -> fixes, and a sentence that names them

A fix is never derived from one rule alone: each candidate is put into the recipe and all checks run, so that a named
value really works. If other checks fail too, the candidates that leave the fewest failing win.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from hlat.config.errors import Fix, Problem
from hlat.config.rules.layout_checks import CHECKS
from hlat.config.rules.rule_context import Check, Unavailable, Values, holds, passes

_NAMED = 2  # values per field that a remedy names
_TRIED = 256  # candidates per field that are tried, nearest first


def refusal(
    v: Values, path: str, check: Check, candidates: Mapping[str, Iterable[Any]], given: tuple[Check, ...] = ()
) -> list[Problem]:
    """Report a field that fails a check, with all reasons and what would work; an empty list if it passes.

    Args:
        v: the recipe.
        path: field to report; its own fixes come first.
        check: check that the field must pass.
        candidates: values that may work, by field; numbers in any order, other values in the order of preference.
        given: checks that this one depends on.

    Raises:
        Unavailable: a check that this one depends on fails, so that this report would only repeat it.
    """
    if not all(holds(other, v) for other in given):
        raise Unavailable(path)
    reasons = list(check(v))
    if not reasons:
        return []
    fixes = _nearest(v, candidates, check, given)
    return [Problem(path, _sentence(reasons), _remedy(path, fixes), v(path), True, fixes)]


def _nearest(
    v: Values, candidates: Mapping[str, Iterable[Any]], check: Check, given: tuple[Check, ...]
) -> tuple[Fix, ...]:
    """The nearest candidates of each field with which these checks hold and the fewest others fail."""
    found: list[tuple[int, Fix]] = []
    for path, values in candidates.items():
        for value in _by_distance(v(path), values):
            changed = v.having(path, value)
            if value != v(path) and _applies_and_passes(check, changed) and all(holds(one, changed) for one in given):
                found.append((sum(not holds(other, changed) for other in CHECKS), Fix(path, value)))
    least = min((failing for failing, _ in found), default=0)
    fixes: list[Fix] = []
    for path in candidates:
        best = [fix for failing, fix in found if fix.path == path and failing == least][:_NAMED]
        fixes += sorted(best, key=lambda fix: fix.value) if _are_numbers(fix.value for fix in best) else best
    return tuple(fixes)


def _applies_and_passes(check: Check, v: Values) -> bool:
    try:
        return passes(check, v)
    except Unavailable:
        return False


def _are_numbers(values: Iterable[Any]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)


def _by_distance(now: Any, values: Iterable[Any]) -> list[Any]:
    ordered = list(dict.fromkeys(values))
    if _are_numbers([*ordered, now]):
        ordered.sort(key=lambda value: (abs(value - now), value))
    return ordered[:_TRIED]


def _sentence(reasons: list[str]) -> str:
    """Reasons as one text: of several, each but the last loses its full stop."""
    return "; ".join([*(reason.removesuffix(".") for reason in reasons[:-1]), reasons[-1]])


def _remedy(path: str, fixes: tuple[Fix, ...]) -> str:
    """``Try 2 or 4, or parallel.sequence=false.``: the problem's own field first, without its name."""
    by_path: dict[str, list[str]] = {}
    for fix in sorted(fixes, key=lambda fix: fix.path != path):
        by_path.setdefault(fix.path, []).append(_written(fix.value))
    options = [_option(field, " or ".join(values), field == path) for field, values in by_path.items()]
    return f"Try {', or '.join(options)}." if options else ""


def _option(field: str, values: str, own: bool) -> str:
    if field == "world":
        return f"{values} process{'' if values == '1' else 'es'}"  # the option is named by the verb, which has one
    if own:
        return values
    return f"{field}={values}"


def _written(value: Any) -> str:
    """As it is written in a recipe or an override."""
    return value if isinstance(value, str) else json.dumps(value)
