"""Energy of a run, in words.

prediction, site -> "up to 12.4 MWh: ..."
"""

from hlat.hardware import HOST_SHARE
from hlat.planner.problem.request import PlanRequest
from hlat.planner.search.search import LayoutPrediction
from hlat.runtime.quantities.formatting import rounded_text


def energy_text(kwh: float | None) -> str:
    """Return an amount of energy with its unit; empty if it is not known."""
    if kwh is None:
        return ""
    return f"{rounded_text(kwh / 1000)} MWh" if kwh >= 1000 else f"{rounded_text(kwh)} kWh"


def energy_sentence(request: PlanRequest, prediction: LayoutPrediction) -> str:
    """Return what the energy of a run is, and what it assumes."""
    chip, site = request.cluster.chip, request.site
    if prediction.kwh is None or chip.power is None:
        return f"not known: no power limit of {chip.name} is published"
    building = f"PUE {site.pue:g}" + ("" if site.pue_given else ", Amazon's mean of 2025 (--pue)")
    return (
        f"at most about {energy_text(prediction.kwh)}: every chip at its limit of {chip.power.watts:,.0f} W all the "
        f"time, {HOST_SHARE:.0%} more for hosts and network, {building}"
    )
