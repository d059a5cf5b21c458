"""RMSNorm over the complete width of all heads, which tensor parallelism shards.

    x, the heads of a shard -> sum of squares -> sum over shards -> scale -> x * scale * weight

The mean square is that of the complete width, and so is the term of the gradient that normalisation removes: both are
summed over the shards, one number per token each. The sum is attached from outside (``hlat.parallel``); a complete
model needs none.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from hlat.model.pointwise import accumulation_dtype, rms_norm

Sum = Callable[[torch.Tensor], torch.Tensor]


class ShardedRMSNorm(nn.Module):
    """Root-mean-square norm over all heads, of which a shard has some.

    Args:
        width: elements that the shard has.
        complete_width: elements of the complete model.
        copies: number of shards that have the same elements.
        eps: added to the mean square.

    Attributes:
        sum_over_shards: sums a tensor over all shards; None if this shard is complete.
    """

    def __init__(self, width: int, complete_width: int, copies: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps
        self.sum_over_shards: Sum | None = None
        self._complete_width, self._copies = complete_width, copies

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise (B, S, ...) over all dimensions from the third, in their order."""
        flat = x.flatten(2).contiguous()  # as a view it would keep the complete fused projection alive until backward
        if self.sum_over_shards is None:
            return rms_norm(flat, self.weight, self.eps).view(x.shape)
        weight = self.weight.to(x.dtype)
        out: torch.Tensor = _ShardedNorm.apply(flat, weight, self.eps, self._mean)  # type: ignore[no-untyped-call]
        return out.view(x.shape)

    def _mean(self, sums: torch.Tensor) -> torch.Tensor:
        """Divide the sum over the complete width by that width; elements with copies are counted by each copy."""
        assert self.sum_over_shards is not None, "called for shards only"
        return self.sum_over_shards(sums).div_(self._complete_width * self._copies)


class _ShardedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, mean: Sum) -> torch.Tensor:
        x_wide = x.to(accumulation_dtype(x.dtype))
        scale = mean(x_wide.square().sum(-1, keepdim=True)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        ctx.mean = mean
        return (x_wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        grad = grads[0].to(scale.dtype)
        normal = x * scale
        product = grad * normal
        weight_wide = weight.to(scale.dtype)
        # A copy has the term of its own query heads in ``grad``, and gets its share of the sum over all of them.
        along = ctx.mean(torch.matmul(product, weight_wide).unsqueeze(-1))
        grad_x = (grad * weight_wide).addcmul_(normal, along, value=-1).mul_(scale)
        grad_weight = product.flatten(0, -2).sum(0)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None, None
