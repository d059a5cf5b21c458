"""Calibration of the time model by published runs: its fitted constants, and the errors of its predictions.

    constants.yaml -> Constants -> constants.column("products", columns) -> one value per workload, by chip family
    intervals.yaml -> shipped_interval("hopper", eight_bit=False) -> RatioInterval(low, high): measured over predicted
                   -> undecided_ratio() of two layouts of one job; ratio_between(one, other) of two families

No data sheet states these numbers. benchmarks/published_runs/constants_fit.py fits two of the constants.
``benchmarks/planner_errors.py FILE --json`` computes the intervals from runs whose source was left out of the fit;
benchmarks/published_runs/intervals.py and order.py have the rules.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.resources import files
from math import exp, hypot, log, sqrt
from typing import Any

import numpy as np
import yaml

from hlat.planner.problem.workload import CHIP_FAMILIES, FAMILIES, Column, WorkloadColumns

ALL = "all"


@dataclass(frozen=True)
class Constants:
    """Values by constant and family. The family ``all`` stands for every family without a value of its own."""

    values: Mapping[tuple[str, str], float]

    def column(self, name: str, columns: WorkloadColumns) -> Column:
        """The value for each workload: of its family, else of its nearest relative's."""
        if name not in self._tables:
            self._tables[name] = np.array([self._for(name, family) for family in FAMILIES])
        return self._tables[name][columns.family.astype(np.intp)]

    @cached_property
    def _tables(self) -> dict[str, Column]:
        # Filled by ``column`` with an array by position of the family, for each constant asked for.
        return {}

    def _for(self, name: str, family: str) -> float:
        for key in CHIP_FAMILIES[family].lookup:
            if (name, key) in self.values:
                return self.values[name, key]
        raise KeyError(f"{name} has no value for {family}")

    def shared(self, name: str) -> float:
        return self.values[name, ALL]

    def with_values(self, changes: Mapping[tuple[str, str], float]) -> "Constants":
        return Constants({**self.values, **changes})


@cache
def _content(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(files("hlat.planner.cost").joinpath(name).read_text(encoding="utf-8"))
    return content


@cache
def load_constants() -> Constants:
    """The values that predictions use."""
    content = _content("constants.yaml")
    return Constants(
        {(name, family): float(value) for name, entry in content.items() for family, value in entry["value"].items()}
    )


INTERVAL_SHARE = 0.8
"""Share of runs that an interval is to cover."""

_TAIL_DEVIATIONS = 1.2816  # standard deviations of a normal distribution beyond which 10 % lie
_FIFTH_DEVIATIONS = 0.8416  # those beyond which 20 % lie


@dataclass(frozen=True)
class RatioInterval:
    """An 80 % interval of the measured over the predicted step time."""

    low: float
    high: float
    sources: int  # of the family, which has several chips: those of trainium are of Trainium 1
    family: str = ""
    middle: float | None = None  # median of the same runs, if the table has it

    @property
    def deviation(self) -> float:
        """Standard deviation of the logarithm, if it is normal."""
        return log(self.high / self.low) / 2 / _TAIL_DEVIATIONS

    def of(self, predicted: float) -> tuple[float, float]:
        """Interval of a predicted time, or of what is proportional to it."""
        return predicted * self.low, predicted * self.high

    @property
    def median(self) -> float:
        """Ratio above which as many runs are expected as below; without a figure, the interval's middle logarithm."""
        return self.middle or sqrt(self.low * self.high)

    def around(self, median: float) -> tuple[float, float]:
        """Interval of a time whose median is given, instead of its prediction."""
        return self.of(median / self.median)

    def widened(self, spread: float) -> "RatioInterval":
        # A further standard deviation of the logarithm, in quadrature.
        added = _TAIL_DEVIATIONS * spread
        low, high = log(self.low), log(self.high)
        middle = (low + high) / 2
        low, high = exp(middle - hypot(middle - low, added)), exp(middle + hypot(high - middle, added))
        return replace(self, low=low, high=high)


def shipped_interval(family: str, *, eight_bit: bool) -> RatioInterval:
    """Interval of a chip family and precision; the pooled one, widened, without published runs."""
    table = _content("intervals.yaml")["intervals"]
    entry = table.get(family + " fp8" * eight_bit, table["pooled"])
    found = RatioInterval(entry["low"], entry["high"], entry["sources"], family, entry.get("median"))
    return found if found.sources else found.widened(CHIP_FAMILIES.get(family, CHIP_FAMILIES["measured"]).spread)


def sources_of_chip(name: str) -> int:
    """Number of published sources with runs on a chip of the catalog, which its family may have more of."""
    return int(_content("intervals.yaml")["chips"].get(name, 0))


def undecided_ratio() -> float:
    """Ratio of two predicted step times from which on the faster layout is so 4 times out of 5."""
    return float(_content("intervals.yaml")["order"]["ratio"])


def ratio_between(one: RatioInterval, other: RatioInterval) -> float:
    """``undecided_ratio`` of two families of chips, whose errors are independent."""
    return exp(_FIFTH_DEVIATIONS * hypot(one.deviation, other.deviation))
