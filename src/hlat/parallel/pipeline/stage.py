"""A stage of a pipeline: torch's, with messages that live no longer than they are needed.

    received input -> forward -> output -> sent; the graph stays, the output's memory goes
    received gradient -> backward -> gradient by the input -> sent

Torch allocates the buffers of all micro-batches' messages before the first step and keeps them, and keeps the output
of every micro-batch in flight. Here a buffer is allocated when its receive starts and belongs to the pass that uses it,
and of the output a tensor without memory is kept, through which backward enters the graph. Megatron-LM frees outputs
likewise (``deallocate_pipeline_outputs``), and so did the training of Llama 3 (arXiv 2407.21783, section 3.3.2).
"""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from hlat.parallel.pipeline.outbox import Outbox
from hlat.parallel.stages.pass_label import pass_label
from hlat.runtime.distributed.fake_world import in_fake_world
from hlat.runtime.process.phase import enter_phase

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
    """Torch's stage; frees its messages, reports the phase of this process, and labels each pass for profilers.

    Args:
        outbox: sends the messages of this rank.
        message: shape and dtype of the messages between stages, as a tensor without memory.
        settings: those of torch's stage.
    """

    def __init__(self, *settings: Any, outbox: Outbox, message: torch.Tensor, **named: Any) -> None:
        super().__init__(*settings, **named)
        self._outbox, self._message = outbox, message
        self._outputs: dict[int, torch.Tensor] = {}  # by micro-batch, until they are sent

    # The first argument of each pass is the micro-batch; torch names the others.

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of a micro-batch."""
        enter_phase("forward")
        with pass_label("forward", self.stage_index, args[0]):
            output = super().forward_one_chunk(*args, **kwargs)
        if self.is_last:
            return output
        inputs = self.fwd_cache[args[0]][1]
        end = _GraphEnd.apply(output)  # type: ignore[no-untyped-call]
        self.fwd_cache[args[0]] = ((end,), inputs)
        if self.stage_index_to_group_rank[self.stage_index + 1] == self.group_rank:
            return output  # the schedule hands it to the next stage
        self._outputs[args[0]] = output.detach()
        return end

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Run the backward pass of a micro-batch, or its first half."""
        enter_phase("backward")
        with pass_label("backward" if kwargs.get("full_backward", True) else "input", self.stage_index, args[0]):
            super().backward_one_chunk(*args, **kwargs)
        if self.is_last:
            kwargs["loss"].detach_()  # the schedule keeps it until the step ends, and with its graph the stage's input

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Run the second half of the backward pass of a micro-batch."""
        enter_phase("backward")
        with pass_label("weight", self.stage_index, args[0]):
            return super().backward_weight_one_chunk(*args, **kwargs)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the output of a micro-batch, or return the operations that do."""
        if fwd_chunk_id not in self._outputs:
            return []
        end, inputs = self.fwd_cache[fwd_chunk_id]
        self.fwd_cache[fwd_chunk_id] = ((self._outputs.pop(fwd_chunk_id),), inputs)
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        self.fwd_cache[fwd_chunk_id] = (end, inputs)
        return self._outbox.send(operations)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the gradient by the input of a micro-batch, or return the operations that do."""
        return self._outbox.send(super().get_bwd_send_ops(bwd_chunk_id))

    # A buffer is allocated when its receive starts, and given away to the pass that needs it.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that receive the input of a micro-batch."""
        if not self.is_first:
            self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that receive the gradient by the output of a micro-batch."""
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
