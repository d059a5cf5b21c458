"""The best layout alone, for many clusters of one question.

Layouts are ordered by the formulas of step_time.py, and memory is counted only until enough of them fit. ``search``
counts the memory of all, because it also reports layouts that need little of it.
"""

import numpy as np

from hlat.planner.cost import step_times
from hlat.planner.problem import PlanRequest, candidates
from hlat.planner.search.search import (
    USABLE_MEMORY_SHARE,
    LayoutPrediction,
    complete_prediction,
    estimated_peak,
    finalists,
    workload_columns,
)
from hlat.planner.search.tie_break import break_tie


def best_layout(request: PlanRequest) -> LayoutPrediction | None:
    """Return the layout that a plan of the request takes, with its prediction; None if none fits.

    A plan may take another one, equally fast within the error of the model, if a layout that needs less memory is also
    plainer.
    """
    ranked = fastest_layouts(request)
    return break_tie(ranked, request.cluster.domain) if ranked else None


def fastest_layouts(request: PlanRequest) -> list[LayoutPrediction]:
    """Return the predictions of the finalists that fit, fastest first."""
    tried = list(candidates(request))
    if not tried:
        return []
    times = step_times(workload_columns(request, tried))
    limit = USABLE_MEMORY_SHARE * request.cluster.memory_bytes
    fastest_first = (int(index) for index in np.argsort(times.step, kind="stable"))
    fitting = (index for index in fastest_first if estimated_peak(request, tried[index]) <= limit)
    found = [complete_prediction(request, tried[index], times, index) for index in finalists(tried, fitting)]
    return sorted((one for one in found if one.peak_memory <= limit), key=lambda one: one.step_seconds)
