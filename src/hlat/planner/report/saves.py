"""Saves and restarts of a run, in words.

prediction -> "80 GiB every 1,500 s, ..."
"""

from hlat.planner.cost.goodput import DETECTION_SECONDS, STORE_RATE_LIMIT, STORE_RATE_PER_INSTANCE, storage_rate
from hlat.planner.problem.request import PlanRequest
from hlat.planner.search.search import LayoutPrediction
from hlat.runtime.quantities.formatting import rounded_text

_GB = 1e9


def storage_text(request: PlanRequest) -> str:
    """Return the rate of the file system, and where it comes from."""
    rate = storage_rate(request.cluster, request.site.storage) / _GB
    if request.site.storage is not None:
        return f"{rounded_text(rate)} GB/s, by --storage {request.site.storage}"
    return (
        f"{rounded_text(rate)} GB/s, assumed: {STORE_RATE_PER_INSTANCE / _GB:g} GB/s for each instance, at most "
        f"{STORE_RATE_LIMIT / _GB:,.0f} in all (--storage)"
    )


def storage_sentence(request: PlanRequest, prediction: LayoutPrediction) -> str:
    """Return how long a save and a restart take, and what they lose."""
    one = prediction.reliability
    return (
        f"{rounded_text(one.saved_bytes / _GB)} GB at {storage_text(request)}: a save is durable after "
        f"{_seconds(one.writing)} and stalls {_seconds(one.stall)}; a restart takes {_seconds(one.restart)} "
        f"({_seconds(DETECTION_SECONDS)} to be noticed, {_seconds(one.start_up)} to start, {_seconds(one.writing)} to "
        f"load); goodput {prediction.goodput:.1%}"
    )


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 10 else f"{rounded_text(value, 2)} s"
