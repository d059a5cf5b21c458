"""Cost of a run in its parts, and the origin of its price.

    request, prediction --cost_parts--> CostParts: steps, idle, storage, egress in USD --cost_sentence--> words
                        --price_sentence--> "220.16 USD per hour, on-demand: aws us-east-1, quoted 2026-11-20"

Plans are chosen by the cost of the instances for the time of the run. The rest is the same for all layouts.
"""

from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from hlat.config import CheckpointConfig
from hlat.hardware import GIVEN, InstancePrice
from hlat.planner.plan import format_number
from hlat.planner.problem.request import PlanRequest
from hlat.planner.search import LayoutPrediction
from hlat.runtime.quantities import rounded_text

_GB = 1e9
_DAYS_OF_MONTH = 365.25 / 12


@dataclass(frozen=True)
class CostParts:
    """Parts of the cost of a run in USD; None where no price is known."""

    steps: float  # instances, while steps count
    idle: float  # instances during saves, failures and restarts, and for the rest of a capacity block
    storage: float | None  # tokens of the run and the checkpoints that are kept, for its days
    egress: float | None  # last checkpoint, out of the place

    @property
    def total(self) -> float:
        return self.steps + self.idle + (self.storage or 0.0) + (self.egress or 0.0)


def cost_parts(request: PlanRequest, prediction: LayoutPrediction) -> CostParts | None:
    """Divide the cost of a run into its parts; None if no price is known."""
    price, days = _price(request), prediction.days
    if price is None or prediction.cost_usd is None:
        return None
    kind, one = price
    steps = prediction.goodput * prediction.cost_usd
    paid = prediction.cost_usd / days * (_days_sold(days) if kind == "capacity-block" else days)
    stored = _token_bytes(request) + _kept(request) * prediction.reliability.saved_bytes
    return CostParts(
        steps,
        paid - steps,
        None if one.storage is None else one.storage * stored / _GB * days / _DAYS_OF_MONTH,
        None if one.egress is None else one.egress * prediction.reliability.saved_bytes / _GB,
    )


def _price(request: PlanRequest) -> tuple[str, InstancePrice] | None:
    found = request.cluster.price(request.price)
    return None if found is None else (found[0], request.cluster.instance.prices[found[0]])


def _days_sold(days: float) -> int:
    # Capacity blocks are sold by the day up to 14 days, beyond by the week
    # (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-blocks-purchase.html).
    return ceil(days) if days <= 14 else 7 * ceil(days / 7)


def _token_bytes(request: PlanRequest) -> float:
    # As hlat data prepare stores them.
    return request.tokens * (2 if request.model.vocab_size <= 1 << 16 else 4)


def _kept(request: PlanRequest) -> int:
    """Return the number of checkpoints that are kept at the same time."""
    recipe = request.recipe
    return (CheckpointConfig() if recipe is None else recipe.checkpoint).keep_last


def cost_json(request: PlanRequest, prediction: LayoutPrediction) -> dict[str, Any] | None:
    """Return the parts under their documented keys (docs/planning.md)."""
    parts = cost_parts(request, prediction)
    return None if parts is None else {**asdict(parts), "total": parts.total}


def cost_sentence(request: PlanRequest, prediction: LayoutPrediction) -> str:
    """Say what the cost consists of; empty if it is not known."""
    parts, price = cost_parts(request, prediction), _price(request)
    if parts is None or price is None:
        return ""
    idle = "saves, failures, restarts"
    if price[0] == "capacity-block":
        idle += f", rest of {_days_sold(prediction.days)} days"
    words = [f"{format_number(parts.steps, 0)} steps", f"{format_number(parts.idle, 0)} idle ({idle})"]
    saved = f"{rounded_text(prediction.reliability.saved_bytes / _GB)} GB"
    if parts.storage is not None:
        tokens = f"{rounded_text(_token_bytes(request) / _GB)} GB of tokens"
        words.append(f"{format_number(parts.storage, 0)} storage ({tokens}, {_kept(request)} checkpoints of {saved})")
    if parts.egress is not None:
        words.append(f"{format_number(parts.egress, 0)} egress (a checkpoint)")
    lacking = [name for name, value in (("storage", parts.storage), ("egress", parts.egress)) if value is None]
    rest = f"; {' and '.join(lacking)} not counted: no price is known (--quotes)" if lacking else ""
    return f"{format_number(parts.total, 0)} USD = {' + '.join(words)}{rest}"


def price_origin(request: PlanRequest) -> str:
    """Seller, place, day and source of a quoted price; empty for the catalog's."""
    price = _price(request)
    return "" if price is None else price[1].origin


def price_sentence(request: PlanRequest) -> str:
    """USD per hour of the cluster, the kind of the price, and its origin if it is a quote."""
    price = request.cluster.price(request.price)
    if price is None:
        return "not known"
    origin = price_origin(request)
    says = f"{price[1]:,.2f} USD per hour, {price[0]}{f': {origin}' if origin else ''}"
    # Sellers take spot instances away far more often than machines fail.
    if price[0] == "spot" and request.cluster.instance.failures.source != GIVEN:
        says += "; taken away no more often than machines fail, unless --interruptions says how often"
    return says
