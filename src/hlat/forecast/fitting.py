"""Fit the law of loss to small runs, and say how far it can be trusted for a larger one.

    (N, D, loss) of runs --fit_law--> ScalingLaw
                         --fit_range--> LawFit: the law, and others that the runs allow
    N, D --LawFit.loss--> LossRange: median, and the range of 4 of 5 runs

``fit_law`` minimizes a Huber loss of the logarithms of predicted and actual loss, as in Hoffmann et al. 2022 (arXiv
2203.15556, approach 3): for laws to be compared with published ones. A ladder has too few runs for that. ``fit_range``
adds what is known of such laws beforehand (``_EXPECTED``), and fits again and again, to other noise and around other
expectations, all at once: the laws found are spread as the runs leave them open (randomized maximum likelihood).

Where a ladder repeats a run with other seeds, their spread is the least noise of any run.
Noise and what is expected do not tell how wrong the law itself is. The ladder does: its largest runs are forecast from
the others, and the range gets wider or narrower by how far these forecasts are off. ``benchmarks/loss_laws.py`` has
the share of published larger runs that such ranges hold.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hlat.forecast.law import ScalingLaw

LEAST_RUNS = 5
"""Runs below which the law's five constants are not determined."""

Array = NDArray[np.float64]


class Observation(NamedTuple):
    """A finished run: its size, the tokens that it was trained on, and its loss in nats per token."""

    size: float
    tokens: float
    loss: float
    trunk: str = ""  # runs of one size and seed, or forked from one trunk, share noise; "" for a run of its own


def count_different(runs: Sequence[Observation]) -> int:
    """Count runs, those that differ by their seeds only as one."""
    return len({run[:2] for run in runs})


class LossRange(NamedTuple):
    """A loss that is expected, in nats per token: the median, and the range of 4 of 5 runs."""

    loss: float
    low: float
    high: float


@dataclass(frozen=True)
class LawFit:
    """The law that fits some runs best, and others that they allow: their spread is its uncertainty."""

    law: ScalingLaw
    samples: tuple[ScalingLaw, ...]
    noise: float  # standard deviation of log(loss) of a run around the law
    freedom: float = 1e9  # degrees of freedom of the noise
    least: float = 0.0  # least loss of the runs
    error: float = 0.0  # root mean square of log(forecast / loss) of the runs left out; 0 if none were
    left_out: int = 0
    width: float = 1.0  # factor of the range, from these forecasts
    seed_noise: float = 0.0  # standard deviation of log(loss) between seeds; 0 if no run was repeated

    def loss(self, size: float, tokens: float) -> LossRange:
        """Return the loss of a run of some size and tokens."""
        return around(self.law.loss(size, tokens), self.drawn(size, tokens))

    def drawn(self, size: float, tokens: float) -> Array:
        """Return losses that such a run may have, one for each sample."""
        # What the runs leave open, the noise of this run, and how wrong the law may be where no run has been.
        middle = math.log(self.law.loss(size, tokens))
        fall = max(0.0, math.log(self.least) - middle) if self.least else 0.0
        own = np.random.default_rng(0).standard_t(self.freedom, len(self.samples))
        spread = np.log(self._losses(size, tokens)) - middle + math.hypot(self.noise, _DRIFT * fall) * own
        drawn: Array = np.exp(middle + self.width * spread)
        return drawn

    def narrowing(self, run: tuple[float, float], target: tuple[float, float]) -> float:
        """Return by which factor the range of a target (size, tokens) is expected to shrink after a further run."""
        # Conditioning of jointly normal quantities, with the covariance of the samples.
        ours, theirs = (np.log(self._losses(*one)) for one in (target, run))
        covariance = np.cov(ours, theirs)
        after = covariance[0, 0] - covariance[0, 1] ** 2 / (covariance[1, 1] + self.noise**2)
        return float(np.sqrt((after + self.noise**2) / (covariance[0, 0] + self.noise**2)))

    def _losses(self, size: float, tokens: float) -> Array:
        e, a, b, alpha, beta = self._constants
        losses: Array = e + a / size**alpha + b / tokens**beta
        return losses

    @cached_property
    def _constants(self) -> Array:
        return np.array([[one.irreducible, one.a, one.b, one.alpha, one.beta] for one in self.samples]).T


