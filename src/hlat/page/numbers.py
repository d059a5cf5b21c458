"""Numbers as people read them, and ticks of axes.

value -> short text | range of values -> round ticks, linear or logarithmic -> their positions
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_LARGE = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_LEAST_RANGE = 1e-9  # a range that is smaller, relative to its values, is one value
_DECADES_WITH_HALVES = 2  # a logarithmic axis of at most so many decades also has ticks at 2 and 5


def format_value(value: float) -> str:
    """Format a number with four significant digits, and thousands separators; NaN and infinity by name."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def format_tick(value: float) -> str:
    """Format the value of a tick in few characters, as ``1.5M``."""
    size = abs(value)
    for unit, letter in _LARGE:
        if size >= 0.99995 * unit:  # rounded to four digits, that is 1
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}" if size >= 1e-3 or value == 0 else f"{value:.0e}"


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit to write a time in, and its seconds."""
    units = (("days", 86400.0), ("h", 3600.0), ("min", 60.0))
    return next((unit for unit in units if seconds >= 2 * unit[1]), ("s", 1.0))


def duration(seconds: float) -> str:
    """Format seconds as ``12 s``, ``3.5 min``, ``7.2 h`` or ``4.1 days``."""
    name, size = time_unit(seconds)
    return f"{seconds:.3g} s" if size == 1 else f"{seconds / size:.1f} {name}"


@dataclass(frozen=True)
class ChartAxis:
    """An axis from ``least`` to ``most``, with ticks between them."""

    least: float
    most: float
    log: bool
    ticks: tuple[float, ...]

    def fraction(self, value: float) -> float:
        """Return the position of a value along the axis, 0 to 1."""
        if self.log:
            return math.log(value / self.least) / math.log(self.most / self.least)
        return (value - self.least) / (self.most - self.least)


def make_axis(values: Sequence[float], *, log: bool = False, zero: bool = False, count: int = 5) -> ChartAxis:
    """Choose range and ticks of an axis, about ``count`` of them.

    ``log`` is ignored unless all values are positive; ``zero`` begins a linear axis at zero.
    """
    least, most = min(values), max(values)
    if log and least > 0:
        return _log_axis(least, most)
    if zero:
        least, most = min(least, 0.0), max(most, 0.0)
    # A constant curve runs through the middle, not along an edge.
    if most - least <= _LEAST_RANGE * max(abs(least), abs(most)):
        margin = abs(least) * 0.05 or 1.0
        least, most = least - (0.0 if zero and least == 0 else margin), most + margin
    return ChartAxis(least, most, False, _even_ticks(least, most, count))


def _even_ticks(least: float, most: float, count: int) -> tuple[float, ...]:
    step = _round_step((most - least) / count)
    # Tolerances: the division may miss a whole number by its rounding error.
    first = math.ceil(least / step - 1e-9)
    return tuple(number * step for number in range(first, math.floor(most / step + 1e-9) + 1))


def _log_axis(least: float, most: float) -> ChartAxis:
    if most / least < 1.5:
        least, most = least / 1.3, most * 1.3
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(most))
    factors = (1, 2, 5) if high - low <= _DECADES_WITH_HALVES else (1,)
    every = max(1, (high - low) // 6)  # at most a dozen powers of ten have labels
    found = [factor * 10.0**power for power in range(low, high + 1, every) for factor in factors]
    ticks = tuple(tick for tick in found if least * (1 - 1e-9) <= tick <= most * (1 + 1e-9))
    return ChartAxis(least, most, True, ticks if len(ticks) > 1 else _even_ticks(least, most, 8))


def _round_step(step: float) -> float:
    # Round ticks need a step of 1, 2 or 5 times a power of ten.
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))
