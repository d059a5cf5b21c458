"""Days, cost and energy of a run as a plan says them: the median first, then the range of 4 of 5 runs.

    LayoutPrediction of a search --likely--> with medians of days, cost and energy, as a plan and an offer have it
        --days_text, usd_words, energy_words--> "9.6 days, 6.6 to 14", "$140k, $97k to $210k", ...
        --median_days, median_usd, median_energy--> columns of a table; --interval_text--> "6.6-14"

A search predicts what the cost model says. Runs that others published were slower more often than faster, so that its
own number is nearer to the fast end of the range than to the middle. What a user reads is the middle.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from hlat.planner.search import LayoutPrediction
from hlat.runtime.quantities import amount_text, rounded_text, usd_text


def likely(planned: LayoutPrediction) -> LayoutPrediction:
    """Return a prediction with medians of days, cost and energy; its step stays that of the cost model."""
    return planned.lasting(planned.interval.median)


def whole_run(stages: Sequence[LayoutPrediction]) -> LayoutPrediction:
    """Add up days, cost and energy of the stages of a run; the rest is of the stage that needs most memory."""
    fullest = max(stages, key=lambda one: one.peak_memory)
    days = sum(one.days for one in stages)
    costs, energies = ([getattr(one, name) for one in stages] for name in ("cost_usd", "kwh"))

    def mean(values: Sequence[float]) -> float:
        return sum(one.days * value for one, value in zip(stages, values, strict=True)) / days

    return replace(
        fullest,
        days=days,
        cost_usd=None if None in costs else sum(costs),
        kwh=None if None in energies else sum(energies),
        mfu=mean([one.mfu for one in stages]),
        tokens_per_second=mean([one.tokens_per_second for one in stages]),
    )


def two_digits(value: float) -> str:
    """Write a number as certain as a prediction is; 3.0 rather than 3."""
    return f"{value:#.2g}" if 0.1 <= value < 9.95 else rounded_text(value, 2)


def _usd(value: float) -> str:
    return usd_text(value, 2)


def _kwh(value: float) -> str:
    return amount_text(1000 * value, "Wh", 2)


def median_days(planned: LayoutPrediction) -> str:
    """Days, as a column shows them."""
    return two_digits(planned.days)


def median_usd(planned: LayoutPrediction) -> str:
    """Cost, as a column shows it; empty without a price."""
    return "" if planned.cost_usd is None else _usd(planned.cost_usd)


def median_energy(planned: LayoutPrediction) -> str:
    """Energy, as a column shows it; empty without a power limit."""
    return "" if planned.kwh is None else _kwh(planned.kwh)


def interval_text(planned: LayoutPrediction, value: float, write: Callable[[float], str] = two_digits) -> str:
    """Range of a median."""
    return "-".join(map(write, planned.interval.around(value)))


def days_text(planned: LayoutPrediction) -> str:
    """Median and range of the duration: 9.6 days, 6.6 to 14; below a day in hours or minutes."""
    units = (("days", 1.0), ("hours", 24.0), ("minutes", 1440.0))
    unit, count = next((one for one in units if planned.days * one[1] >= 1), units[-1])
    return _with_range(planned, planned.days * count, two_digits, f" {unit}")


def usd_words(planned: LayoutPrediction) -> str:
    """Median and range of the cost; empty without a price."""
    return "" if planned.cost_usd is None else _with_range(planned, planned.cost_usd, _usd)


def energy_words(planned: LayoutPrediction) -> str:
    """Median and range of the energy; empty without a power limit."""
    return "" if planned.kwh is None else _with_range(planned, planned.kwh, _kwh)


def outlook(planned: LayoutPrediction) -> str:
    """Median and range of duration and cost."""
    return "; ".join(filter(None, (days_text(planned), usd_words(planned))))


def _with_range(planned: LayoutPrediction, value: float, write: Callable[[float], str], unit: str = "") -> str:
    low, high = map(write, planned.interval.around(value))
    return f"{write(value)}{unit}, {low} to {high}"
