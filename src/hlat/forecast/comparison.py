"""Comparison of the validation losses of a run with its forecast.

    Forecast, fraction of the tokens --expected_at--> LossRange, between the points of the curve
    loss, LossRange, of one evaluation after the other --ForecastWatch.check--> how many in a row were too high

A range holds 4 of 5 runs, so a run leaves it often and without a reason. And a run that is above it at one evaluation
usually is at the next one too. So a loss is too high only above a wider range, and only several in a row say that more
than noise has lifted them. How often they do so by chance:

    one loss             1 in 200: the wider range holds 99 % of the runs, and only those above it count
    a run, at the least  1 in 200: it keeps its distance from the law, so its evaluations tell the same
    a run, at the most   1 in 200 for each time that it forgets its distance; a few in 200 for a handful of times
    without any memory   (1 / 200)^3 for each evaluation: three in a row are never noise of the evaluation itself

This holds as far as the logarithm of the loss is normally distributed beyond the range, too.
"""

from dataclasses import dataclass

import numpy as np

from hlat.forecast.fitting import LossRange
from hlat.forecast.ladder import Forecast

TOO_HIGH_IN_A_ROW = 3
"""Evaluations in a row that are too high, from which more than noise has lifted them."""
# Half widths of a normal distribution: that of 99 % over that of 80 %.
_WIDER = 2.5758 / 1.2816


def expected_at(forecast: Forecast, fraction: float) -> LossRange | None:
    """Return the loss expected at a fraction of a run's tokens; None before or after the points of the curve."""
    fractions, losses = zip(*forecast.curve, strict=True)
    if not fractions[0] <= fraction <= fractions[-1]:
        return None
    return LossRange(*(float(np.interp(fraction, fractions, values)) for values in zip(*losses, strict=True)))


def highest_by_chance(expected: LossRange) -> float:
    """Return the loss that 1 of 200 runs exceeds."""
    highest: float = expected.loss * (expected.high / expected.loss) ** _WIDER
    return highest


@dataclass
class ForecastWatch:
    """Counts evaluations in a row that are too high. It is a function of the losses alone, and part of checkpoints."""

    sha256: str = ""  # of the forecast: with another one, the count begins anew
    too_high: int = 0
    good_step: int = 0  # of the last evaluation that was not

    def check(self, step: int, loss: float, expected: LossRange) -> int:
        """Return how many evaluations in a row were too high, this one included."""
        if loss <= highest_by_chance(expected):  # not so if the loss is NaN
            self.too_high, self.good_step = 0, step
        else:
            self.too_high += 1
        return self.too_high
