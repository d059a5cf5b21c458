"""Cost of a run in its parts, and the origin of its price.

    request, prediction --cost_parts--> USD of steps, idle, storage, egress, total --cost_sentence--> words
                        --price_sentence--> "220.16 USD per hour, on-demand: aws us-east-1, quoted 2026-11-20"

Plans are chosen by the cost of the instances for the time of the run. The rest is nearly the same for all layouts.
"""

from math import ceil

from hlat.config import CheckpointConfig
from hlat.hardware import GIVEN
from hlat.planner.plan import format_number
from hlat.planner.problem.request import PlanRequest
from hlat.planner.search import LayoutPrediction
from hlat.runtime.quantities import rounded_text

_GB = 1e9
_DAYS_OF_MONTH = 365.25 / 12


def cost_parts(request: PlanRequest, prediction: LayoutPrediction) -> dict[str, float | None] | None:
    """Divide the cost of a run in USD into its parts; None if it is not known, or a part of it is not.

    ``steps`` are instances while steps count, ``idle`` instances during saves, failures and restarts and for the rest
    of a capacity block, ``storage`` the tokens of the run and the kept checkpoints for its days, ``egress`` the last
    checkpoint out of the place.
    """
    found, whole, days = request.cluster.price(request.price), prediction.cost_usd, prediction.days
    if found is None or whole is None:
        return None
    price, saved = request.cluster.instance.prices[found[0]], prediction.reliability.saved_bytes / _GB
    steps = prediction.goodput * whole
    paid = whole / days * _days_sold(days) if found[0] == "capacity-block" else whole
    stored = _token_gb(request) + _kept(request) * saved
    storage = None if price.storage is None else price.storage * stored * days / _DAYS_OF_MONTH
    egress = None if price.egress is None else price.egress * saved
    total = paid + (storage or 0.0) + (egress or 0.0)
    return {"steps": steps, "idle": paid - steps, "storage": storage, "egress": egress, "total": total}


def _days_sold(days: float) -> int:
    # Capacity blocks are sold by the day up to 14 days, beyond by the week
    # (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-blocks-purchase.html).
    return ceil(days) if days <= 14 else 7 * ceil(days / 7)


def _token_gb(request: PlanRequest) -> float:
    # As hlat data prepare stores them.
    return request.tokens * (2 if request.model.vocab_size <= 1 << 16 else 4) / _GB


def _kept(request: PlanRequest) -> int:
    """Return the number of checkpoints that are kept at the same time."""
    recipe = request.recipe
    return (CheckpointConfig() if recipe is None else recipe.checkpoint).keep_last


def cost_sentence(request: PlanRequest, prediction: LayoutPrediction) -> str:
    """Say what the cost consists of; empty if it is not known."""
    parts, price = cost_parts(request, prediction), request.cluster.price(request.price)
    if parts is None or price is None:
        return ""
    block = f", rest of {_days_sold(prediction.days)} days" if price[0] == "capacity-block" else ""
    saved = f"{rounded_text(prediction.reliability.saved_bytes / _GB)} GB"
    notes = {
        "steps": "",
        "idle": f" (saves, failures, restarts{block})",
        "storage": f" ({rounded_text(_token_gb(request))} GB of tokens, {_kept(request)} checkpoints of {saved})",
        "egress": " (a checkpoint)",
    }
    usd = {name: value for name, value in parts.items() if value is not None}
    words = [f"{format_number(usd[name], 0)} {name}{note}" for name, note in notes.items() if name in usd]
    lacking = " and ".join(name for name in notes if name not in usd)
    rest = f"; {lacking} not counted: no price is known (--quotes)" if lacking else ""
    return f"{format_number(usd['total'], 0)} USD = {' + '.join(words)}{rest}"


def price_origin(request: PlanRequest) -> str:
    """Seller, place, day and source of a quoted price; empty for the catalog's."""
    price = request.cluster.price(request.price)
    return "" if price is None else request.cluster.instance.prices[price[0]].origin


def price_sentence(request: PlanRequest) -> str:
    """USD per hour of the cluster, the kind of the price, and its origin if it is a quote."""
    price = request.cluster.price(request.price)
    if price is None:
        return "not known"
    says = ": ".join(filter(None, (f"{price[1]:,.2f} USD per hour, {price[0]}", price_origin(request))))
    # Sellers take spot instances away far more often than machines fail.
    if price[0] == "spot" and request.cluster.instance.failures.source != GIVEN:
        says += "; taken away no more often than machines fail, unless --interruptions says how often"
    return says
