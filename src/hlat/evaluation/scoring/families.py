"""Families of sequences with a common stem: tokens at the beginning that are computed once for all of them.

sorted sequences -> tokens that neighbours have in common -> families with the fewest tokens to compute in total
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hlat.evaluation.scoring.requests import Tokens
from hlat.evaluation.scoring.token_tree import common_prefix

_SHORTEST_STEM = 24  # tokens: what a stem saves has to be worth a forward pass of its own
_MOST_LEVELS = 64  # of nested stems: their lengths are rounded down to a multiple of the longest / 64


@dataclass(frozen=True)
class Member:
    """Facts that decide about the family of a sequence, or of several that are computed in one row.

    Attributes:
        tokens: the sequence, or the first of them.
        most_stem: number of tokens at the beginning that a stem may have.
        size: number of tokens to compute if there is no stem.
    """

    tokens: Tokens
    most_stem: int
    size: int


def find_families(members: Sequence[Member]) -> list[tuple[int, range]]:
    """Divide members, sorted by tokens, into families.

    Returns:
        The length of the stem and the indices of the members of each family, in order; a member without one is alone,
        with a stem of 0.
    """
    if not members:
        return []
    step = max(1, max(member.most_stem for member in members) // _MOST_LEVELS)
    shared = [
        min(common_prefix(left.tokens, right.tokens), left.most_stem, right.most_stem)
        for left, right in pairwise(members)
    ]
    levels = [count // step * step if count >= _SHORTEST_STEM else 0 for count in shared]
    return _divide(members, levels, 0, len(members))[1]


def _divide(
    members: Sequence[Member], levels: Sequence[int], start: int, stop: int
) -> tuple[int, list[tuple[int, range]]]:
    """Divide the members from ``start`` to ``stop``; return the tokens to compute, and the families."""
    total = sum(member.size for member in members[start:stop])
    if stop - start == 1:
        return total, [(0, range(start, stop))]
    stem = min(levels[start : stop - 1])
    together = total - stem * (stop - start - 1)
    whole = [(stem, range(start, stop))]
    cuts = [start, *(index + 1 for index in range(start, stop - 1) if levels[index] == stem), stop]
    if len(cuts) == stop - start + 1:  # all neighbours share the same, so no part of them saves more
        return (together, whole) if stem else (total, [(0, range(index, index + 1)) for index in range(start, stop)])
    parts = [_divide(members, levels, low, high) for low, high in pairwise(cuts)]
    apart = sum(part[0] for part in parts)
    if stem and together <= apart:
        return together, whole
    return apart, [family for part in parts for family in part[1]]
