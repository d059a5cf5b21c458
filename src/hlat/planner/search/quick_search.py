"""The best layout alone, for many clusters of one question.

Layouts are ordered by the formulas of step_time.py, and memory is counted only until enough of them fit. ``search``
counts the memory of all, because it also reports layouts that need little of it.

Of the layouts that differ only in what they keep for backward, the one that recomputes everything needs least memory.
It is counted first: where it does not fit, none of them does.
"""

from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from hlat.planner.cost.step_time import step_times
from hlat.planner.problem.layouts import Candidate, candidates
from hlat.planner.problem.request import PlanRequest
from hlat.planner.problem.workload import RECOMPUTE_POLICIES
from hlat.planner.search.exact_checks import ExactChecks, estimated_ranks
from hlat.planner.search.search import (
    USABLE_MEMORY_SHARE,
    LayoutPrediction,
    complete_prediction,
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
    fastest_first = [int(index) for index in np.argsort(times.step, kind="stable")]
    indices = finalists(tried, fitting(request, tried, fastest_first, limit))
    found = [complete_prediction(request, tried[index], times, index) for index in indices]
    return sorted((one for one in found if one.peak_memory <= limit), key=lambda one: one.step_seconds)


def fitting(request: PlanRequest, tried: Sequence[Candidate], order: Sequence[int], limit: float) -> Iterator[int]:
    """Yield the positions of the layouts whose memory is within a limit: estimated, or counted where that is doubtful.

    Args:
        request: the run.
        tried: layouts, with every choice of what is kept for backward.
        order: positions in ``tried``, in the order in which they are wanted.
        limit: bytes of a device.
    """
    smallest = {_but_for_recomputation(one): one for one in tried if one.recompute == RECOMPUTE_POLICIES[-1]}
    possible: dict[Hashable, bool] = {}
    checks = ExactChecks(request, limit)

    def estimates(layout: Candidate) -> list[float]:
        return estimated_ranks(request, layout, checks.furthest if layout.pipeline > 1 else limit)

    for index in order:
        key = _but_for_recomputation(tried[index])
        if key not in possible:
            possible[key] = checks.may_fit(smallest[key], estimates(smallest[key]))
        if possible[key] and checks.fits(tried[index], estimates(tried[index])):
            yield index


def _but_for_recomputation(layout: Candidate) -> Hashable:
    """Return what layouts have in common that differ only in what is kept for backward."""
    parallel = layout.parallel
    degrees = (parallel.tensor, parallel.pipeline, parallel.context, parallel.virtual_stages, parallel.schedule)
    return (*degrees, parallel.zero, parallel.replicas, layout.micro_batch)
