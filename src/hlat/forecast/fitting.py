"""Fit the law of loss to small runs, and say how far it can be trusted for a larger one.

    (N, D, loss) of some runs --fit_law--> ScalingLaw --fit_range--> LawFit: the law, and others that fit as well
    N, D --LawFit.loss--> LossRange: median, and the range of 4 of 5 runs

The constants minimize a Huber loss of the logarithms of predicted and actual loss, as in Hoffmann et al. 2022 (arXiv
2203.15556, approach 3): a run that went wrong moves them little. For given exponents the law is linear, so a grid of
exponents, and least squares at each, finds a start; a damped Gauss-Newton iteration goes on from there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hlat.forecast.law import ScalingLaw

LEAST_RUNS = 5
"""Runs below which the law's five constants are not determined."""

Vector = NDArray[np.float64]


class Observation(NamedTuple):
    """A finished run: its size, the tokens that it was trained on, and its loss in nats per token."""

    size: float
    tokens: float
    loss: float


class LossRange(NamedTuple):
    """A loss that is expected, in nats per token: the median, and the range of 4 of 5 runs."""

    loss: float
    low: float
    high: float


@dataclass(frozen=True)
class LawFit:
    """The law that fits some runs best, and other laws that fit resampled runs: their spread is its uncertainty."""

    law: ScalingLaw
    samples: tuple[ScalingLaw, ...]
    noise: float  # standard deviation of log(loss) of a run around the law

    def loss(self, size: float, tokens: float) -> LossRange:
        """Return the loss of a run of some size and tokens."""
        # The noise of the run itself comes on top of what is not known of the law.
        spread = np.random.default_rng(0).normal(0.0, self.noise, len(self.samples))
        drawn = [law.loss(size, tokens) * math.exp(own) for law, own in zip(self.samples, spread, strict=True)]
        low, high = np.quantile(drawn, (0.1, 0.9))
        loss = self.law.loss(size, tokens)
        return LossRange(loss, min(loss, float(low)), max(loss, float(high)))


_HUBER = 1e-3  # of log(loss), as in Hoffmann et al.
_EXPONENTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)
_STEPS = 60


def fit_law(runs: Sequence[Observation]) -> ScalingLaw:
    """Return the law that fits some runs best; ValueError if they are fewer than five."""
    if len(runs) < LEAST_RUNS:
        raise ValueError(f"{len(runs)} runs do not determine the five constants of the law")
    sizes, tokens, losses = (np.array(column, dtype=np.float64) for column in zip(*runs, strict=True))
    middle = math.exp(np.log(sizes).mean()), math.exp(np.log(tokens).mean())
    x, y = np.log(sizes / middle[0]), np.log(tokens / middle[1])
    starts = [_start(x, y, losses, alpha, beta) for alpha in _EXPONENTS for beta in _EXPONENTS]
    starts.sort(key=lambda start: _cost(start, x, y, losses))
    best = min((_improved(start, x, y, losses) for start in starts[:3]), key=lambda one: _cost(one, x, y, losses))
    e, a, b = np.exp(best[:3])
    alpha, beta = best[3:]
    return ScalingLaw(float(e), float(a * middle[0] ** alpha), float(b * middle[1] ** beta), float(alpha), float(beta))


def fit_range(runs: Sequence[Observation], samples: int = 200, seed: int = 0) -> LawFit:
    """Fit the law, and laws of as many resampled sets of residuals; the same runs give the same bits."""
    law = fit_law(runs)
    law_losses = np.array([law.loss(run.size, run.tokens) for run in runs])
    residuals = np.log([run.loss for run in runs]) - np.log(law_losses)
    # Five constants were fitted, so the residuals are smaller than the noise.
    noise = float(np.sqrt(np.sum(residuals**2) / max(1, len(runs) - 5)))
    draw = np.random.default_rng(seed)
    laws = []
    for _ in range(samples):
        own = draw.normal(0.0, noise, len(runs))
        drawn = [
            run._replace(loss=law.loss(run.size, run.tokens) * math.exp(r)) for run, r in zip(runs, own, strict=True)
        ]
        laws.append(fit_law(drawn))
    return LawFit(law, tuple(laws), noise)


def _start(x: Vector, y: Vector, losses: Vector, alpha: float, beta: float) -> Vector:
    """Return logarithms of E, A and B that fit best for given exponents, then the exponents."""
    columns = np.stack([np.ones_like(x), np.exp(-alpha * x), np.exp(-beta * y)], axis=1) / losses[:, None]
    solved, *_ = np.linalg.lstsq(columns, np.ones_like(x), rcond=None)
    # No term of the law is negative.
    return np.array([*np.log(np.maximum(solved, 1e-3)), alpha, beta])


def _terms(law: Vector, x: Vector, y: Vector) -> Vector:
    return np.stack([np.full_like(x, law[0]), law[1] - law[3] * x, law[2] - law[4] * y])


def _residuals(law: Vector, x: Vector, y: Vector, losses: Vector) -> Vector:
    logarithms: Vector = np.logaddexp.reduce(_terms(law, x, y))
    return logarithms - np.log(losses)


def _cost(law: Vector, x: Vector, y: Vector, losses: Vector) -> float:
    size = np.abs(_residuals(law, x, y, losses))
    return float(np.sum(np.where(size <= _HUBER, size**2 / 2, _HUBER * (size - _HUBER / 2))))


def _improved(law: Vector, x: Vector, y: Vector, losses: Vector) -> Vector:
    """Go on from a start by damped Gauss-Newton steps with Huber's weights."""
    damping, cost = 1e-3, _cost(law, x, y, losses)
    for _ in range(_STEPS):
        terms, residuals = np.exp(_terms(law, x, y)), _residuals(law, x, y, losses)
        share = terms / terms.sum(axis=0)
        slopes = np.stack([*share, -share[1] * x, -share[2] * y], axis=1)
        weights = _HUBER / np.maximum(np.abs(residuals), _HUBER)
        normal = slopes.T @ (weights[:, None] * slopes)
        step = np.linalg.solve(normal + damping * np.eye(5), -slopes.T @ (weights * residuals))
        tried = law + step
        tried[3:] = np.clip(tried[3:], 0.01, 2.0)
        if (less := _cost(tried, x, y, losses)) < cost:
            law, cost, damping = tried, less, max(damping / 5, 1e-12)
        elif damping > 1e6:
            break
        else:
            damping *= 5
    return law
