"""Risks of a buyer: offers that meet the goal as predicted, and may miss it within the range of their prediction."""

from math import floor, log10

from hlat.planner.purchase.choice import Purchase
from hlat.planner.report.explain import interval_text


def risk_sentence(purchase: Purchase) -> str:
    """Say that the chosen run may miss the goal, and what would not; empty if its whole range is within the goal."""
    chosen, goal = purchase.chosen, purchase.range_goal
    late = goal.days is not None and chosen.slow_end.days > goal.days
    dear = goal.usd is not None and (chosen.slow_end.usd or 0.0) > goal.usd
    if not (late or dear):
        return ""
    limits = " and ".join(["deadline"] * late + ["budget"] * dear)
    ranges = [f"{interval_text(chosen.prediction, chosen.days)} days"] * late
    if dear and chosen.usd is not None:
        ranges.append(f"{interval_text(chosen.prediction, chosen.usd)} USD")
    may = f"{chosen.cluster.name} may miss the {limits}: {' and '.join(ranges)} in 4 of 5 runs. "
    if purchase.sure:
        names = ", ".join(offer.cluster.name for offer in purchase.sure)
        return may + f"Within the goal over the whole range: {names}."
    none = f"No number of {chosen.cluster.instance.name} that was tried is within the goal over its whole range"
    if purchase.affords and goal.days is not None:  # with another number of tokens, any deadline can be met
        return may + f"{none}; --deadline {_rounded_down(goal.days / chosen.prediction.interval.high)}d leaves room."
    return may + f"{none}."


def _rounded_down(value: float) -> str:
    """Write a number with two significant digits, rounded down."""
    unit = 10.0 ** (floor(log10(value)) - 1)
    return f"{floor(value / unit + 1e-9) * unit:.12g}"
