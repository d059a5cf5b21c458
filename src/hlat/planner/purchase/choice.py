"""The cluster to buy for a run, of several kinds of instances and any number of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hlat.hardware import Catalog, Chip, Cluster, Instance, PriceKind
from hlat.planner.problem import PlanRequest
from hlat.planner.purchase.goal import Goal
from hlat.planner.purchase.offers import Kind, Offer
from hlat.runtime import HardwareError, PlanError

ANY = "any"
"""Text for every kind of instance that has a price."""


@dataclass(frozen=True)
class Purchase:
    """Answer to a buyer.

    Attributes:
        goal: limits of the run.
        price: kind of all prices.
        rows: the best offer of each kind of instance that meets the goal, the one to choose first.
        sizes: offers of the chosen kind, by number of instances.
        missed: reason, by kind without an offer.
    """

    goal: Goal
    price: PriceKind | None
    rows: tuple[Offer, ...]
    sizes: tuple[Offer, ...]
    missed: dict[str, str]

    @property
    def chosen(self) -> Offer:
        """The offer to take."""
        return self.rows[0]


def choose_cluster(
    chips: str,
    goal: Goal,
    request_on: Callable[[Cluster, PriceKind | None], PlanRequest],
    catalog: Catalog,
    price: PriceKind | None = None,
) -> Purchase:
    """Choose kind and number of instances for a run.

    Args:
        chips: instances or chips of the catalog, separated by commas, or ``any``.
        goal: limits of the run.
        request_on: the request on a cluster, with prices of a kind.
        catalog: chips, instances and prices.
        price: kind of price; None for the one that most of the instances have.

    Raises:
        HardwareError: an unknown instance or chip; names all of them.
        PlanError: no cluster meets the goal; says how close each kind comes.
    """
    instances = _instances(chips, catalog)
    kind_of_price = price or _commonest_price([instance for instance, _ in instances])
    missed: dict[str, str] = {}
    found: list[tuple[Offer, Kind]] = []
    for instance, chip in instances:
        if kind_of_price is not None and kind_of_price not in instance.prices:
            missed[instance.name] = f"no {kind_of_price} price is known"
            continue
        kind = Kind(instance, chip, lambda cluster: request_on(cluster, kind_of_price))
        kind.explore(_enough(goal))
        best = goal.best(kind.offers)
        if best is None:
            missed[instance.name] = _how_close(goal, kind.offers)
        else:
            found.append((best, kind))
    if not found:
        reasons = "\n".join(f"  {name}: {reason}" for name, reason in missed.items())
        raise PlanError(f"no cluster meets the goal, {goal}:\n{reasons}")
    by_days = goal.days is None and goal.usd is not None
    found.sort(key=lambda pair: (pair[0].days, pair[0].price) if by_days else (pair[0].price, pair[0].days))
    rows = tuple(offer for offer, _ in found)
    return Purchase(goal, kind_of_price, rows, tuple(found[0][1].offers), missed)


def _enough(goal: Goal) -> Callable[[Offer], bool]:
    """Return the test of clusters that are as large as the goal needs: in time, or already too expensive."""

    def enough(offer: Offer) -> bool:
        if goal.days is not None:
            return offer.days <= goal.days
        return goal.usd is not None and offer.price > goal.usd

    return enough


def _how_close(goal: Goal, offers: Sequence[Offer]) -> str:
    if not offers:
        return "no layout of the model fits"
    fastest = min(offers, key=lambda offer: offer.days)
    cheapest = min(offers, key=lambda offer: offer.price)
    words = [f"the fastest is {fastest.cluster.name} with {fastest.days:,.3g} days"] if goal.days is not None else []
    if goal.usd is not None:
        cost = "no known price" if cheapest.usd is None else f"{cheapest.usd:,.0f} USD in {cheapest.days:,.3g} days"
        words.append(f"the cheapest is {cheapest.cluster.name} with {cost}")
    return "; ".join(words)


def _instances(chips: str, catalog: Catalog) -> list[tuple[Instance, Chip]]:
    """Return the named instances; those of a chip for the name of a chip."""
    usable = [
        (instance, chip)
        for instance in catalog.instances
        if (chip := catalog.chip(instance.chip)) is not None and chip.can_be_planned
    ]
    if chips.strip().lower() == ANY:
        return [(instance, chip) for instance, chip in usable if instance.prices]
    chosen: list[tuple[Instance, Chip]] = []
    problems = []
    for word in filter(None, (word.strip() for word in chips.split(","))):
        named = catalog.instance(word)
        of_chip = catalog.chip(word)
        found = [pair for pair in usable if pair[0] is named] or [pair for pair in usable if pair[1] is of_chip]
        chosen += [pair for pair in found if pair not in chosen]
        problems += [] if found else [f"--chips: {word!r} is neither an instance nor a chip with instances"]
    if not chosen:
        problems = problems or ["--chips names nothing"]
    if problems:
        known = ", ".join(instance.name for instance, _ in usable)
        raise HardwareError("\n".join([*problems, f"Known instances: {known}; or any, for all that have a price."]))
    return chosen


def _commonest_price(instances: Sequence[Instance]) -> PriceKind | None:
    """Return the kind of price that most instances have, the first in the catalog's order among equals."""
    counts: dict[PriceKind, int] = {}
    for instance in instances:
        for kind in instance.prices:
            counts[kind] = counts.get(kind, 0) + 1
    return max(counts, key=counts.__getitem__, default=None)
