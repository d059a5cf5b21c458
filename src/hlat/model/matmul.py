"""Matrix products and attention in the dtype of the activations.

    weight, stored in fp32 or bf16 --to the dtype of x--> product, accumulated in fp32, rounded once

Weights follow the activations: a model computes in bf16 because what leaves its embedding is bf16, whatever its weights
are stored in. On a CPU without bf16 instructions torch multiplies bf16 numbers one by one, a hundred times slower than
fp32. There the operands are widened, the product is computed in fp32 and rounded once, as tensor cores do: the speed is
that of fp32, what is kept for backward is bf16 all the same.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend

from hlat.runtime.backend import has_fast_bf16

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias


_CPU_BF16_IS_SLOW = not has_fast_bf16(torch.device("cpu"))  # a constant, so that compiled code has no question in it


def needs_widening(x: torch.Tensor) -> bool:
    """Whether products of this tensor are computed in fp32 and rounded."""
    return _CPU_BF16_IS_SLOW and x.dtype == torch.bfloat16 and x.device.type == "cpu"


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` in their common dtype. Not differentiable where it has to be widened: for use inside of functions."""
    return (a.float() @ b.float()).to(a.dtype) if needs_widening(a) else a @ b


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` in the dtype of ``x``; gradients come in the dtype of what they are of.

    Args:
        x: (..., in).
        weight: (out, in), of any floating dtype.
        bias: (out,).
    """
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if not needs_widening(x):
        return F.linear(x, weight, bias)
    out: torch.Tensor = _WideLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return out


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].float()
        grad_x = (grad @ weight.float()).to(x.dtype) if ctx.needs_input_grad[0] else None
        rows = grad.flatten(0, -2)
        grad_weight = (rows.T @ x.float().flatten(0, -2)).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, rows.sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None


class Linear(nn.Linear):
    """A linear layer whose weight follows the dtype of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        return linear(x, self.weight, self.bias)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: "torch.Tensor | CausalBias | None" = None
) -> torch.Tensor:
    """Softmax attention by torch's fused kernels; query heads share kv heads in order.

    Args:
        q: (B, H, S, E).
        k, v: (B, G, T, E), H a multiple of G.
        mask: which of the T positions each query sees; None for the causal mask of S = T.

    Returns:
        (B, H, S, E), in the dtype of ``q``; softmax in fp32.
    """
    if not needs_widening(q):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    if mask is not None:
        out = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=mask, enable_gqa=True)
        return out.to(q.dtype)
    causal: torch.Tensor = _WideCausalAttention.apply(q, k, v)  # type: ignore[no-untyped-call]
    return causal


class _WideCausalAttention(torch.autograd.Function):
    """The fused CPU kernel on widened operands; it keeps what the kernel of a CPU with bf16 instructions keeps."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        wide, log_sum = kernel(q.float(), k.float(), v.float(), 0.0, True)
        out: torch.Tensor = wide.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *narrow, log_sum = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        wide = kernel(grads[0].float(), *(tensor.float() for tensor in narrow), log_sum, 0.0, True)
        return tuple(grad.to(grads[0].dtype) for grad in wide)


def attention_backend(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, isolated: bool = False
) -> str:
    """Which of torch's fused kernels computes causal attention of such heads here, over rows or within documents."""
    q, k = (torch.empty((1, count, 128, head_dim), dtype=dtype, device=device) for count in (heads, kv_heads))
    if isolated and device.type != "cpu":
        return "flex_attention within documents"
    within = " within documents" if isolated else ""
    if isolated or needs_widening(q):
        return f"flash_attention{within}{', in fp32' if needs_widening(q) else ''}"
    chosen = torch._fused_sdp_choice(q, k, k, is_causal=True, enable_gqa=True)
    return SDPBackend(chosen).name.lower()


def embed(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows of a matrix, (...) -> (..., width); the gradient of a row is added up in fp32 or wider.

    torch's CPU kernel adds up in the dtype of the weight: a frequent token's gradient, thousands of terms in one
    micro-batch, would stop growing in bf16.
    """
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
        return F.embedding(ids, weight)
    out: torch.Tensor = _WideEmbedding.apply(ids, weight)  # type: ignore[no-untyped-call]
    return out


class _WideEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.dtype = weight.shape, weight.dtype
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        wide = grads[0].new_zeros(ctx.shape, dtype=torch.float32)
        wide.index_add_(0, ids.flatten(), grads[0].flatten(0, -2).float())
        return None, wide.to(ctx.dtype)


class Embedding(nn.Embedding):
    """An embedding whose gradient is added up in fp32."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids (...), int64 -> (..., width), in the dtype of the weights."""
        return embed(ids, self.weight)
