"""Fit of the fitted constants of the time model: the rates that a step sustains, by family of chips and precision.

    runs -> log(measured / predicted) -> weighted median, the known value weighing as two sources -> constants; again

Runs of one source are not independent: each source weighs the same, shared by its runs. The known value, of large
products measured alone less a tenth, weighs as much as two sources, so that a family with few keeps near it.
"""

import numpy as np
from numpy.typing import NDArray

from hlat.planner.cost.calibration import Constants, load_constants
from hlat.planner.problem.workload import CHIP_FAMILIES, FAMILIES, Column, WorkloadColumns
from published_runs.intervals import weighted_quantile
from published_runs.program import run_steps

FITTED = ("products", "eight_bit")
PRIOR = {"ampere": 0.90, "hopper": 0.90, "blackwell": 0.85, "tpu": 0.90, "trainium": 0.70}
"""Power limits and stragglers cost about a tenth; Trainium's compiler is younger, and no best rate is published."""
_PRIOR_SOURCES = 2.0
_ROUNDS = 6
_LOWEST, _HIGHEST = 0.3, 1.05  # of the rate of the best products


def prior_constants() -> Constants:
    """The constants before any fit."""
    known = {key: value for key, value in load_constants().values.items() if key[0] not in FITTED}
    own = {name: PRIOR.get(family.like or name, 0.0) for name, family in CHIP_FAMILIES.items()}
    own["measured"] = load_constants().values["products", "measured"]
    return Constants({**known, **{(name, family): value for name in FITTED for family, value in own.items()}})


def fit_constants(columns: WorkloadColumns, measured: Column, sources: NDArray[np.str_]) -> Constants:
    """Fit ``FITTED`` of every family to runs; ``measured`` seconds of a step, ``sources`` of each run."""
    constants = priors = prior_constants()
    keys = [
        (FITTED[int(eight)], FAMILIES[int(code)]) for eight, code in zip(columns.eight_bit, columns.family, strict=True)
    ]
    groups = {key: np.array([one == key for one in keys]) for key in dict.fromkeys(keys)}
    for _ in range(_ROUNDS):
        steps = run_steps(columns, constants)
        # The part of a step that the constant changes.
        share = np.clip((steps.products + steps.recomputed + steps.bubble + steps.head) / steps.step, 0.3, 1.0)
        wanted = np.log(measured / steps.step) / share
        changes = {}
        for key, rows in groups.items():
            _, group, counts = np.unique(sources[rows], return_inverse=True, return_counts=True)
            start = np.log(constants.values[key] / priors.values[key])
            values, weights = np.append(wanted[rows], start), np.append(1.0 / counts[group], _PRIOR_SOURCES)
            slower = weighted_quantile(values, weights, 0.5)
            changes[key] = float(np.clip(constants.values[key] * np.exp(-slower), _LOWEST, _HIGHEST))
        constants = constants.with_values(changes)
    return constants