def around(loss: float, drawn: Array) -> LossRange:
    """Return a loss with the range of 4 of 5 of those drawn."""
    low, high = np.quantile(drawn, (0.1, 0.9))
    return LossRange(loss, min(loss, float(low)), max(loss, float(high)))


_HUBER = 1e-3  # of log(loss), as in Hoffmann et al.
_OUTLIER = 2.0  # standard deviations beyond which a run pulls no harder
_EXPONENTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)
_STARTS, _STEPS = 6, 60
_EXPECTED = np.array([math.log(0.5), math.log(0.2), math.log(0.2), 0.32, 0.32])
"""log E, log of the A and the B term of a run in the middle, as shares of the least loss; alpha; beta.

Published alpha and beta: 0.34, 0.28 (Hoffmann et al. 2022); 0.35, 0.37 (Besiroglu et al. 2024, arXiv 2404.10102);
0.35, 0.35 (Muennighoff et al. 2023, 2305.16264). Their E is 1.7 to 1.9, where small runs end at 3 to 4.
"""
_SPREAD = np.array([0.25, 1.0, 1.0, 0.08, 0.08])  # standard deviations; of the exponents, twice that of those above
_NOISE, _NOISE_RUNS = 0.003, 2.0  # of log(loss), that seeds make, and how many residuals this expectation is worth
_RATIO = 1.0  # least ratio of the noise that runs of a trunk share to the noise that each has alone
_DRIFT = 0.12  # error of the law itself, as a share of the fall of log(loss) below the least one of the runs
_LEFT_OUT = 1 / 3  # of the runs: the largest ones, forecast from the others
_WIDTH_RUNS = 4.0  # left-out runs that a width of 1 is worth, and the most that count, since their errors are alike
_FAR = 6.0  # standard deviations; errors beyond count as this


@dataclass(frozen=True)
class _Problem:
    """Runs around their middle, what is expected of the constants, and what a residual weighs."""

    x: Array  # log of sizes, and of tokens, around the middle
    y: Array
    noise: Array  # (problems, 1)
    outlier: float  # multiples of the noise
    expected: Array  # (problems, 5)
    certainty: Array  # (5,): 1 / variance, 0 where nothing is expected
    unmixing: Array | None = None  # (runs, runs): makes residuals independent of each other; None takes them as such

    def residuals(self, laws: Array, logs: Array) -> tuple[Array, Array]:
        """Return residuals in multiples of the noise, and their slopes by the constants."""
        e, a, b, alpha, beta = (column[:, None] for column in laws.T)
        terms = np.stack(np.broadcast_arrays(e, a - alpha * self.x, b - beta * self.y))
        total = np.logaddexp.reduce(terms)
        share = np.exp(terms - total)
        slopes = np.stack([*share, -share[1] * self.x, -share[2] * self.y], axis=-1)
        residuals, slopes = (total - logs) / self.noise, slopes / self.noise[..., None]
        return (residuals, slopes) if self.unmixing is None else (residuals @ self.unmixing, self.unmixing @ slopes)

    def weights(self, residuals: Array) -> Array:
        return self.outlier / np.maximum(np.abs(residuals), self.outlier)

    def cost(self, laws: Array, logs: Array) -> Array:
        size = np.abs(self.residuals(laws, logs)[0])
        huber = np.where(size <= self.outlier, size**2 / 2, self.outlier * (size - self.outlier / 2))
        cost: Array = huber.sum(axis=1) + (self.certainty * (laws - self.expected) ** 2).sum(axis=1) / 2
        return cost

    def normal(self, laws: Array, logs: Array) -> tuple[Array, Array]:
        """Return matrix and right side of the normal equations of a Gauss-Newton step, without what is expected."""
        residuals, slopes = self.residuals(laws, logs)
        weighted = slopes * self.weights(residuals)[..., None]
        return weighted.swapaxes(1, 2) @ slopes, np.einsum("sni,sn->si", weighted, residuals)

    def minimize(self, laws: Array, logs: Array) -> Array:
        """Improve each law (problems, 5) by damped Gauss-Newton steps; ``logs`` are logarithms of losses."""
        cost, damping = self.cost(laws, logs), np.full(len(laws), 1e-3)
        for _ in range(_STEPS):
            matrix, slope = self.normal(laws, logs)
            slope = slope + self.certainty * (laws - self.expected)
            matrix = matrix + np.eye(5) * self.certainty
            size = np.trace(matrix, axis1=1, axis2=2) / 5
            damped = matrix + (damping * size)[:, None, None] * np.eye(5)
            tried = laws - np.linalg.solve(damped, slope[..., None])[..., 0]
            tried[:, 3:] = np.clip(tried[:, 3:], 0.01, 2.0)
            tried[:, :3] = np.clip(tried[:, :3], -30.0, 30.0)
            less = self.cost(tried, logs)
            better, gain = less < cost, np.abs(cost - less)
            laws, cost = np.where(better[:, None], tried, laws), np.where(better, less, cost)
            damping = np.clip(np.where(better, damping / 8, damping * 5), 1e-14, 1e8)
            if np.all((gain <= 1e-13 * (1 + cost)) & (better | (damping > 1e3))):
                break
        return laws


