"""Passes of micro-batches: what a pass reads, the order of the passes of a rank, their labels, and the sum of losses.

    complete sequences on the CPU -> the positions of this rank, on its device -> micro-batches
    schedule, rank, micro-batches -> [(kind of pass, stage, micro-batch), ...]
    pass_label("forward", 3, 5) -> "hlat::forward stage 3 micro-batch 5" in a profile -> parse_pass_label
    losses of micro-batches, fp32 on the device --one copy--> CPU --exact sum, one rounding--> float64

The orders are those of ``torch.distributed.pipelining``; a test compares them. They are 1F1B and its interleaved form
(Narayanan et al. 2021, figure 4), GPipe, and two schedules that split the backward pass, so that weight gradients,
which no other stage needs, fill bubbles (Qi et al. 2024, "Zero bubble pipeline parallelism"): interleaved zero bubble,
and zbv, a V of two stages per rank.

Losses are summed on the CPU, which is the same on every device type: some devices have no float64.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, cast

import torch
from torch.profiler import record_function

from hlat.config import Schedule


class MicroBatch(NamedTuple):
    """Sequences, complete or restricted to the positions of a rank."""

    inputs_BS: torch.Tensor  # token ids, int64
    labels_BS: torch.Tensor  # the next token of each, int64; ``hlat.model.IGNORED`` for none
    # Position of each token within its document, int64; every 0 starts a document. None if attention is not restricted
    # to documents.
    positions_BS: torch.Tensor | None = None

    def local(self, spans: tuple[tuple[int, int], ...], device: torch.device) -> "MicroBatch":
        """Select the positions of (start, stop) pairs from complete sequences, and copy them to a device."""

        def select(rows_BS: torch.Tensor) -> torch.Tensor:
            selected = rows_BS if len(spans) == 1 else torch.cat([rows_BS[:, a:b] for a, b in spans], dim=1)
            return selected.to(device, non_blocking=True)

        positions = None if self.positions_BS is None else select(self.positions_BS)
        return MicroBatch(select(self.inputs_BS), select(self.labels_BS), positions)

    def split(self, size: int) -> list["MicroBatch"]:
        inputs, labels = self.inputs_BS.split(size), self.labels_BS.split(size)
        positions = [None] * len(inputs) if self.positions_BS is None else self.positions_BS.split(size)
        return [MicroBatch(*fields) for fields in zip(inputs, labels, positions, strict=True)]


# ``backward`` computes all gradients; a split pass has ``input``, which the stage before needs, and ``weight``
PassKind = Literal["forward", "backward", "input", "weight"]

PassOrder = list[tuple[PassKind, int, int]]


def pass_order(schedule: Schedule, rank: int, ranks: int, count: int, each: int) -> PassOrder:
    """Return the passes of a pipeline rank in order, for ``count`` micro-batches and ``each`` stages per rank."""
    if schedule == "zbv":
        return _zbv_order(rank, ranks, count)
    total = count * each
    warm_up = total
    if schedule != "gpipe":
        # Forward passes before the first backward pass. With several stages per rank the first micro-batch has to pass
        # all ranks several times; zero bubble starts backward as early as possible.
        step = 2 if schedule == "interleaved-1f1b" else 1
        warm_up = min(total, step * (ranks - rank - 1) + (each - 1) * _round(count, ranks))
    forwards: PassOrder = [("forward", *_nth_pass(index, rank, ranks, count, each, True)) for index in range(total)]
    backwards = [_nth_pass(index, rank, ranks, count, each, False) for index in range(total)]
    order = forwards[:warm_up]
    split = schedule == "interleaved-zero-bubble"
    for index, backward in enumerate(backwards):
        order += forwards[warm_up + index : warm_up + index + 1]
        order.append(("input" if split else "backward", *backward))
        # Weight gradients fill bubbles; rank r delays them by r passes.
        if split and index >= rank:
            order.append(("weight", *backwards[index - rank]))
    return order + ([("weight", *backward) for backward in backwards[max(0, total - rank) :]] if split else [])


def _zbv_order(rank: int, ranks: int, count: int) -> PassOrder:
    """Order of zbv: a rank's first stage is on the way down the V, its second on the way up."""
    down, up = rank, 2 * ranks - 1 - rank
    # The order is defined for enough micro-batches to fill the pipeline; passes of missing ones are dropped.
    filled = max(count, 2 * ranks - 1)
    order: PassOrder = []
    done: Counter[tuple[PassKind, int]] = Counter()

    def run(*passes: tuple[PassKind, int]) -> None:
        for kind, stage in passes:
            order.append((kind, stage, done[kind, stage]))
            done[kind, stage] += 1

    for _ in range(2 * (ranks - rank) - 1):
        run(("forward", down))
    for _ in range(rank):
        run(("forward", up), ("forward", down))
    for _ in range(ranks - rank):
        run(("forward", up), ("input", up), ("weight", up))
    while done["forward", up] < filled:
        if done["forward", down] < filled:
            run(("forward", down))
        run(("input", down), ("weight", down), ("forward", up), ("input", up), ("weight", up))
    for _ in range(rank):
        run(("input", down), ("input", up))
    for _ in range(ranks - rank):
        run(("input", down), ("weight", down))
    for stage in (up, down):
        while done["weight", stage] < filled:
            run(("weight", stage))
    return [each for each in order if each[2] < count]


def _round(count: int, ranks: int) -> int:
    """Number of consecutive micro-batches that a stage runs before the rank switches to its next stage."""
    return count // max(1, count // ranks)


def _nth_pass(index: int, rank: int, ranks: int, count: int, each: int, forward: bool) -> tuple[int, int]:
    """Stage and micro-batch of a rank's n-th pass in one direction."""
    size = _round(count, ranks) if each > 1 else count
    within = index % (size * each)
    stage_index = within // size
    stage = (stage_index if forward else each - 1 - stage_index) * ranks + rank
    return stage, index // (size * each) * size + within % size


_LABEL = re.compile(r"hlat::(\w+) stage (\d+) micro-batch (\d+)")


class LabelledPass(NamedTuple):
    """A pass of a micro-batch through a stage, both counted from 0."""

    kind: PassKind
    stage: int
    micro_batch: int


def pass_label(kind: PassKind, stage: int, micro_batch: int) -> AbstractContextManager[Any]:
    """Label everything in the block, for profilers and rehearsals."""
    return record_function(f"hlat::{kind} stage {stage} micro-batch {micro_batch}")


def parse_pass_label(text: str) -> LabelledPass | None:
    """Return the pass that a label names; None for labels of others."""
    found = _LABEL.fullmatch(text)
    return None if found is None else LabelledPass(cast("PassKind", found[1]), int(found[2]), int(found[3]))


def sum_on_host(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum scalars of one device exactly and round once: float64, on the CPU; none gives 0."""
    values = torch.stack(list(losses)).tolist() if losses else []
    # math.fsum is exact in any order, and refuses infinities of both signs, which a plain sum makes NaN.
    return torch.tensor(math.fsum(values) if all(map(math.isfinite, values)) else sum(values), dtype=torch.float64)
