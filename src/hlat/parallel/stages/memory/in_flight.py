"""Passes in flight: replay a pipeline schedule and keep the instants at which memory can peak.

    schedule, rank, ranks, micro-batches -> after each pass: number of forward passes alive, of backward passes whose
        weight gradients are not computed yet, of messages sent, of stages with gradients
        -> the instants that no other instant of the same kind of pass exceeds in all of these numbers

The messages that a rank with several stages has sent are kept until the step ends, when torch waits for them; with one
stage, until the backward pass of the message's micro-batch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from hlat.config.sections import Schedule
from hlat.parallel.stages.pipeline_order import pass_order

_ROUNDS = 4  # rounds of as many micro-batches as ranks to replay; later rounds repeat the last


@dataclass(frozen=True)
class Instant:
    """Numbers that decide the memory of a rank at an instant of a step.

    Passes and stages are weighted by the size of their stage; one of mean size counts 1.

    Attributes:
        forward: True after a forward pass, False during a backward pass.
        stage: index of the pass's stage among those of the rank.
        alive: forward passes whose weight gradients are not computed yet, over all stages.
        waiting: those of ``alive`` whose input gradients are computed; none for the first stage, which has no inputs.
        earlier: those of ``waiting`` except for the current pass.
        sent: messages sent whose buffers are still kept; with several stages those too that a stage hands to the next
            on the same rank, which torch keeps like a receive buffer.
        stages: stages that have gradients from earlier passes.
        received: forward passes alive whose input is such a message or a receive buffer; not weighted.
        waiting_received: those of ``waiting`` whose gradient by the output is one; not weighted.
        last: forward passes alive of the rank's last stage; not weighted.
    """

    forward: bool
    stage: int
    alive: float
    waiting: float
    earlier: float
    sent: int
    stages: float
    received: int
    waiting_received: int
    last: int


@lru_cache(maxsize=4096)
def peak_instants(
    schedule: Schedule,
    rank: int,
    ranks: int,
    count: int,
    sends: tuple[tuple[bool, bool], ...],
    sizes: tuple[float, ...],
) -> tuple[Instant, ...]:
    """Find the instants of a step at which memory can peak.

    Args:
        schedule: pipeline schedule.
        rank: pipeline rank.
        ranks: number of pipeline ranks.
        count: micro-batches of a step.
        sends: for each stage of the rank, whether it sends activations, and gradients, to another rank.
        sizes: layers of each stage of the rank, or any numbers in proportion.
    """
    replayed = min(count, _ROUNDS * ranks)
    found = list(_replay(schedule, rank, ranks, replayed, sends, sizes))
    if len(sizes) > 1 and count > replayed:
        more = (count - replayed) * sum(map(sum, _messages(schedule, rank, ranks, sends)))
        found = [replace(instant, sent=instant.sent + more) for instant in found]
    return tuple(_pareto_front(found))


def _messages(
    schedule: Schedule, rank: int, ranks: int, sends: tuple[tuple[bool, bool], ...]
) -> list[tuple[bool, bool]]:
    """Return for each stage of a rank if it passes on activations, and if it passes on gradients.

    To another rank, or at the turn of a V to its own next stage: torch keeps that like a receive buffer.
    """
    stages = sorted({stage for _, stage, _ in pass_order(schedule, rank, ranks, ranks, len(sends))})
    return [
        (activations or stage + 1 in stages, gradients or stage - 1 in stages)
        for stage, (activations, gradients) in zip(stages, sends, strict=True)
    ]


def _replay(
    schedule: Schedule,
    rank: int,
    ranks: int,
    count: int,
    sends: tuple[tuple[bool, bool], ...],
    sizes: tuple[float, ...],
) -> Iterator[Instant]:
    each, total = len(sizes), sum(sizes)
    passes, waits, has_gradients = [0] * each, [0] * each, [0] * each
    messages = _messages(schedule, rank, ranks, sends)
    sent = 0

    def weighted(numbers: list[int]) -> float:
        return sum(number * size for number, size in zip(numbers, sizes, strict=True)) * each / total

    for kind, stage, _ in pass_order(schedule, rank, ranks, count, each):
        index = stage // ranks
        activations, gradients = messages[index]
        if kind == "forward":
            passes[index] += 1
            sent += activations
        elif kind != "weight":
            sent += gradients
            waits[index] += kind == "input" and stage > 0
        kept = sent if each > 1 else passes[0] * activations
        waiting = weighted(waits)
        earlier = waiting - (sizes[index] * each / total if waits[index] else 0.0)
        yield Instant(
            forward=kind == "forward",
            stage=index,
            alive=weighted(passes),
            waiting=waiting,
            earlier=earlier,
            sent=kept,
            stages=weighted(has_gradients),
            received=sum(number for number, (_, before) in zip(passes, messages, strict=True) if before),
            waiting_received=sum(number for number, (after, _) in zip(waits, messages, strict=True) if after),
            last=passes[-1],
        )
        if kind in ("backward", "weight"):
            has_gradients[index] = 1
            passes[index] -= 1
            waits[index] -= kind == "weight" and stage > 0


def _pareto_front(instants: Iterable[Instant]) -> Iterator[Instant]:
    """Select the instants that no other of a pass of the same kind and stage exceeds in all numbers."""
    front: list[Instant] = []
    for instant in sorted(set(instants), key=_numbers, reverse=True):
        if not any(_kind(other) == _kind(instant) and _exceeds(other, instant) for other in front):
            front.append(instant)
    return iter(front)


def _kind(instant: Instant) -> tuple[bool, int]:
    return instant.forward, instant.stage


def _numbers(instant: Instant) -> tuple[float, ...]:
    """Numbers of an instant of which each needs memory, or with a minus saves some."""
    need = (instant.alive, instant.waiting, instant.earlier, instant.sent, instant.stages, instant.last)
    return *need, -instant.received, -instant.waiting_received


def _exceeds(first: Instant, second: Instant) -> bool:
    return all(a >= b for a, b in zip(_numbers(first), _numbers(second), strict=True))
