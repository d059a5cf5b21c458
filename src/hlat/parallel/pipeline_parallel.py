"""Pipeline parallelism: the stages of a rank, the schedule that runs them, and the messages between stages.

    stages, micro-batches -> torch.distributed.pipelining -> loss of each micro-batch
    received input -> forward -> output -> sent; the graph stays, the output's memory goes
    received gradient -> backward -> gradient by the input -> sent
    send operations of a pass -> sent at once, the oldest are waited for -> at most PENDING_SENDS tensors are kept

A stage is built with its own layers only. It sends the residual stream, (micro-batch, positions, width), of the rank's
positions (a shard of the sequence with sequence parallelism).

Stages are torch's, but their messages live no longer than they are needed. Torch allocates the buffers of all messages
before the first step and keeps them. It also keeps the output of every micro-batch in flight. Here a buffer is
allocated when its receive starts, and belongs to the pass that uses it. Of an output only a tensor without memory is
kept, through which backward enters the graph. Megatron-LM frees outputs likewise (``deallocate_pipeline_outputs``), and
so did the training of Llama 3 (arXiv 2407.21783, section 3.3.2).

Torch's schedules with several stages per rank, and GPipe, send after each pass, but wait only when the step or its
forward half ends. Until then every message stays in memory. Here ranks wait earlier, which cannot block for ever:

- All messages have one order, and the order of every rank is a part of it. Torch appends a receive to its rank when it
  appends the send (``_add_send_recv`` in its schedules, the same in 2.11 to 2.14). GPipe's messages are ordered by
  half, micro-batch and stage.
- Take the first message that has not ended. Both of its ranks have ended all earlier ones, so both come to it, and it
  ends, even if every send waits for its receive.

With gloo a wait blocks the process; with NCCL it blocks the stream, on which kernels, sends and receives keep the order
of the process. 1F1B combines sends and receives in operations of its own, which stay as they are. A test lets ranks
wait at every message (tests/parallel/test_pipeline_waiting.py).
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _batch_p2p,
    get_schedule_class,
)

from hlat.config import ZERO_BUBBLE
from hlat.model import Decoder, Reduction, head_loss, split_backward
from hlat.parallel.data_parallel import MicroBatch, pass_label, reshard_after_every_backward
from hlat.parallel.layout import Layout
from hlat.parallel.stages.in_flight import PENDING_SENDS
from hlat.runtime.backend import torch_private
from hlat.runtime.distributed.join import in_fake_world
from hlat.runtime.errors import LaunchError
from hlat.runtime.progress import enter_phase


class Outbox:
    """Sends the messages of a rank's stages."""

    def __init__(self, *, at_once: bool) -> None:
        # False if the schedule sends a pass's messages together with receives (1F1B), and waits for both.
        self._at_once = at_once
        # Sends, with their tensors, which must live until they are sent.
        self._pending: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def send(self, operations: Sequence[dist.P2POp]) -> list[dist.P2POp]:
        """Send the messages of a pass, or return the operations that the schedule has to start."""
        if not self._at_once:
            return list(operations)
        for each in operations:
            # In the way in which schedules start receives: by NCCL's communicator of the group in torch 2.11, of the
            # pair in 2.12.
            (work,) = _batch_p2p([each])
            self._pending.append((work, each.tensor))
        self.wait(PENDING_SENDS)
        return []

    def wait(self, most: int = 0) -> None:
        """Wait for the oldest sends until at most so many are left."""
        while len(self._pending) > most:
            work, _ = self._pending.popleft()
            work.wait()


_NO_BUFFER = torch.empty(0, device="meta")  # not None: torch 2.11 clears the gradients of all buffers
_AGREEMENT: Any = np.int32(1)  # instead of a tensor, which has no value in a rehearsal


