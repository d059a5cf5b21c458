"""The choice between layouts whose predicted times are too close to tell apart.

Differences below the model's own error decide nothing. Among the layouts within that error of the fastest, the plan
takes the plainest: tensor parallelism on fast links, no pipeline, least recomputation, fewest gathers, smallest tensor
degree, fewest stages and replicas, then the fastest. (In published sweeps, trading pipeline stages for a larger tensor
degree lost.) One that another of them beats in both time and memory is not taken: nobody would want it.
"""

from hlat.config import ZERO_BUBBLE
from hlat.planner.problem.workload import RECOMPUTE_POLICIES
from hlat.planner.search.search import LayoutPrediction

TIE_TOLERANCE = 0.04
"""Predicted times that differ by less than this share are a tie (error of the model: docs/notebook/planner.md)."""


def break_tie(ranked: list[LayoutPrediction], domain: int) -> LayoutPrediction:
    """The plainest layout among those tied with the fastest.

    Args:
        ranked: layouts that fit, fastest first.
        domain: devices that share fast links.
    """
    fastest = ranked[0].step_seconds
    tied = [prediction for prediction in ranked if prediction.step_seconds <= (1 + TIE_TOLERANCE) * fastest]

    def plainness(prediction: LayoutPrediction) -> tuple[float, ...]:
        layout = prediction.candidate
        return (
            layout.tensor > domain,
            layout.pipeline > 1,
            RECOMPUTE_POLICIES.index(layout.recompute),
            layout.parallel.gathers_again,
            layout.tensor,
            layout.pipeline,
            layout.context,
            layout.schedule in ZERO_BUBBLE,
            layout.virtual,
            layout.replicas,
            prediction.step_seconds,
        )

    def beaten(one: LayoutPrediction) -> bool:
        return any(other.step_seconds < one.step_seconds and other.peak_memory < one.peak_memory for other in tied)

    return min((prediction for prediction in tied if not beaten(prediction)), key=plainness)
