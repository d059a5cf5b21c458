"""Blocks that are a tensor together: each of its elements in exactly one of them.

    shape, offsets and sizes of blocks --cover_problem--> what is wrong, or nothing

The time is proportional to the number of blocks.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a block."""

_DIVIDED = 4  # along how many dimensions a tensor may be divided; weights have two, in stacks three


def cover_problem(shape: tuple[int, ...], boxes: Sequence[Box]) -> str:
    """Say what keeps blocks from being a tensor, each element once.

    Args:
        shape: of the tensor; no number is negative.
        boxes: offsets and sizes of the blocks; no number is negative.

    Returns:
        A phrase that follows the tensor's name; empty where they are the tensor.
    """
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape):
            return f"a piece of another number of dimensions than its shape {shape}"
        if any(offset + size > full for full, offset, size in zip(shape, offsets, sizes, strict=True)):
            return f"a piece lies outside its shape {shape}"
    covered = sum(math.prod(sizes) for _, sizes in boxes)
    if covered != math.prod(shape):
        return f"shape {shape} has {math.prod(shape)} elements, its pieces have {covered}"
    if len(boxes) < 2:
        return ""
    divided = [d for d, full in enumerate(shape) if any(sizes[d] != full for _, sizes in boxes)]
    if len(divided) > _DIVIDED:
        return f"it is divided along {len(divided)} dimensions, and hlat reads at most {_DIVIDED}"
    wrong = _corner_differences(shape, boxes, divided)
    return f"two of its pieces overlap at {min(wrong)}" if wrong else ""


def _corner_differences(shape: tuple[int, ...], boxes: Sequence[Box], divided: Sequence[int]) -> list[tuple[int, ...]]:
    """Corners that the boxes and the whole do not have alike; none if and only if the boxes are the whole, once.

    Let f(x) be how many boxes contain x. The indicator of a box [a, b) along one axis is H(x - a) - H(x - b), with H
    the unit step, so that f is a sum of products of steps, one for each corner, with sign (-1)^(number of upper ends).
    Such products are linearly independent for different corners: f is 1 in the whole and 0 elsewhere if and only if
    the signed corners of all boxes add up to those of the whole. That takes 2^dimensions operations for each box.
    """
    count: Counter[tuple[int, ...]] = Counter()
    whole = ((0,) * len(shape), shape)
    for (offsets, sizes), weight in itertools.chain(((box, 1) for box in boxes), [(whole, -1)]):
        corners: list[tuple[tuple[int, ...], int]] = [((), weight)]
        for d in divided:
            begin, end = offsets[d], offsets[d] + sizes[d]
            corners = [(*pair,) for at, sign in corners for pair in (((*at, begin), sign), ((*at, end), -sign))]
        for at, sign in corners:
            count[at] += sign
    return [at for at, number in count.items() if number]
