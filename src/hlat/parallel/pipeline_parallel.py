"""Pipeline parallelism: the stages of a rank, and the schedule that runs them.

    stages, micro-batches -> torch.distributed.pipelining -> loss of each micro-batch

A stage is built with its own layers only. What it hands on is the residual stream, (micro-batch, positions, width), of
the positions that the rank has (a shard of the sequence under sequence parallelism).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from hlat.model import Decoder
from hlat.parallel.fsdp import reshard_after_every_backward
from hlat.parallel.mesh import Layout
from hlat.parallel.micro_batch import MicroBatch
from hlat.runtime.distributed import in_fake_world
from hlat.runtime.process import enter_phase

_SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_SEVERAL = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}

_AGREED: Any = np.int32(1)  # in place of a tensor, which in a rehearsal has no value


class _ReportingStage(PipelineStage):
    """Torch's stage, which says what it is doing."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        enter_phase("forward")
        return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        enter_phase("backward")
        return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        enter_phase("backward")
        return super().backward_weight_one_chunk(*args, **kwargs)

    # Before the first step the stages vote on whether all know the shapes of what they exchange. Ours do; in a
    # rehearsal, where nobody answers, that is the result.

    def _warmup_forward_vote(self, has_backward: bool, received_acc: torch.Tensor | None = None) -> torch.Tensor:
        return _AGREED if in_fake_world() else super()._warmup_forward_vote(has_backward, received_acc)

    def _warmup_backward_result(self, received_result: torch.Tensor | None = None) -> torch.Tensor:
        return _AGREED if in_fake_world() else super()._warmup_backward_result(received_result)


class Pipeline:
    """The stages of this rank, and how micro-batches go through them.

    Args:
        parts: this rank's stages, ascending.
        layout, rank: its place.
        group: its pipeline.
        shape: of what one stage hands to the next: (micro-batch, positions, width).
        dtype: of that.
        positions: tokens of a sequence that come to this rank.
    """

    def __init__(
        self,
        parts: Sequence[Decoder],
        layout: Layout,
        rank: int,
        group: ProcessGroup,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        positions: int,
        device: torch.device,
    ) -> None:
        self._layout, self._group, self._device = layout, group, device
        self._parts = dict(zip(layout.stages_of(layout.coordinates(rank).pp), parts, strict=True))
        self._shape, self._dtype, self._positions = shape, dtype, positions
        self._wide = torch.promote_types(dtype, torch.float32)  # of losses
        if layout.zero == 3:
            for part in parts:
                reshard_after_every_backward(part)
        self._schedules: dict[int, Any] = {}
        self._divisor: torch.Tensor | int = 1
        self.has_first = 0 in self._parts
        self.has_last = layout.config.stages - 1 in self._parts

    def train(self, batch: MicroBatch, tokens: torch.Tensor | int) -> torch.Tensor:
        """Forward and backward over all micro-batches; returns the summed loss / tokens, zero but on the last stage.

        Args:
            batch: all sequences of this rank's step, of the positions it has.
            tokens: what losses are divided by.
        """
        self._divisor = tokens
        losses: list[torch.Tensor] = []
        schedule = self._schedule(batch.inputs_BS.shape[0] // self._shape[0])
        # The last stage's model computes the loss itself; every stage's attention asks where documents begin.
        along = {"labels": batch.labels_BS} if self.has_last else {}
        if batch.positions_BS is not None:
            along["positions"] = batch.positions_BS
        schedule.step(
            *((batch.inputs_BS,) if self.has_first else ()),
            target=batch.labels_BS if self.has_last else None,
            losses=losses,
            return_outputs=False,
            **along,
        )
        return torch.stack(losses).detach().sum() if losses else torch.zeros((), dtype=self._wide, device=self._device)

    def _schedule(self, micro_batches: int) -> Any:
        if micro_batches not in self._schedules:
            config = self._layout.config
            stages: list[Any] = [self._stage(index, part) for index, part in self._parts.items()]
            kwargs: dict[str, Any] = {"loss_fn": self._divided, "scale_grads": False}
            if config.schedule in _SINGLE:
                schedule: Any = _SINGLE[config.schedule](stages[0], micro_batches, **kwargs)
            else:
                schedule = _SEVERAL[config.schedule](stages, micro_batches, **kwargs)
            self._schedules[micro_batches] = schedule
        return self._schedules[micro_batches]

    def _stage(self, index: int, part: Decoder) -> PipelineStage:
        """Shapes are given, so that torch does not run the stage once to find them."""
        sequences = self._shape[0]
        tokens = torch.empty((sequences, self._positions), dtype=torch.int64, device="meta")
        hidden = torch.empty(self._shape, dtype=self._dtype, device="meta", requires_grad=True)
        loss = torch.empty((), dtype=self._wide, device="meta", requires_grad=True)
        return _ReportingStage(
            part,
            index,
            self._layout.config.stages,
            self._device,
            input_args=tokens if index == 0 else hidden,
            output_args=loss if index == self._layout.config.stages - 1 else hidden,
            group=self._group,
        )

    def _divided(self, loss: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        return loss / self._divisor

    def evaluate(self, batches: Iterable[MicroBatch]) -> torch.Tensor:
        """Summed loss in float64 of micro-batches, forward only; zero but on the last stage."""
        nats = torch.zeros((), dtype=torch.float64, device=self._device)
        pending: list[tuple[dist.Work, torch.Tensor]] = []  # what is being sent must stay alive
        handed: dict[tuple[int, int], torch.Tensor] = {}
        # Micro-batches outermost: both ends of a link then see its messages in one order, in which NCCL runs them, and
        # only a few activations are alive.
        for number, (inputs_BS, labels_BS, positions_BS) in enumerate(batches):
            for index, part in self._parts.items():
                x = inputs_BS if index == 0 else self._receive(index, number, handed)
                out = part(x, labels_BS, positions=positions_BS)
                if index == self._layout.config.stages - 1:
                    nats += out.double()
                else:
                    self._hand_on(index, number, out, handed, pending)
            while len(pending) > self._layout.pipeline:
                pending.pop(0)[0].wait()
        for work, _ in pending:
            work.wait()
        return nats

    def _receive(self, stage: int, number: int, handed: dict[tuple[int, int], torch.Tensor]) -> torch.Tensor:
        if (stage, number) in handed:
            return handed.pop((stage, number))
        buffer = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        dist.recv(buffer, group=self._group, group_src=self._layout.stage_rank(stage - 1))
        return buffer

    def _hand_on(
        self,
        stage: int,
        number: int,
        out: torch.Tensor,
        handed: dict[tuple[int, int], torch.Tensor],
        pending: list[tuple[dist.Work, torch.Tensor]],
    ) -> None:
        if stage + 1 in self._parts:
            handed[(stage + 1, number)] = out
            return
        out = out.contiguous()
        work = dist.isend(out, group=self._group, group_dst=self._layout.stage_rank(stage + 1))
        assert work is not None, "this rank is in the group"
        pending.append((work, out))
