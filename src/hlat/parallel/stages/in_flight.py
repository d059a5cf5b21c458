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

from hlat.config.sections import Schedule
from hlat.parallel.stages.pipeline_order import pass_order

_ROUNDS = 4  # of as many micro-batches as there are ranks: more of them are like the last


@dataclass(frozen=True)
class Instant:
    """A moment of a step, on one rank.

    Attributes:
        forward: whether a forward pass has just run, and not a backward one.
        alive: forward passes whose gradients of weights have not been made, over all stages.
        waiting: of these, those that have run backward by their inputs; the first stage does nothing there.
        earlier: of these, all but the one that runs.
        sent: messages that are kept.
        stages: that have made gradients before.

    Passes and stages are counted by the size of their stage; one of mean size counts 1.
    """

    forward: bool
    alive: float
    waiting: float
    earlier: float
    sent: int
    stages: float


@lru_cache(maxsize=4096)
def peak_instants(
    schedule: Schedule,
    rank: int,
    ranks: int,
    count: int,
    talks: tuple[tuple[bool, bool], ...],
    sizes: tuple[float, ...],
) -> tuple[Instant, ...]:
    """The instants that can need most memory.

    Args:
        rank, ranks: of the pipeline.
        count: micro-batches of a step.
        talks: for each stage of the rank, whether it sends results, and gradients, to another rank.
        sizes: layers of each stage of the rank, or any numbers in proportion.
    """
    walked = min(count, _ROUNDS * ranks)
    found = list(_walk(schedule, rank, ranks, walked, talks, sizes))
    if len(sizes) > 1 and count > walked:
        more = (count - walked) * sum(map(sum, talks))
        found = [replace(one, sent=one.sent + more) for one in found]
    return tuple(_largest(found))


def _walk(
    schedule: Schedule,
    rank: int,
    ranks: int,
    count: int,
    talks: tuple[tuple[bool, bool], ...],
    sizes: tuple[float, ...],
) -> Iterator[Instant]:
    each, whole = len(sizes), sum(sizes)
    passes, waits, made = [0] * each, [0] * each, [0] * each
    sent = 0

    def counted(numbers: list[int]) -> float:
        return sum(number * size for number, size in zip(numbers, sizes, strict=True)) * each / whole

    for kind, stage, _ in pass_order(schedule, rank, ranks, count, each):
        turn = stage // ranks
        results, gradients = talks[turn]
        if kind == "forward":
            passes[turn] += 1
            sent += results
        elif kind != "weight":
            sent += gradients
            waits[turn] += kind == "input" and stage > 0
        kept = sent if each > 1 else passes[0] * results
        waiting = counted(waits)
        earlier = waiting - (sizes[turn] * each / whole if waits[turn] else 0.0)
        yield Instant(kind == "forward", counted(passes), waiting, earlier, kept, counted(made))
        if kind in ("backward", "weight"):
            made[turn] = 1
            passes[turn] -= 1
            waits[turn] -= kind == "weight" and stage > 0


def _largest(found: Iterable[Instant]) -> Iterator[Instant]:
    """Those that no other exceeds in everything."""
    kept: list[Instant] = []
    for one in sorted(set(found), key=_sizes, reverse=True):
        if not any(other.forward == one.forward and _exceeds(other, one) for other in kept):
            kept.append(one)
    return iter(kept)


def _sizes(one: Instant) -> tuple[float, ...]:
    return one.alive, one.waiting, one.earlier, one.sent, one.stages


def _exceeds(one: Instant, other: Instant) -> bool:
    return all(a >= b for a, b in zip(_sizes(one), _sizes(other), strict=True))
