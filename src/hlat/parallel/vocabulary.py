"""The vocabulary cut over the tensor group: embedding, head and loss.

    token ids -> rows that are here, zeros for the others -> sum over ranks
    hidden -> logits of the rows that are here -> cross-entropy from their maxima and sums; no rank has all logits

Tensor suffixes: N tokens, v the vocabulary rows of this rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from hlat.model import IGNORED, Decoder, summed_cross_entropy, vocabulary_rows
from hlat.parallel.tensor import enter_before, leave


class _EmbeddingHooks:
    """Looks up only the ids whose rows are here."""

    def __init__(self, rows: range, group: ProcessGroup, sequence: bool) -> None:
        self._rows, self._group, self._sequence = rows, group, sequence
        self._absent: torch.Tensor | None = None

    def before(self, _: nn.Module, args: tuple[Any, ...]) -> torch.Tensor:
        ids = args[0]
        self._absent = (ids < self._rows.start) | (ids >= self._rows.stop)
        shifted: torch.Tensor = (ids - self._rows.start).masked_fill(self._absent, 0)
        return shifted

    def after(self, _: nn.Module, args: tuple[Any, ...], out: torch.Tensor) -> torch.Tensor:
        assert self._absent is not None, "before() ran"
        here = out.masked_fill(self._absent.unsqueeze(-1), 0)
        self._absent = None
        return leave(here, self._group, self._sequence)


def parallelize_ends(model: Decoder, group: ProcessGroup, sequence: bool) -> None:
    """Make embedding and head, as far as they are in this part, take and give what the whole ones would.

    The head's logits stay those of the rows that are here.
    """
    if model.embedding is not None:
        hooks = _EmbeddingHooks(vocabulary_rows(model.config, model.part), group, sequence)
        model.embedding.register_forward_pre_hook(hooks.before)
        model.embedding.register_forward_hook(hooks.after)
    if model.head is not None:
        enter_before(model.head, group, sequence)


class CrossEntropy:
    """Summed next-token cross-entropy of logits whose vocabulary is cut over a group, or whole.

    Args:
        rows: the vocabulary rows whose logits are here.
        group: over which the others are; None where all are here.
    """

    def __init__(self, rows: range, group: ProcessGroup | None) -> None:
        self._rows, self._group = rows, group

    def __call__(self, logits_BSv: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        """Sum over all positions whose label is not ``IGNORED``: a scalar in nats, at least fp32, same on all ranks."""
        if self._group is None:
            return summed_cross_entropy(logits_BSv, labels_BS)
        logits_Nv, labels_N = logits_BSv.flatten(0, 1), labels_BS.flatten()
        out: torch.Tensor = _ParallelCrossEntropy.apply(  # type: ignore[no-untyped-call]
            logits_Nv, labels_N, self._rows.start, self._group
        )
        return out


class _ParallelCrossEntropy(torch.autograd.Function):
    """log(sum(exp(logits))) - logit of the label, by two all-reduces of one and two numbers per token."""

    @staticmethod
    def forward(
        ctx: Any, logits_Nv: torch.Tensor, labels_N: torch.Tensor, first_row: int, group: ProcessGroup
    ) -> torch.Tensor:
        wide = torch.promote_types(logits_Nv.dtype, torch.float32)
        peak_N = logits_Nv.amax(-1).to(wide)
        dist.all_reduce(peak_N, op=dist.ReduceOp.MAX, group=group)
        shifted_Nv = logits_Nv.to(wide) - peak_N.unsqueeze(1)
        here_N = (labels_N >= first_row) & (labels_N < first_row + logits_Nv.shape[1])
        row_N = (labels_N - first_row).masked_fill(~here_N, 0)
        label_N = shifted_Nv.gather(1, row_N.unsqueeze(1)).squeeze(1).masked_fill(~here_N, 0)
        exp_Nv = shifted_Nv.exp_()
        sums_2N = torch.stack((exp_Nv.sum(-1), label_N))
        dist.all_reduce(sums_2N, group=group)
        total_N, label_N = sums_2N
        counted_N = labels_N != IGNORED
        ctx.save_for_backward(exp_Nv.div_(total_N.unsqueeze(1)), row_N, here_N, counted_N)
        ctx.dtype = logits_Nv.dtype
        loss: torch.Tensor = (total_N.log() - label_N).masked_fill(~counted_N, 0).sum()
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        probability_Nv, row_N, here_N, counted_N = ctx.saved_tensors
        scale_N1 = (grads[0] * counted_N).unsqueeze(1)
        grad_Nv = probability_Nv * scale_N1
        grad_Nv.scatter_add_(1, row_N.unsqueeze(1), -scale_N1 * here_N.unsqueeze(1))
        return grad_Nv.to(ctx.dtype), None, None, None
