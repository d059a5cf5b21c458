"""Shapes of the loss within a run, from the validations of a ladder's runs.

    curves of runs --fit_shapes--> CurveShape at fractions of a run: log(loss there / last loss), by size and tokens

The schedule and the batch decide it, and the runs of a ladder share both. So what is left is a slow change with size
and tokens, which a straight line in their logarithms follows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_FRACTIONS = np.linspace(0.05, 0.95, 19)
_LEAST_CURVES = 3
_SLOPE = 0.02  # standard deviation of the expected slopes: of log(loss) per e-fold of size or tokens
_NOISE, _NOISE_RUNS = 0.003, 2.0  # as in fitting.py


class RunCurve(NamedTuple):
    """Validations of a run of some size and tokens: fraction of its tokens, loss; the last is the end."""

    size: float
    tokens: float
    points: Sequence[tuple[float, float]]


class CurveShape(NamedTuple):
    """Logarithm of the ratio of the loss at a fraction of a run to that at its end, and its standard deviation."""

    fraction: float
    ratio: float
    spread: float


def fit_shapes(curves: Sequence[RunCurve], size: float, tokens: float) -> list[CurveShape]:
    """Return the shape of a run of some size and tokens, at each fraction that enough curves reach."""
    found = []
    for fraction in _FRACTIONS:
        # A curve begins with its first validation.
        known = [curve for curve in curves if len(curve.points) > 1 and 0 < curve.points[0][0] <= fraction]
        if len(known) >= _LEAST_CURVES:
            logs = np.log([[curve.size / size, curve.tokens / tokens] for curve in known])
            ratios = np.array([_ratio_at(curve.points, fraction) for curve in known])
            found.append(CurveShape(float(fraction), *_at_origin(logs, ratios)))
    return found


def _ratio_at(points: Sequence[tuple[float, float]], fraction: float) -> float:
    fractions, losses = np.log(np.array(points)).T
    return float(np.interp(np.log(fraction), fractions, losses) - losses[-1])


def _at_origin(logs: NDArray[np.float64], ratios: NDArray[np.float64]) -> tuple[float, float]:
    """Return value and standard deviation, at 0, of a line through ratios at ``logs``, with slopes expected small."""
    middle = logs.mean(axis=0)
    columns = np.column_stack([np.ones(len(logs)), logs - middle])
    certainty = np.diag([0.0, _SLOPE**-2, _SLOPE**-2])
    variance = _NOISE**2
    for _ in range(8):  # the noise follows from the line, and the line from the noise
        matrix = columns.T @ columns / variance + certainty
        line = np.linalg.solve(matrix, columns.T @ ratios / variance)
        used = float(np.trace(np.linalg.solve(matrix, columns.T @ columns / variance)))
        squares = float(np.sum((ratios - columns @ line) ** 2))
        variance = (squares + _NOISE_RUNS * _NOISE**2) / (max(0.0, len(ratios) - used) + _NOISE_RUNS)
    here = np.array([1.0, *-middle])
    return float(here @ line), float(np.sqrt(variance + here @ np.linalg.solve(matrix, here)))
