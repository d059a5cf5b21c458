"""Baseline of every claim of accuracy: one constant per chip family and precision.

    FLOPs of the step / (peak x e) x pipeline bubble, with e the median over the other sources' medians

No throughput of a run's own source enters its prediction.
"""

import numpy as np
from numpy.typing import NDArray

from hlat.planner.problem.workload import MATERIALIZED_SCORES, RECOMPUTE_POLICIES, Column, WorkloadColumns

_SELECTIVE, _FULL = (float(RECOMPUTE_POLICIES.index(name)) for name in ("selective", "full"))


def one_constant_steps(
    columns: WorkloadColumns, measured: Column, sources: NDArray[np.str_], families: NDArray[np.str_]
) -> Column:
    """Predicted seconds of each step; NaN where no other source has runs of the family.

    Args:
        columns: workloads.
        measured: measured seconds.
        sources: source of each run.
        families: chip family and precision of each run.
    """
    ideal = ideal_steps(columns)
    efficiency = ideal / measured
    predicted = np.full(len(measured), np.nan)
    for family in np.unique(families):
        here = families == family
        medians = {name: float(np.median(efficiency[here & (sources == name)])) for name in np.unique(sources[here])}
        for name in medians:
            others = [value for other, value in medians.items() if other != name]
            if others:
                rows = here & (sources == name)
                predicted[rows] = ideal[rows] / np.median(others)
    return predicted


def ideal_steps(c: WorkloadColumns) -> Column:
    """Seconds of each step at the peak, with the bubble of its pipeline."""
    causal = np.where(c.attention > MATERIALIZED_SCORES, 0.5, 1.0)
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    weights = c.layers * (c.hidden * (2 * queries + 2 * keys) + (2 + c.gated) * c.hidden * c.intermediate)
    core = 4 * c.sequence * causal * queries * c.layers
    full = c.recomputed_layers * (2 * c.recomputed_products * weights + c.recomputed_attention * core)
    again = np.select([c.recompute == _FULL, c.recompute == _SELECTIVE], [full, core], 0.0)
    flops = 6 * (weights + c.hidden * c.vocab) + 3 * core + again
    peak = np.where(c.eight_bit > 0, c.peak_eight_bit, c.peak)
    bubble = 1 + (c.pipeline - 1) / (c.virtual * c.micro_batches)
    ideal: Column = flops * c.global_batch * c.sequence * bubble / (c.world * peak)
    return ideal
