"""The least recomputation with which what is kept fits into a budget.

    ways to treat a block, each with bytes kept and cost -> for every block a way, together within the budget

The blocks are alike, so the relaxed problem (fractions of blocks) is solved by the lower convex hull of the ways: all
blocks take one of two neighbours on it. Whole blocks cost less than one step between these neighbours more than that:
one block at most is left between them, and takes the cheapest way that still fits. Few kinds of blocks are worth
something by themselves: each is compiled once.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockPolicy:
    """One way to treat a block.

    Attributes:
        recomputed: names of ``hlat.model.derived.RECOMPUTABLE``.
        kept: bytes.
        cost: of what is computed again; 0 for nothing.
    """

    recomputed: frozenset[str]
    kept: int
    cost: float


def cheapest(ways: Sequence[BlockPolicy], blocks: int, budget: int) -> list[BlockPolicy] | None:
    """A way for each block, those that keep least first: they are recomputed when later blocks have been freed.

    The cost is less than the difference of two neighbours on the hull above the least possible; with one block it is
    the least possible.

    Args:
        ways: at least one.
        blocks: at least one.
        budget: bytes for all blocks together.

    Returns:
        None where nothing fits.
    """
    hull = _hull(ways)
    dear = max((way for way in hull if way.kept * blocks <= budget), key=lambda way: way.kept, default=None)
    if dear is None:
        return None
    above = [way for way in hull if way.kept > dear.kept]
    if not above:
        return [dear] * blocks
    cheap = above[0]
    many = (budget - dear.kept * blocks) // (cheap.kept - dear.kept)
    room = budget - dear.kept * (blocks - many - 1) - cheap.kept * many
    between = min((way for way in ways if way.kept <= room), key=lambda way: (way.cost, way.kept))
    return sorted([dear] * (blocks - many - 1) + [between] + [cheap] * many, key=lambda way: way.kept)


def _hull(ways: Sequence[BlockPolicy]) -> list[BlockPolicy]:
    """The lower convex hull of cost over bytes, from the fewest bytes to the least cost."""
    hull: list[BlockPolicy] = []
    for way in sorted(ways, key=lambda way: (way.kept, way.cost)):
        if hull and way.cost >= hull[-1].cost:
            continue
        while len(hull) > 1 and _above(hull[-2], hull[-1], way):
            hull.pop()
        hull.append(way)
    return hull


def _above(left: BlockPolicy, middle: BlockPolicy, right: BlockPolicy) -> bool:
    """Whether a point lies on or above the line between its neighbours."""
    by_middle = (middle.cost - left.cost) * (right.kept - left.kept)
    return by_middle >= (right.cost - left.cost) * (middle.kept - left.kept)
