"""Checks of Prometheus text as ``promtool check metrics`` makes them, on what Prometheus' own client parses."""

import re
from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

_NOT_BASE = re.compile(
    r"_(milli|micro|nano)?(seconds?|minutes?|hours?|days?|percent|kilobytes|megabytes|gigabytes)(_|$)"
)


def parse(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the value of each series, by name and labels.

    Raises:
        AssertionError: a name, a type or a series breaks the conventions.
    """
    problems, series = [], {}
    for family in text_string_to_metric_families(text):
        full = family.name + ("_total" if family.type == "counter" else "")
        if len(re.findall(rf"^# HELP {full} \S", text, re.MULTILINE)) != 1:
            problems.append(f"{full}: one line of HELP is needed")
        if len(re.findall(rf"^# TYPE {full} {family.type}$", text, re.MULTILINE)) != 1:
            problems.append(f"{full}: one line of TYPE is needed")
        if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", full):
            problems.append(f"{full}: lower-case words joined by underscores")
        if family.type != "counter" and full.endswith(("_total", "_count", "_sum", "_bucket")):
            problems.append(f"{full}: the ending is that of another type")
        unit = _NOT_BASE.search(full.removesuffix("_total"))
        if unit and unit[0].strip("_") != "seconds" and "_per_second" not in full:
            problems.append(f"{full}: {unit[0]} is not a base unit")
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            if sample.name != full or key in series:
                problems.append(f"{sample.name}{sample.labels}: of another family, or twice")
            series[key] = sample.value
    named = Counter(re.findall(r"^([a-z0-9_]+)[{ ]", text, re.MULTILINE))
    if set(named) != {name for name, _ in series}:
        problems.append("a line that the client did not parse")
    assert not problems, "\n".join(problems)
    return series
