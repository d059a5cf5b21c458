"""Pipeline parallelism: the stages of a rank, and the schedule that runs them.

    stages, micro-batches -> torch.distributed.pipelining -> loss of each micro-batch

A stage is built with its own layers only. It sends the residual stream, (micro-batch, positions, width), of the rank's
positions (a shard of the sequence with sequence parallelism).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from hlat.config import ZERO_BUBBLE
from hlat.model import Decoder, Reduction, head_loss, split_backward
from hlat.parallel.fsdp import reshard_after_every_backward
from hlat.parallel.mesh.mesh_layout import Layout
from hlat.parallel.micro_batch import MicroBatch
from hlat.parallel.pipeline.outbox import Outbox
from hlat.parallel.pipeline.stage import ReportingStage
from hlat.runtime.backend import torch_private
from hlat.runtime.errors import LaunchError

_SINGLE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MULTI_STAGE = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class Pipeline:
    """The stages of this rank, and the schedules that run micro-batches through them.

    Args:
        stages: this rank's stages, ascending.
        layout: parallel layout of all ranks.
        rank: this rank.
        group: process group of this rank's pipeline.
        shape: shape of the messages between stages: (micro-batch, positions, width).
        dtype: dtype of the messages.
        positions: tokens of a sequence that this rank computes.
        device: device of the stages.
    """

    def __init__(
        self,
        stages: Sequence[Decoder],
        layout: Layout,
        rank: int,
        group: ProcessGroup,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        positions: int,
        device: torch.device,
    ) -> None:
        if layout.config.schedule in ZERO_BUBBLE and (reason := torch_private.split_backward_problem()):
            raise LaunchError(f"parallel.schedule={layout.config.schedule}: {reason}")
        self._layout, self._group, self._device = layout, group, device
        self._stages = dict(zip(layout.stages_of(layout.coordinates(rank).pp), stages, strict=True))
        self._shape, self._dtype, self._positions = shape, dtype, positions
        self._wide = torch.promote_types(dtype, torch.float32)  # dtype of losses
        if layout.zero == 3:
            for stage in stages:
                reshard_after_every_backward(stage)
        self._current: tuple[int, Any] = (0, None)  # torch's schedule, for a number of micro-batches
        # 1F1B sends and receives in one operation.
        self._outbox = Outbox(at_once=layout.config.schedule != "1f1b")
        self._divisor: torch.Tensor | int = 1
        self.has_first = 0 in self._stages
        self.has_last = layout.config.stages - 1 in self._stages

    def train(self, batch: MicroBatch, tokens: torch.Tensor | int) -> torch.Tensor:
        """Run forward and backward over all micro-batches.

        Args:
            batch: all sequences of a step, with this rank's positions.
            tokens: divisor of the loss.

        Returns:
            The summed loss / tokens on the rank of the last stage, zero on others.
        """
        self._divisor = tokens
        losses: list[torch.Tensor] = []
        schedule = self._schedule(batch.inputs_BS.shape[0] // self._shape[0])
        # The model of the last stage computes the loss; attention of every stage needs the starts of documents.
        kwargs = {"labels": batch.labels_BS} if self.has_last else {}
        if batch.positions_BS is not None:
            kwargs["positions"] = batch.positions_BS
        with split_backward() if self._layout.config.schedule in ZERO_BUBBLE else nullcontext():
            schedule.step(
                *((batch.inputs_BS.contiguous(),) if self.has_first else ()),  # torch 2.11 wants the given strides
                target=batch.labels_BS if self.has_last else None,
                losses=losses,
                return_outputs=False,
                **kwargs,
            )
        self._outbox.wait()
        return torch.stack(losses).detach().sum() if losses else torch.zeros((), dtype=self._wide, device=self._device)

    def _schedule(self, micro_batches: int) -> Any:
        if micro_batches != self._current[0]:
            self._current = (0, None)
            config = self._layout.config
            stages: list[Any] = [self._build_stage(index, model) for index, model in self._stages.items()]
            options: dict[str, Any] = {"loss_fn": self._scale_loss, "scale_grads": False}
            if config.schedule in _SINGLE_STAGE:
                schedule: Any = _SINGLE_STAGE[config.schedule](stages[0], micro_batches, **options)
            else:
                schedule = _MULTI_STAGE[config.schedule](stages, micro_batches, **options)
            self._current = (micro_batches, schedule)
        return self._current[1]

    def _build_stage(self, index: int, model: Decoder) -> ReportingStage:
        """Build torch's stage with given shapes, so that torch does not run it once to find them."""
        sequences = self._shape[0]
        tokens = torch.empty((sequences, self._positions), dtype=torch.int64, device="meta")
        hidden = torch.empty(self._shape, dtype=self._dtype, device="meta", requires_grad=True)
        loss = torch.empty((), dtype=self._wide, device="meta", requires_grad=True)
        return ReportingStage(
            model,
            index,
            self._layout.config.stages,
            self._device,
            input_args=tokens if index == 0 else hidden,
            output_args=loss if index == self._layout.config.stages - 1 else hidden,
            group=self._group,
            outbox=self._outbox,
            message=hidden,
        )

    def _scale_loss(self, loss: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        return loss / self._divisor

    def evaluate(self, batches: Iterable[MicroBatch], *, reduction: Reduction = head_loss) -> Iterator[torch.Tensor]:
        """Compute losses of micro-batches, or another reduction of them, forward only.

        Args:
            batches: micro-batches with this rank's positions.
            reduction: computes the result of a micro-batch from its hidden states and labels.

        Yields:
            The result of each micro-batch (losses in nats), on the rank of the last stage; nothing on others.
        """
        pending: list[tuple[dist.Work, torch.Tensor]] = []  # keeps tensors alive while they are sent
        local: dict[tuple[int, int], torch.Tensor] = {}
        # The outer loop is over micro-batches: sender and receiver then issue messages in the same order, as NCCL
        # requires, and only a few activations are alive.
        for number, (inputs_BS, labels_BS, positions_BS) in enumerate(batches):
            for index, model in self._stages.items():
                x = inputs_BS if index == 0 else self._receive(index, number, local, self._message_shape(inputs_BS))
                out = model(x, labels_BS, positions=positions_BS, reduction=reduction)
                if index == self._layout.config.stages - 1:
                    yield out
                else:
                    self._send(index, number, out, local, pending)
            while len(pending) > self._layout.pipeline:
                pending.pop(0)[0].wait()
        for work, _ in pending:
            work.wait()

    def _message_shape(self, inputs_BS: torch.Tensor) -> tuple[int, int, int]:
        """Return the shape of the messages of a micro-batch, which may have other rows than those of training."""
        _, sent, width = self._shape
        rows, positions = inputs_BS.shape
        return rows, positions * sent // self._positions, width

    def _receive(
        self, stage: int, number: int, local: dict[tuple[int, int], torch.Tensor], shape: tuple[int, int, int]
    ) -> torch.Tensor:
        if (stage, number) in local:
            return local.pop((stage, number))
        buffer = torch.empty(shape, dtype=self._dtype, device=self._device)
        dist.recv(buffer, group=self._group, group_src=self._layout.stage_rank(stage - 1))
        return buffer

    def _send(
        self,
        stage: int,
        number: int,
        out: torch.Tensor,
        local: dict[tuple[int, int], torch.Tensor],
        pending: list[tuple[dist.Work, torch.Tensor]],
    ) -> None:
        if stage + 1 in self._stages:
            local[(stage + 1, number)] = out
            return
        out = out.contiguous()
        work = dist.isend(out, group=self._group, group_dst=self._layout.stage_rank(stage + 1))
        assert work is not None, "this rank is in the group"
        pending.append((work, out))
