"""Goals of a buyer: a deadline, a budget, both, or neither.

"14d", "50,000" --parse_goal--> Goal --> which of some offers meet it, and the best of those
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hlat.planner.purchase.offers import Offer
from hlat.runtime.errors import PlanError
from hlat.runtime.quantities.formatting import rounded_text

KNEE = 1.1
"""Without a goal, a cluster grows as long as its run costs at most this many times the cheapest run of its kind."""

_DAYS = {"h": 1 / 24, "d": 1.0, "w": 7.0}
_TIMES = {"": 1.0, "k": 1e3, "m": 1e6}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([hdw])", re.IGNORECASE)
_MONEY = re.compile(r"\$?\s*(\d[\d_,]*(?:\.\d+)?)\s*([km]?)(?:\s*(?:\$|usd))?", re.IGNORECASE)


@dataclass(frozen=True)
class Goal:
    """Limits of a run.

    Attributes:
        days: longest duration, failures and saves included; None for any.
        usd: highest cost; None for any.
    """

    days: float | None = None
    usd: float | None = None

    @property
    def by_time(self) -> bool:
        """True if the fastest offer is the best: there is a budget, and no deadline."""
        return self.days is None and self.usd is not None

    def meets(self, offer: Offer) -> bool:
        """Return True if a run on the offered cluster is within the limits."""
        in_time = self.days is None or offer.days <= self.days
        return in_time and (self.usd is None or (offer.usd is not None and offer.usd <= self.usd))

    def shrunk(self, factor: float) -> "Goal":
        """Return limits that many times as tight."""
        days, usd = (None if limit is None else limit / factor for limit in (self.days, self.usd))
        return Goal(days, usd)

    def order(self, offer: Offer) -> tuple[float, float]:
        """Return the key that orders offers of several kinds, the best first."""
        return (offer.days, offer.price) if self.by_time else (offer.price, offer.days)

    def best(self, offers: Sequence[Offer]) -> Offer | None:
        """Return the best of some offers of one kind that meet the goal; None if there is none.

        With a deadline it is the cheapest (by price, else by the number of instances), with a budget alone the fastest,
        without a goal the largest cluster on the flat part of the cost, ``KNEE``.
        """
        meeting = [offer for offer in offers if self.meets(offer)]
        if not meeting:
            return None
        if self.by_time or self.days is not None:
            return min(meeting, key=self.order)
        cheapest = min(meeting, key=self.order)
        flat = [offer for offer in meeting if offer.price <= KNEE * cheapest.price]
        return min(flat, key=lambda offer: offer.days)

    def __str__(self) -> str:
        words = [] if self.days is None else [f"done in {_time(self.days)}"]
        words += [] if self.usd is None else [f"for at most {self.usd:,.0f} USD"]
        knee = f"the largest cluster whose run costs at most {KNEE - 1:.0%} more than the cheapest"
        return " ".join(words) or knee


def parse_goal(deadline: str | None, budget: str | None) -> Goal:
    """Read a deadline such as 36h, 14d or 2w, and a budget in USD such as 50000, 50,000 or 50k.

    Raises:
        PlanError: a text is something else, or zero; names all of them.
    """
    problems = []
    days = usd = None
    if deadline is not None:
        found = _DURATION.fullmatch(deadline.strip())
        days = float(found[1]) * _DAYS[found[2].lower()] if found else 0.0
        if not days:
            problems.append(f"--deadline {deadline}: must be a positive time in hours, days or weeks: 36h, 14d or 2w")
    if budget is not None:
        found = _MONEY.fullmatch(budget.strip())
        usd = float(found[1].replace("_", "").replace(",", "")) * _TIMES[found[2].lower()] if found else 0.0
        if not usd:
            problems.append(f"--budget {budget}: must be a positive number of US dollars: 50000, 50,000 or 50k")
    if problems:
        raise PlanError("\n".join(problems))
    return Goal(days, usd)


def _time(days: float) -> str:
    number, unit = (rounded_text(days), "day") if days >= 1 else (rounded_text(days * 24), "hour")
    return f"{number} {unit}{'' if number == '1' else 's'}"