class _Runs(NamedTuple):
    """Runs as arrays, and their middle."""

    x: Array
    y: Array
    logs: Array
    middle: tuple[float, float]

    @classmethod
    def of(cls, runs: Sequence[Observation]) -> "_Runs":
        if len(runs) < LEAST_RUNS:
            raise ValueError(f"{len(runs)} runs do not determine the five constants of the law")
        sizes, tokens, logs = np.log(np.array([run[:3] for run in runs], dtype=np.float64)).T
        middle = float(sizes.mean()), float(tokens.mean())
        return cls(sizes - middle[0], tokens - middle[1], logs, middle)

    def law(self, constants: Array) -> ScalingLaw:
        e, a, b, alpha, beta = (float(one) for one in constants)
        return ScalingLaw(
            math.exp(e), math.exp(a + alpha * self.middle[0]), math.exp(b + beta * self.middle[1]), alpha, beta
        )

    def starts(self) -> Array:
        """Return laws of a grid of exponents: for given ones, the other constants follow by least squares."""
        found = []
        losses = np.exp(self.logs)
        for alpha in _EXPONENTS:
            for beta in _EXPONENTS:
                columns = np.stack([np.ones_like(self.x), np.exp(-alpha * self.x), np.exp(-beta * self.y)], axis=1)
                solved, *_ = np.linalg.lstsq(columns / losses[:, None], np.ones_like(self.x), rcond=None)
                # No term of the law is negative.
                found.append([*np.log(np.maximum(solved, 0.01 * losses.min())), alpha, beta])
        return np.array(found)

    def best(self, problem: _Problem, starts: Array) -> Array:
        starts = starts[np.argsort(problem.cost(starts, self.logs), kind="stable")[:_STARTS]]
        laws = problem.minimize(starts, self.logs)
        best: Array = laws[int(np.argmin(problem.cost(laws, self.logs)))]
        return best


def _seed_noise(runs: Sequence[Observation]) -> tuple[float, int]:
    """Return the standard deviation of log(loss) between runs of one size and length, and its degrees of freedom."""
    alike = defaultdict[tuple[float, float], list[float]](list)
    for run in runs:
        alike[run.size, run.tokens].append(math.log(run.loss))
    squares = sum(len(logs) * float(np.var(logs)) for logs in alike.values())
    freedom = len(runs) - len(alike)
    return math.sqrt(squares / max(1, freedom)), freedom


def fit_law(runs: Sequence[Observation]) -> ScalingLaw:
    """Return the law that fits some runs best; ValueError if they are fewer than five."""
    these = _Runs.of(runs)
    nothing = np.zeros((1, 5))
    problem = _Problem(these.x, these.y, np.full((1, 1), _HUBER), 1.0, nothing, nothing[0])
    return these.law(these.best(problem, these.starts()))