class _GraphEnd(torch.autograd.Function):
    """Has the shape of its input and takes its gradient, in the memory of one element."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor) -> torch.Tensor:
        # Not expand(): torch detaches the outputs of split passes in place, which views do not allow.
        return torch.empty_strided(out.shape, (0,) * out.dim(), dtype=out.dtype, device=out.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class ReportingStage(PipelineStage):
    """Torch's stage; frees its messages, reports the phase of this process, and labels each pass for profilers."""

    def __init__(self, *settings: Any, outbox: Outbox, message: torch.Tensor, **named: Any) -> None:
        super().__init__(*settings, **named)
        # The message has the shape and dtype of all messages between stages, without memory.
        self._outbox, self._message = outbox, message
        self._outputs: dict[int, torch.Tensor] = {}  # by micro-batch, until they are sent

    # The first argument of each pass is the micro-batch; torch names the others.

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        enter_phase("forward")
        with pass_label("forward", self.stage_index, args[0]):
            output = super().forward_one_chunk(*args, **kwargs)
        if self.is_last:
            return output
        inputs = self.fwd_cache[args[0]][1]
        # Backward enters the graph through a tensor without memory; the output itself can be freed when it is sent.
        end = _GraphEnd.apply(output)  # type: ignore[no-untyped-call]
        self.fwd_cache[args[0]] = ((end,), inputs)
        if self.stage_index_to_group_rank[self.stage_index + 1] == self.group_rank:
            return output  # the schedule hands it to the next stage
        self._outputs[args[0]] = output.detach()
        return end

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        enter_phase("backward")
        with pass_label("backward" if kwargs.get("full_backward", True) else "input", self.stage_index, args[0]):
            super().backward_one_chunk(*args, **kwargs)
        if self.is_last:
            kwargs["loss"].detach_()  # the schedule keeps it until the step ends, and with its graph the stage's input

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        enter_phase("backward")
        with pass_label("weight", self.stage_index, args[0]):
            return super().backward_weight_one_chunk(*args, **kwargs)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if fwd_chunk_id not in self._outputs:
            return []
        # Torch reads the tensor to send from its cache, where the end of the graph stands.
        end, inputs = self.fwd_cache[fwd_chunk_id]
        self.fwd_cache[fwd_chunk_id] = ((self._outputs.pop(fwd_chunk_id),), inputs)
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        self.fwd_cache[fwd_chunk_id] = (end, inputs)
        return self._outbox.send(operations)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._outbox.send(super().get_bwd_send_ops(bwd_chunk_id))

    # A buffer is allocated when its receive starts, and given away to the pass that needs it.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_first:
            self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate(self.grad_recv_info.get(bwd_chunk_id, ()))
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        received = super()._retrieve_recv_activations(fwd_chunk_id)
        for each in received:
            each.requires_grad_(self.has_backward)  # torch 2.11 does not, since it reuses its buffers
        _give_away(self.args_recv_info[fwd_chunk_id])
        return received

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        received = super()._retrieve_recv_grads(bwd_chunk_id)
        _give_away(self.grad_recv_info[bwd_chunk_id])
        return received

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_forward_infra(*args, **kwargs)
        for messages in () if self.is_first else self.args_recv_info.values():
            _give_away(messages)
        return prepared

    def _create_grad_recv_info(self, act_send_info: dict[int, list[int]]) -> Any:
        messages = super()._create_grad_recv_info(act_send_info)
        _give_away(messages)
        return messages

    def _allocate(self, messages: Any) -> None:
        for each in messages:
            each.buffer = torch.empty(self._message.shape, dtype=self._message.dtype, device=self.device)

    # Before the first step torch's stages vote whether all know the shapes of their messages. They do; in a rehearsal,
    # which has no other ranks, the result is given. Torch 2.11 sends each neighbour a message instead.

    def _warmup_forward_vote(self, has_backward: bool, received_acc: torch.Tensor | None = None) -> torch.Tensor:
        return _AGREEMENT if in_fake_world() else super()._warmup_forward_vote(has_backward, received_acc)

    def _warmup_backward_result(self, received_result: torch.Tensor | None = None) -> torch.Tensor:
        return _AGREEMENT if in_fake_world() else super()._warmup_backward_result(received_result)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        operations = [] if in_fake_world() else super()._get_init_p2p_neighbors_ops()
        # The neighbour of a stage may be on the same rank, and gloo has no messages to itself.
        return [each for each in operations if each.group_peer != self.group_rank]


def _give_away(messages: Any) -> None:
    """Drop the references of torch's stage to buffers of messages."""
    for each in messages:
        each.buffer = _NO_BUFFER


