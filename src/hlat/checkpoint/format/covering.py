"""Check that chunks cover a tensor, each element exactly once.

    shape, offsets and sizes of chunks --cover_problem--> a description of the problem, or ""

The time is proportional to the number of chunks.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a chunk."""

_DIVIDED = 4  # a tensor may be split along at most this many dimensions; weights have two, stacks of them three


def cover_problem(shape: tuple[int, ...], boxes: Sequence[Box]) -> str:
    """Describe why chunks do not cover a tensor, each element exactly once.

    Args:
        shape: shape of the tensor, without negative numbers.
        boxes: offsets and sizes of the chunks, without negative numbers.

    Returns:
        A phrase that can follow the tensor's name; empty if the chunks cover the tensor.
    """
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape):
            return f"the number of dimensions of a chunk differs from that of its shape {shape}"
        if any(offset + size > full for full, offset, size in zip(shape, offsets, sizes, strict=True)):
            return f"a chunk lies outside its shape {shape}"
    covered = sum(math.prod(sizes) for _, sizes in boxes)
    if covered != math.prod(shape):
        return f"shape {shape} has {math.prod(shape)} elements, its chunks have {covered}"
    if len(boxes) < 2:
        return ""
    divided = [d for d, full in enumerate(shape) if any(sizes[d] != full for _, sizes in boxes)]
    if len(divided) > _DIVIDED:
        return f"it is split along {len(divided)} dimensions, hlat reads at most {_DIVIDED}"
    wrong = _corner_differences(shape, boxes, divided)
    return f"two of its chunks overlap at {min(wrong)}" if wrong else ""


def _corner_differences(shape: tuple[int, ...], boxes: Sequence[Box], divided: Sequence[int]) -> list[tuple[int, ...]]:
    """Corners whose signed counts differ between the boxes and the full tensor.

    The list is empty if and only if the boxes cover the tensor exactly once. Let f(x) be the number of boxes that
    contain x. The indicator function of an interval [a, b) is H(x - a) - H(x - b), with H the unit step. So f is a sum
    of products of steps, one product for each corner of each box, with sign (-1)^(number of upper ends). Such products
    are linearly independent for different corners. Hence f is 1 inside the tensor and 0 elsewhere if and only if the
    signed corners of all boxes add up to those of the full tensor. This takes 2^dimensions operations per box.
    """
    count: Counter[tuple[int, ...]] = Counter()
    full_box = ((0,) * len(shape), shape)
    for (offsets, sizes), weight in itertools.chain(((box, 1) for box in boxes), [(full_box, -1)]):
        corners: list[tuple[tuple[int, ...], int]] = [((), weight)]
        for d in divided:
            begin, end = offsets[d], offsets[d] + sizes[d]
            corners = [(*pair,) for at, sign in corners for pair in (((*at, begin), sign), ((*at, end), -sign))]
        for at, sign in corners:
            count[at] += sign
    return [at for at, number in count.items() if number]
