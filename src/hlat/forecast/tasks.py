"""Accuracy of a larger run on tasks that the runs of a ladder were scored on, in two steps: Bhagia et al. 2024.

    losses, scores of runs --fit_tasks--> TaskFit by task, and the reasons why others have none
    loss of a run and others that it may have --TaskFit.accuracy--> accuracy, and the range of 4 of 5 runs

Bits per byte of the gold answers are a straight line of the validation loss. Accuracy is a sigmoid of these bits, from
chance to 1; runs do not record chance, so it is fitted, too. As in fitting.py, both are fitted again and again to other
noise. The source (arXiv 2412.04403) also takes points within runs for the second step. A run shares one seed, and forks
share the way to them, so such points would make the range too narrow: only the ends of runs count here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hlat.forecast.fitting import LEAST_RUNS, around
from hlat.runtime.terminal import NAMED, listed

Array = NDArray[np.float64]

_SAMPLES, _STEPS = 200, 60
_EXPECTED = np.array([0.3, np.log(6.0), 0.6])
"""Lower end; log of the steepness and the middle, with the mean bits of the ladder as unit: small models are near the
lower end, and a model that needs no bits for the gold answers is right."""
_SPREAD = np.array([0.15, 0.6, 0.3])  # standard deviations: wide, so that runs that say more overrule them
_LOWEST, _HIGHEST = np.array([0.0, -2.0, -1.0]), np.array([0.95, 4.0, 2.0])
_STARTS = np.array([[0.2, steep, middle] for steep in (1.0, 2.0, 3.0) for middle in (0.3, 0.6, 0.9, 1.2)])
_EXACT = 1e-6  # of an accuracy: noise below it is none
_BY_CHANCE = 0.02  # share of orders of the accuracies that may rise with falling loss as much as theirs


@dataclass(frozen=True)
class TaskFit:
    """Lines and sigmoids of one task; the first row of each fits best, and the others are what the runs allow."""

    lines: Array  # (samples, 2): bits per byte at loss 0, slope
    sigmoids: Array  # (samples, 3): lower end, log of steepness, middle
    unit: float  # bits that the sigmoids count as 1
    noises: Array  # (samples, 2): standard deviation of bits around the line, of accuracies around the sigmoid

    def accuracy(self, loss: float, drawn: Array) -> tuple[float, float, float]:
        """Return the accuracy at a loss, and the range of 4 of 5 runs with the losses that a run may have."""
        rows = 1 + np.arange(len(drawn)) % (len(self.lines) - 1)
        own = np.random.default_rng(2).normal(size=(len(drawn), 2)) * self.noises[rows]
        values = self._accuracies(rows, drawn, own[:, 0]) + own[:, 1]
        best = float(self._accuracies(np.zeros(1, dtype=int), np.array([loss]), np.zeros(1))[0])
        value, low, high = around(best, np.clip(values, 0.0, 1.0))
        return value, low, high

    def _accuracies(self, rows: NDArray[np.int_], losses: Array, noise: Array) -> Array:
        bits = np.maximum(0.0, self.lines[rows, 0] + self.lines[rows, 1] * losses + noise)
        return _sigmoid(self.sigmoids[rows], bits[:, None] / self.unit)[:, 0]


def fit_tasks(runs: Sequence[tuple[float, Mapping[str, float]]]) -> tuple[dict[str, TaskFit], list[str]]:
    """Fit each task to the validation losses of runs and their scores: TASK/acc and TASK/bits_per_byte.

    Return the fits by task, and a sentence for each reason why tasks are left out.
    """
    fits, few, flat = dict[str, TaskFit](), list[str](), list[str]()
    for task in sorted({name.removesuffix("/acc") for _, scores in runs for name in scores if name.endswith("/acc")}):
        names = f"{task}/bits_per_byte", f"{task}/acc"
        points = np.array([[loss, *(scores[one] for one in names)] for loss, scores in runs if {*names} <= {*scores}])
        if len(points) < LEAST_RUNS:
            few.append(task)
        elif not _rises(-points[:, 0], points[:, 2]):
            flat.append(task)
        else:
            fits[task] = _fit(*points.T)
    reasons = ((few, f"it has scores of fewer than {LEAST_RUNS} runs"), (flat, "it does not rise as the loss falls"))
    return fits, [f"the ladder forecasts no accuracy where {why}: {listed(tasks, NAMED)}" for tasks, why in reasons
                  if tasks]  # fmt: skip


def _rises(x: Array, y: Array) -> bool:
    """Return True if y rises with x more than by chance."""
    if np.ptp(y) == 0:
        return False
    x = x - x.mean()
    others = np.random.default_rng(0).permuted(np.tile(y, (2000, 1)), axis=1) @ x
    return bool(np.mean(others >= y @ x - 1e-12) <= _BY_CHANCE)


def _fit(losses: Array, bits: Array, accuracies: Array) -> TaskFit:
    draw, unit = np.random.default_rng(1), float(bits.mean())
    columns = np.column_stack([np.ones_like(losses), losses])
    line = np.linalg.lstsq(columns, bits, rcond=None)[0]
    off = bits - columns @ line
    around_line = _noises(float(off @ off), len(bits) - 2.0, draw)
    others = columns @ line + around_line * draw.normal(size=(_SAMPLES, len(bits)))
    lines = np.linalg.lstsq(columns, others.T, rcond=None)[0].T
    x, noise, tried = bits / unit, 0.02, _STARTS
    for _ in range(8):  # the noise follows from the sigmoid, and the sigmoid from the noise
        tried = _minimize(tried, x, accuracies, np.full((1, 1), noise), _EXPECTED)
        best = tried[np.argmin(_cost(tried, x, accuracies, np.full((1, 1), noise), _EXPECTED))]
        slopes = _slopes(best[None], x)[0] / noise
        matrix = slopes.T @ slopes
        freedom = len(x) - float(np.trace(np.linalg.solve(matrix + np.diag(_SPREAD**-2), matrix)))
        squares = float(np.sum((_sigmoid(best[None], x)[0] - accuracies) ** 2))
        noise = max(_EXACT, (squares / freedom) ** 0.5)
    noises = _noises(noise**2 * freedom, freedom, draw)
    wanted = _sigmoid(best[None], x) + noises * draw.normal(size=(_SAMPLES, len(x)))
    expected = best + draw.normal(size=(_SAMPLES, 3)) * _SPREAD
    sigmoids = _minimize(np.repeat(best[None], _SAMPLES, axis=0), x, wanted, noises, expected)
    return TaskFit(
        np.vstack([line, lines]), np.vstack([best, sigmoids]), unit,
        np.vstack([np.zeros((1, 2)), np.hstack([around_line, noises])]),
    )  # fmt: skip


def _noises(squares: float, freedom: float, draw: np.random.Generator) -> Array:
    """Draw standard deviations that leave a sum of squared residuals as this one; (samples, 1)."""
    return np.sqrt(squares / draw.chisquare(freedom, (_SAMPLES, 1)))


def _sigmoid(rows: Array, x: Array) -> Array:
    low, steep, middle = (column[:, None] for column in rows.T)
    accuracies: Array = low + (1 - low) / (1 + np.exp(np.clip(np.exp(steep) * (x - middle), -60, 60)))
    return accuracies


def _slopes(rows: Array, x: Array) -> Array:
    """Return slopes of the sigmoids by their constants; (rows, points, 3)."""
    low, steep, middle = (column[:, None] for column in rows.T)
    share = (_sigmoid(rows, x) - low) / (1 - low)
    by_middle = (1 - low) * share * (1 - share) * np.exp(steep)
    return np.stack([1 - share, by_middle * (middle - x), by_middle], axis=-1)


def _cost(rows: Array, x: Array, y: Array, noise: Array, expected: Array) -> Array:
    off = ((_sigmoid(rows, x) - y) / noise) ** 2
    cost: Array = off.sum(axis=1) + (((rows - expected) / _SPREAD) ** 2).sum(axis=1)
    return cost


def _minimize(rows: Array, x: Array, y: Array, noise: Array, expected: Array) -> Array:
    """Improve each row by damped Gauss-Newton steps."""
    cost, damping = _cost(rows, x, y, noise, expected), np.full(len(rows), 1e-3)
    for _ in range(_STEPS):
        slopes = _slopes(rows, x) / noise[..., None]
        side = np.einsum("sni,sn->si", slopes, (_sigmoid(rows, x) - y) / noise) + (rows - expected) / _SPREAD**2
        matrix = slopes.swapaxes(1, 2) @ slopes + np.diag(_SPREAD**-2)
        damped = matrix + damping[:, None, None] * np.eye(3) * np.diagonal(matrix, axis1=1, axis2=2)[:, None]
        tried = np.clip(rows - np.linalg.solve(damped, side[..., None])[..., 0], _LOWEST, _HIGHEST)
        less = _cost(tried, x, y, noise, expected)
        better = less < cost
        if np.all(np.abs(cost - less) <= 1e-12 * cost):
            break
        rows, cost = np.where(better[:, None], tried, rows), np.where(better, less, cost)
        damping = np.clip(np.where(better, damping / 8, damping * 5), 1e-12, 1e8)
    return rows
