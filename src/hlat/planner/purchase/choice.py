"""The cluster to buy for a run, of several kinds of instances and any number of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hlat.hardware import Catalog, Chip, Cluster, Instance, PriceKind, close_names
from hlat.planner.problem.request import PlanRequest
from hlat.planner.problem.runnable import why_not_runnable
from hlat.planner.purchase.exploration import compute, explore
from hlat.planner.purchase.goal import Goal
from hlat.planner.purchase.offers import Kind, Offer
from hlat.runtime.errors import HardwareError, PlanError

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
        affords: True if the number of tokens is what the budget affords, False if it was given.
    """

    goal: Goal
    price: PriceKind | None
    rows: tuple[Offer, ...]
    sizes: tuple[Offer, ...]
    missed: dict[str, str]
    affords: bool = False

    @property
    def chosen(self) -> Offer:
        """The offer to take."""
        return self.rows[0]

    @property
    def range_goal(self) -> Goal:
        """Limits for the whole range of a prediction: a budget that chose the tokens does not limit their cost."""
        return Goal(self.goal.days, None if self.affords else self.goal.usd)

    @property
    def sure(self) -> tuple[Offer, ...]:
        """Offers that meet the goal with the whole range in which 4 of 5 runs are expected, cheapest first.

        Those that hlat cannot run are left out, unless it cannot run the chosen one either.
        """
        offers = {offer.cluster.name: offer for offer in (*self.rows, *self.sizes)}.values()
        sure = [offer for offer in offers if self.range_goal.meets(offer.slow_end)]
        if _runnable(self.chosen):
            sure = [offer for offer in sure if _runnable(offer)]
        return tuple(sorted(sure, key=lambda offer: (offer.usd or 0.0, offer.days)))


def _runnable(offer: Offer) -> bool:
    return not why_not_runnable(offer.cluster.chip, offer.request.mode)


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
    kinds, of, missed = kinds_of(chips, goal, request_on, catalog, price)
    found, others = explore(goal, kinds)
    missed |= others
    if not found:
        raise no_offer(f"no cluster meets the goal, {goal}", missed)
    chosen, kind = found[0]
    list(kind.doublings(chosen.cluster.count))
    if not goal.meets(chosen.slow_end):
        compute(goal.shrunk(chosen.prediction.interval.high), kind)  # numbers that leave room for the slow end, if any
    return Purchase(goal, of, tuple(offer for offer, _ in found), tuple(kind.offers), missed)


def no_offer(what: str, missed: dict[str, str]) -> PlanError:
    """Return the error that says what no kind can do, and the reason by kind, which may have several lines."""
    lines = (f"  {name}: {reason}".replace("\n", "\n    ") for name, reason in missed.items())
    return PlanError("\n".join([f"{what}:", *lines]))


def kinds_of(
    chips: str,
    goal: Goal,
    request_on: Callable[[Cluster, PriceKind | None], PlanRequest],
    catalog: Catalog,
    price: PriceKind | None,
) -> tuple[list[Kind], PriceKind | None, dict[str, str]]:
    """Find the kinds of instances of a question, the kind of their prices, and reasons by kind that has none.

    Args:
        chips: instances or chips of the catalog, separated by commas, or ``any``.
        goal: limits of the run. With a budget, an instance without a price stands for all of its chip.
        request_on: the request on a cluster, with prices of a kind.
        catalog: chips, instances and prices.
        price: kind of price; None for the one that most of the instances have.

    Raises:
        HardwareError: an unknown instance or chip; names all of them.
        PlanError: there is a budget, and none of the instances has a price.
    """
    instances = _instances(chips, catalog, priced=goal.usd is not None)
    of = price or _commonest_price([instance for instance, _ in instances])
    known = {instance.name for instance, _ in instances if of is None or of in instance.prices}
    missed = {one.name: f"no {of} price is known" for one, _ in instances if one.name not in known}
    if goal.usd is not None and of is None:
        names = ", ".join(instance.name for instance, _ in instances)
        raise PlanError(f"--budget: no price is known of {names}; give one, as in --price 2.10/h (of a chip)")

    def request(cluster: Cluster) -> PlanRequest:
        return request_on(cluster, of)

    return [Kind(instance, chip, request) for instance, chip in instances if instance.name in known], of, missed


def _instances(chips: str, catalog: Catalog, *, priced: bool) -> list[tuple[Instance, Chip]]:
    """Return the named instances; those of a chip for the name of a chip.

    Args:
        chips: names, or ``any``.
        catalog: chips and instances.
        priced: True if prices are needed: an instance without one then stands for all with its chip that have one.
    """
    usable = [
        (instance, chip)
        for instance in catalog.instances
        if (chip := catalog.chip(instance.chip)) is not None and chip.can_be_planned
    ]
    if chips.strip().lower() == ANY:
        return [(instance, chip) for instance, chip in usable if instance.prices]
    chosen: list[tuple[Instance, Chip]] = []
    problems, is_close = [], True
    for word in filter(None, (word.strip() for word in chips.split(","))):
        named = catalog.instance(word)
        of_chip = catalog.chip(word)
        found = [pair for pair in usable if pair[0] is named] or [pair for pair in usable if pair[1] is of_chip]
        if priced and found and not any(instance.prices for instance, _ in found):
            found += [(one, chip) for one, chip in usable if chip is found[0][1] and one.prices]
        chosen += [pair for pair in found if pair not in chosen]
        if not found:
            close = close_names(word, [name for one, chip in usable for name in (one.name, chip.name)])
            hint = f"; did you mean {' or '.join(dict.fromkeys(close))}?" if close else ""
            problems.append(f"--chips {word}: the catalog has no such instance or chip{hint}")
            is_close = is_close and bool(close)
    if not chosen and not problems:
        problems, is_close = ["--chips names nothing"], False
    if problems:
        known = ", ".join(instance.name for instance, _ in usable)
        listed = "`hlat hardware list` shows all" if is_close else f"Known instances: {known}"
        raise HardwareError("\n".join([*problems, f"{listed}; or any, for all that have a price."]))
    return chosen


def _commonest_price(instances: Sequence[Instance]) -> PriceKind | None:
    """Return the kind of price that most instances have, the first in the catalog's order among equals."""
    counts: dict[PriceKind, int] = {}
    for instance in instances:
        for kind in instance.prices:
            counts[kind] = counts.get(kind, 0) + 1
    return max(counts, key=counts.__getitem__, default=None)
