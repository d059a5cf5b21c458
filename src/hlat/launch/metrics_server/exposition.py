"""Prometheus' text exposition format, version 0.0.4, for gauges and counters.

families --exposition--> # HELP, # TYPE, one line per series
https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class MetricFamily:
    """A metric with its series.

    Attributes:
        name: name with its unit; ends with ``_total`` for a counter.
        kind: type of the metric.
        help: one sentence.
        series: labels and value of each series; labels differ.
    """

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    series: Sequence[tuple[Mapping[str, str], float]] = ()


def exposition(families: Iterable[MetricFamily]) -> str:
    """Return the text of families; those without series are left out."""
    lines: list[str] = []
    for family in families:
        if family.series:
            text = family.help.replace("\\", r"\\").replace("\n", r"\n")
            lines += [f"# HELP {family.name} {text}", f"# TYPE {family.name} {family.kind}"]
            lines += [f"{family.name}{_labels(labels)} {_number(value)}" for labels, value in family.series]
    return "".join(f"{line}\n" for line in lines)


def _labels(labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