class Pipeline:
    """The stages of this rank, and the schedules that run micro-batches through them.

    Messages between stages have ``shape`` (micro-batch, positions, width) and ``dtype``; ``positions`` are the tokens
    of a sequence that this rank computes. LaunchError: torch cannot split backward passes as the schedule needs.
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
        if layout.parallel.schedule in ZERO_BUBBLE and (reason := torch_private.split_backward_problem()):
            raise LaunchError(f"parallel.schedule={layout.parallel.schedule}: {reason}")
        self._layout, self._group, self._device = layout, group, device
        self._stages = dict(zip(layout.stages_of(layout.coordinates(rank).pp), stages, strict=True))
        self._shape, self._dtype, self._positions = shape, dtype, positions
        self._wide = torch.promote_types(dtype, torch.float32)  # dtype of losses
        # Torch's schedules would keep gathered parameters until the last micro-batch.
        if layout.zero == 3:
            for stage in stages:
                reshard_after_every_backward(stage)
        self._current: tuple[int, Any] = (0, None)  # torch's schedule, for a number of micro-batches
        # 1F1B sends and receives in one operation.
        self._outbox = Outbox(at_once=layout.parallel.schedule != "1f1b")
        self._divisor: torch.Tensor | int = 1
        self.has_first = 0 in self._stages
        self.has_last = layout.parallel.stages - 1 in self._stages

    def train(self, batch: MicroBatch, tokens: torch.Tensor | int) -> torch.Tensor:
        """Run forward and backward over all micro-batches of a step, with this rank's positions.

        Returns the summed loss / tokens on the rank of the last stage, zero on others.
        """
        self._divisor = tokens
        losses: list[torch.Tensor] = []
        schedule = self._schedule(batch.inputs_BS.shape[0] // self._shape[0])
        # The model of the last stage computes the loss; attention of every stage needs the starts of documents.
        kwargs = {"labels": batch.labels_BS} if self.has_last else {}
        if batch.positions_BS is not None:
            kwargs["positions"] = batch.positions_BS
        with split_backward() if self._layout.parallel.schedule in ZERO_BUBBLE else nullcontext():
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
            name = self._layout.parallel.schedule
            # Torch has the same names without hyphens, in any case, but for ZBVZeroBubble.
            schedule = get_schedule_class("ZBVZeroBubble" if name == "zbv" else name.replace("-", ""))
            stages: Any = [self._build_stage(index, model) for index, model in self._stages.items()]
            of_rank = stages[0] if issubclass(schedule, PipelineScheduleSingle) else stages
            made = schedule(of_rank, micro_batches, loss_fn=self._scale_loss, scale_grads=False)
            self._current = (micro_batches, made)
        return self._current[1]

    def _build_stage(self, index: int, model: Decoder) -> ReportingStage:
        sequences = self._shape[0]
        tokens = torch.empty((sequences, self._positions), dtype=torch.int64, device="meta")
        hidden = torch.empty(self._shape, dtype=self._dtype, device="meta", requires_grad=True)
        loss = torch.empty((), dtype=self._wide, device="meta", requires_grad=True)
        # With given shapes, so that torch does not run the stage once to find them.
        return ReportingStage(
            model,
            index,
            self._layout.parallel.stages,
            self._device,
            input_args=tokens if index == 0 else hidden,
            output_args=loss if index == self._layout.parallel.stages - 1 else hidden,
            group=self._group,
            outbox=self._outbox,
            message=hidden,
        )

    def _scale_loss(self, loss: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        return loss / self._divisor

    def evaluate(self, batches: Iterable[MicroBatch], *, reduction: Reduction = head_loss) -> Iterator[torch.Tensor]:
        """Yield the loss in nats of each micro-batch, or another reduction, on the rank of the last stage."""
        pending: list[tuple[dist.Work, torch.Tensor]] = []  # keeps tensors alive while they are sent
        local: dict[tuple[int, int], torch.Tensor] = {}
        # The outer loop is over micro-batches: sender and receiver then issue messages in the same order, as NCCL
        # requires, and only a few activations are alive.
        for number, (inputs_BS, labels_BS, positions_BS) in enumerate(batches):
            for index, model in self._stages.items():
                x = inputs_BS if index == 0 else self._receive(index, number, local, self._message_shape(inputs_BS))
                out = model(x, labels_BS, positions=positions_BS, reduction=reduction)
                if index == self._layout.parallel.stages - 1:
                    yield out
                else:
                    self._send(index, number, out, local, pending)
            while len(pending) > self._layout.pipeline:
                pending.pop(0)[0].wait()
        for work, _ in pending:
            work.wait()

    def _message_shape(self, inputs_BS: torch.Tensor) -> tuple[int, int, int]:
        """Shape of the messages of a micro-batch, which may have other rows than those of training."""
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
        # The next stage is on this rank, and gloo has no messages to itself
        if stage + 1 in self._stages:
            local[(stage + 1, number)] = out
            return
        out = out.contiguous()
        work = dist.isend(out, group=self._group, group_dst=self._layout.stage_rank(stage + 1))
        assert work is not None, "this rank is in the group"
        pending.append((work, out))
