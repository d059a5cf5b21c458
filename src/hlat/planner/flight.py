"""What passes of a pipeline rank wait for something at the instants of a step: the order walked through, once.

    schedule, rank, ranks, micro-batches -> at each pass: how many forward passes are alive, how many backward passes
        wait for their weights' part, how many messages have been sent, how many stages have gradients
        -> the instants that no other exceeds in all of these

Messages of a rank with several stages are kept until its step ends (torch waits for them then); with one stage, until
what was sent runs backward.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from hlat.config import Schedule
from hlat.planner.orders import order_of

_ROUNDS = 4  # of as many micro-batches as there are ranks: more of them are like the last


@dataclass(frozen=True)
class Instant:
    """A moment of a step, on one rank.

    Attributes:
        forward: whether a forward pass has just run, and not a backward one.
        alive: forward passes whose gradients of weights have not been made, over all stages.
        waiting: of these, those that have run backward by their inputs; the first stage does nothing there.
        sent: messages that are kept.
        stages: that have made gradients before.
    """

    forward: bool
    alive: int
    waiting: int
    sent: int
    stages: int


@lru_cache(maxsize=4096)
def instants(
    schedule: Schedule, rank: int, ranks: int, count: int, each: int, talks: tuple[tuple[bool, bool], ...]
) -> tuple[Instant, ...]:
    """The instants that can need most memory.

    Args:
        rank, ranks: of the pipeline.
        count: micro-batches of a step.
        each: stages per rank.
        talks: for each stage of the rank, whether it sends results, and gradients, to another rank.
    """
    walked = min(count, _ROUNDS * ranks)
    found = list(_walk(schedule, rank, ranks, walked, each, talks))
    if each > 1 and count > walked:
        more = (count - walked) * sum(map(sum, talks))
        found = [replace(one, sent=one.sent + more) for one in found]
    return tuple(_largest(found))


def _walk(
    schedule: Schedule, rank: int, ranks: int, count: int, each: int, talks: tuple[tuple[bool, bool], ...]
) -> Iterator[Instant]:
    alive = waiting = sent = 0
    made: set[int] = set()
    for kind, stage, _ in order_of(schedule, rank, ranks, count, each):
        results, gradients = talks[stage // ranks]
        if kind == "forward":
            alive += 1
            sent += results
        elif kind != "weight":
            sent += gradients
            waiting += kind == "input" and stage > 0
        yield Instant(kind == "forward", alive, waiting, sent if each > 1 else alive * results, len(made))
        if kind in ("backward", "weight"):
            made.add(stage)
            alive -= 1
            waiting -= kind == "weight" and stage > 0


def _largest(found: Iterable[Instant]) -> Iterator[Instant]:
    """Those that no other exceeds in everything."""
    kept: list[Instant] = []
    for one in sorted(set(found), key=_sizes, reverse=True):
        if not any(other.forward == one.forward and _exceeds(other, one) for other in kept):
            kept.append(one)
    return iter(kept)


def _sizes(one: Instant) -> tuple[int, int, int, int]:
    return one.alive, one.waiting, one.sent, one.stages


def _exceeds(one: Instant, other: Instant) -> bool:
    return all(a >= b for a, b in zip(_sizes(one), _sizes(other), strict=True))
