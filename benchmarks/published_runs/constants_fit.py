"""Fit of the cost model's constants to runs, fast enough to leave out one source after another.

    runs -> log step time and its slopes by log constant -> coordinate descent on the linear model -> constants; again

The loss is the mean of |log(predicted / measured)|, capped at 0.5, over sources weighted by n^0.4 (runs of one source
are not independent), plus 0.002 x the squared distance of each constant from its prior in units of its spread. The
second round takes the slopes at the constants of the first, so that the result fits the model, not its linearization.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
import yaml
from numpy.typing import NDArray

from hlat.planner.cost.calibration import Constants
from hlat.planner.problem.workload import FAMILIES, Column, WorkloadColumns
from published_runs.program import run_steps

Key = tuple[str, str]

_CAP, _WEIGHT, _PULL = 0.5, -0.6, 0.002
_LOG_STEP = 0.02  # of the difference quotient of a slope
_STEPS = (0.1, 0.03, 0.01, 0.003)  # of the coordinate descent, in the logarithm
_UPPER = {"products": 1.05, "link": 1.0, "network": 1.0, "memory": 0.95, "exposed_tensor": 1.0, "hiding": 1.0,
          "fused_traffic": 1.0, "recomputed": 1.0}  # fmt: skip


@dataclass(frozen=True)
class Prior:
    """Starting value of a constant in a fit, and the standard deviation of its logarithm."""

    value: float
    spread: float


@cache
def load_priors() -> dict[Key, Prior]:
    """Priors of a fit, which starts from them and is pulled towards them, by constant and family."""
    content = yaml.safe_load(files("hlat.planner.cost").joinpath("constants.yaml").read_text(encoding="utf-8"))
    priors = {}
    for name, entry in content.items():
        spreads = entry["prior"].get("spreads", {})
        for family, value in entry["prior"].items():
            if family not in ("spread", "spreads"):
                spread = spreads.get(family, entry["prior"]["spread"])
                priors[name, family] = Prior(float(value), float(spread))
    return priors


def prior_constants() -> Constants:
    """The constants before any fit."""
    return Constants({key: prior.value for key, prior in load_priors().items()})


class ConstantsFit:
    """Fits of constants to subsets of the same runs.

    Args:
        columns: workloads of the runs.
        measured: seconds of a step.
        keys: source and family of each run; rows of one key share a weight.
    """

    def __init__(self, columns: WorkloadColumns, measured: Column, keys: NDArray[np.str_]) -> None:
        self._columns, self._log_measured = columns, np.log(measured)
        _, group, counts = np.unique(keys, return_inverse=True, return_counts=True)
        self._weights: Column = counts[group].astype(float) ** _WEIGHT
        present = {FAMILIES[int(code)] for code in columns.family}
        self._priors = {
            key: prior
            for key, prior in load_priors().items()
            if prior.spread > 0 and (key[1] not in FAMILIES or key[1] in present)
        }
        self._slopes: dict[tuple[float, ...], tuple[Column, Column]] = {}

    def fit(self, rows: NDArray[np.bool_], rounds: int = 2) -> Constants:
        """Constants that fit some of the runs; the priors if there are none."""
        constants = prior_constants()
        if not rows.any():
            return constants
        for _ in range(rounds):
            log_steps, slopes = self._linear(constants)
            changes = self._descend(
                constants, (log_steps - self._log_measured)[rows], slopes[rows], self._weights[rows]
            )
            constants = constants.with_values(changes)
        return constants

    def _linear(self, constants: Constants) -> tuple[Column, Column]:
        """Log step times, and their derivative by the logarithm of each constant."""
        at = tuple(constants.values[key] for key in self._priors)
        if at not in self._slopes:
            base = np.log(run_steps(self._columns, constants).step)
            slopes = np.empty((len(base), len(self._priors)))
            for index, key in enumerate(self._priors):
                moved = constants.with_values({key: constants.values[key] * float(np.exp(_LOG_STEP))})
                slopes[:, index] = (np.log(run_steps(self._columns, moved).step) - base) / _LOG_STEP
            if len(self._slopes) < 2:  # the priors' and one more; every left-out fit has points of its own
                self._slopes[at] = base, slopes
            return base, slopes
        return self._slopes[at]

    def _descend(self, constants: Constants, errors: Column, slopes: Column, weights: Column) -> Mapping[Key, float]:
        """Minimize the loss of the linear model, one constant at a time."""
        share = weights / weights.sum()
        names = list(self._priors)
        start = np.array([np.log(constants.values[key] / self._priors[key].value) for key in names])
        spreads = np.array([self._priors[key].spread for key in names])
        highest = np.array([np.log(_UPPER.get(key[0], np.inf) / self._priors[key].value) for key in names])
        at = start.copy()
        lowest = float(share @ np.minimum(np.abs(errors), _CAP)) + _PULL * float(((at / spreads) ** 2).sum())
        for step in _STEPS:
            moved = True
            while moved:
                moved = False
                for index in range(len(names)):
                    for sign in (step, -step):
                        target = min(at[index] + sign, highest[index])
                        changed = errors + slopes[:, index] * (target - at[index])
                        pull = _PULL * float((target**2 - at[index] ** 2) / spreads[index] ** 2)
                        others = _PULL * float(((at / spreads) ** 2).sum())
                        found = float(share @ np.minimum(np.abs(changed), _CAP)) + others + pull
                        if found < lowest - 1e-7:
                            at[index], errors, lowest, moved = target, changed, found, True
                            break
        return {key: self._priors[key].value * float(np.exp(value)) for key, value in zip(names, at, strict=True)}
