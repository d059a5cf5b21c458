"""Budget solver: the cheapest recomputation with which the saved activations fit into a memory budget.

    candidate policies of a block, each with bytes saved and recomputation cost -> a policy for every block

All blocks are alike. So the relaxed problem (fractions of blocks) is solved by the lower convex hull of the policies:
all blocks use one of two neighbouring policies on the hull. With an integer number of blocks, at most one block is left
between the two, and gets the cheapest policy that still fits. The cost exceeds the optimum by less than the difference
of the two neighbours. Few different policies are an advantage of their own: each is compiled once.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockPolicy:
    """A candidate activation checkpointing policy of a block.

    Attributes:
        recomputed: names of ``hlat.model.spec.RECOMPUTABLE``.
        saved: bytes of activations saved by the block.
        cost: cost of the recomputation; 0 for none.
    """

    recomputed: frozenset[str]
    saved: int
    cost: float


def cheapest(policies: Sequence[BlockPolicy], blocks: int, budget: int) -> list[BlockPolicy] | None:
    """Choose a policy for each block, those that save least first: they recompute when later blocks are freed already.

    The cost exceeds the minimum by less than the difference of two neighbouring policies on the hull; with one block it
    is the minimum.

    Args:
        policies: candidate policies, at least one.
        blocks: number of blocks, at least one.
        budget: bytes for all blocks together.

    Returns:
        One policy per block; None if nothing fits.
    """
    hull = _lower_hull(policies)
    smaller = max(
        (policy for policy in hull if policy.saved * blocks <= budget), key=lambda policy: policy.saved, default=None
    )
    if smaller is None:
        return None
    above = [policy for policy in hull if policy.saved > smaller.saved]
    if not above:
        return [smaller] * blocks
    larger = above[0]
    many = (budget - smaller.saved * blocks) // (larger.saved - smaller.saved)
    remaining = budget - smaller.saved * (blocks - many - 1) - larger.saved * many
    between = min(
        (policy for policy in policies if policy.saved <= remaining), key=lambda policy: (policy.cost, policy.saved)
    )
    return sorted([smaller] * (blocks - many - 1) + [between] + [larger] * many, key=lambda policy: policy.saved)


def _lower_hull(policies: Sequence[BlockPolicy]) -> list[BlockPolicy]:
    """Return the lower convex hull of cost over bytes, from the fewest bytes to the lowest cost."""
    hull: list[BlockPolicy] = []
    for policy in sorted(policies, key=lambda policy: (policy.saved, policy.cost)):
        if hull and policy.cost >= hull[-1].cost:
            continue
        while len(hull) > 1 and _above(hull[-2], hull[-1], policy):
            hull.pop()
        hull.append(policy)
    return hull


def _above(left: BlockPolicy, middle: BlockPolicy, right: BlockPolicy) -> bool:
    """Return True if a point lies on or above the line between its neighbours."""
    by_middle = (middle.cost - left.cost) * (right.saved - left.saved)
    return by_middle >= (right.cost - left.cost) * (middle.saved - left.saved)