def fit_range(runs: Sequence[Observation], samples: int = 200, seed: int = 0) -> LawFit:
    """Fit the law, and as many others that the runs allow; the same runs give the same bits.

    Runs of one trunk share noise, so that they say less of the law than others.
    ValueError: fewer than five runs.
    """
    fit = _fitted(runs, samples, seed)
    ordered = sorted(runs, key=lambda run: run.size * run.tokens)
    different = count_different(runs)
    count = min(max(1, round(different * _LEFT_OUT)), different - LEAST_RUNS)
    if count <= 0:
        return fit
    kept, held = ordered[:-count], ordered[-count:]
    trial = _fitted(kept, samples, seed)
    errors = np.array([math.log(trial.law.loss(run.size, run.tokens) / run.loss) for run in held])
    ranges = np.array([trial.loss(run.size, run.tokens) for run in held])
    expected = np.log(ranges[:, 2] / ranges[:, 1]) / 2 / 1.2816  # 4 of 5 runs are within 1.28 standard deviations
    square = float(np.mean(np.minimum(np.abs(errors) / expected, _FAR) ** 2))
    weight = min(_WIDTH_RUNS, len(held))
    width = math.sqrt((_WIDTH_RUNS + weight * square) / (_WIDTH_RUNS + weight))
    return replace(fit, error=float(np.sqrt(np.mean(errors**2))), left_out=len(held), width=width)


def _fitted(runs: Sequence[Observation], samples: int, seed: int) -> LawFit:
    these = _Runs.of(runs)
    expected = (_EXPECTED + np.array([these.logs.min()] * 3 + [0.0, 0.0]))[None]
    certainty = _SPREAD**-2
    laws, noise, freedom = these.starts(), _NOISE, _NOISE_RUNS
    (between_seeds, repeats), ratio = _seed_noise(runs), _RATIO
    for _ in range(8):  # the noise follows from the law, and the law from the noise
        mixing = _mixing(runs, ratio)
        # Published ladders, by which ranges were judged without this, repeat no run.
        unmixing: Array | None = np.asarray(np.linalg.inv(mixing), np.float64) if repeats else None
        problem = _Problem(these.x, these.y, np.full((1, 1), noise), _OUTLIER, expected, certainty, unmixing)
        laws = these.best(problem, laws)[None]
        residuals = problem.residuals(laws, these.logs)[0]
        matrix = problem.normal(laws, these.logs)[0][0]
        used = float(np.trace(np.linalg.solve(matrix + np.diag(certainty), matrix)))  # constants the runs determine
        freedom = max(0.0, len(runs) - used) + _NOISE_RUNS
        squares = float((problem.weights(residuals) * residuals**2).sum()) * noise**2
        noise = math.sqrt((squares + _NOISE_RUNS * _NOISE**2) / freedom)
        # The law's term of the size follows what runs of a size have in common, so residuals show what they have not.
        ratio = math.sqrt(max(_RATIO**2, (between_seeds / noise) ** 2 - 1))
    law = laws[0]
    if ratio > _RATIO:
        freedom = min(freedom, repeats)
    draw = np.random.default_rng(seed)
    noises = noise * np.sqrt(freedom / draw.chisquare(freedom, (samples, 1)))
    logs = np.logaddexp.reduce([law[0] + 0 * these.x, law[1] - law[3] * these.x, law[2] - law[4] * these.y])
    logs = logs + noises * (draw.normal(size=(samples, len(runs))) @ mixing)
    others = law + draw.normal(size=(samples, 5)) * _SPREAD
    problem = _Problem(these.x, these.y, noises, _OUTLIER, others, certainty, unmixing)
    found = problem.minimize(np.repeat(laws, samples, axis=0), logs)
    whole = max(noise, between_seeds)
    least = min(run.loss for run in runs)
    return LawFit(these.law(law), tuple(map(these.law, found)), whole, freedom, least, seed_noise=between_seeds)


def _mixing(runs: Sequence[Observation], ratio: float) -> Array:
    """Return the root of the covariance of the noise, in multiples of the part that runs of a trunk do not share.

    (runs, runs); ``ratio`` is that of the standard deviations of the shared and the other part.
    """
    shares: Array = np.array([[one.trunk == other.trunk != "" for other in runs] for one in runs], dtype=np.float64)
    count = np.maximum(shares.sum(axis=0), 1.0)
    mixing: Array = np.eye(len(runs)) + shares * (np.sqrt(1 + count * ratio**2) - 1) / count
    return mixing
