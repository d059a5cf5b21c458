"""Division of rows into batches for data-parallel ranks."""

from collections.abc import Sequence


def split_batches(members: Sequence[int], size: int, ranks: int, rank: int) -> list[list[int]]:
    """Split rows into batches, and return those of a data-parallel rank; every rank has the same number of them."""
    rounds = -(-len(members) // (size * ranks))
    starts = [(number * ranks + rank) * size for number in range(rounds)]
    return [list(members[start : start + size]) for start in starts]
