"""Which of the layouts that fit is taken.

Predictions that differ by less than the model's own error do not decide. Of the layouts within that of the fastest the
plan takes the plainest: tensor parallelism on fast links, no pipeline, least recomputation, least tensor parallelism,
fewest stages, then the fastest. (In published sweeps fewer stages for more tensor parallelism lost.)
"""

from hlat.config.sections import ZERO_BUBBLE
from hlat.planner.problem import RECOMPUTE_POLICIES
from hlat.planner.search.search import LayoutPrediction

TIE_TOLERANCE = 0.04
"""Layouts whose predicted times differ by less than this share are as good as each other (docs/experiments.md)."""


def break_tie(ranked: list[LayoutPrediction], domain: int) -> LayoutPrediction:
    """The plainest of the fastest.

    Args:
        ranked: layouts that fit, fastest first.
        domain: devices that share fast links.
    """
    fastest = ranked[0].step_seconds
    tied = [one for one in ranked if one.step_seconds <= (1 + TIE_TOLERANCE) * fastest]

    def plainness(one: LayoutPrediction) -> tuple[float, ...]:
        layout = one.candidate
        return (
            layout.tensor > domain,
            layout.pipeline > 1,
            RECOMPUTE_POLICIES.index(layout.recompute),
            layout.tensor,
            layout.pipeline,
            layout.context,
            layout.schedule in ZERO_BUBBLE,
            layout.virtual,
            one.step_seconds,
        )

    return min(tied, key=plainness)
