"""Intervals of the measured over the predicted step time, by chip family and precision; differences that mean little.

    intervals.yaml -> shipped_interval("hopper", eight_bit=False) -> RatioInterval(low, high) -> widened(spread)
                   -> undecided_ratio() of two layouts of one job; ratio_between(one, other) of two families

``benchmarks/planner_errors.py FILE --json`` computes the numbers (``intervals``, ``order``) from runs whose source was
left out of the fit; benchmarks/published_runs/intervals.py and order.py have the rules.
"""

from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from math import exp, hypot, log
from typing import Any

import yaml

from hlat.planner.problem.families import CHIP_FAMILIES

INTERVAL_SHARE = 0.8
"""Share of runs that an interval is to cover."""

_TAIL_DEVIATIONS = 1.2816  # standard deviations of a normal distribution beyond which 10 % lie
_FIFTH_DEVIATIONS = 0.8416  # those beyond which 20 % lie


@dataclass(frozen=True)
class RatioInterval:
    """An 80 % interval of the measured over the predicted step time, and the number of sources of its family.

    A family has several chips: the sources of trainium are of Trainium 1.
    """

    low: float
    high: float
    sources: int
    family: str = ""

    @property
    def deviation(self) -> float:
        """Standard deviation of the logarithm, if it is normal."""
        return log(self.high / self.low) / 2 / _TAIL_DEVIATIONS

    def of(self, predicted: float) -> tuple[float, float]:
        """The interval of a predicted time, or of what is proportional to it."""
        return predicted * self.low, predicted * self.high

    def widened(self, spread: float) -> "RatioInterval":
        """The interval with a further uncertainty, a standard deviation of the logarithm, in quadrature."""
        added = _TAIL_DEVIATIONS * spread
        low, high = log(self.low), log(self.high)
        middle = (low + high) / 2
        low, high = exp(middle - hypot(middle - low, added)), exp(middle + hypot(high - middle, added))
        return replace(self, low=low, high=high)


@cache
def _content() -> dict[str, Any]:
    text = files("hlat.planner.cost").joinpath("intervals.yaml").read_text(encoding="utf-8")
    content: dict[str, Any] = yaml.safe_load(text)
    return content


def shipped_interval(family: str, *, eight_bit: bool) -> RatioInterval:
    """The interval of a chip family and precision; the pooled one, widened, for one without published runs.

    Args:
        family: chip family.
        eight_bit: True if products run in fp8.
    """
    table = _content()["intervals"]
    entry = table.get(family + " fp8" * eight_bit, table["pooled"])
    found = RatioInterval(entry["low"], entry["high"], entry["sources"], family)
    return found if found.sources else found.widened(CHIP_FAMILIES.get(family, CHIP_FAMILIES["measured"]).spread)


def undecided_ratio() -> float:
    """The ratio of two predicted step times from which on the faster layout of one job is so 4 times out of 5."""
    return float(_content()["order"]["ratio"])


def ratio_between(one: RatioInterval, other: RatioInterval) -> float:
    """The ratio of two predicted times from which on the faster one is so 4 times out of 5, with independent errors.

    Args:
        one: interval of the first time.
        other: interval of the second, of another family of chips.
    """
    return exp(_FIFTH_DEVIATIONS * hypot(one.deviation, other.deviation))
