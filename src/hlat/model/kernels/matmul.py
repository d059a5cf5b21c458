"""Matrix products and embedding lookup in the dtype of the activations.

    weight, stored in fp32 or bf16 --cast to the dtype of x--> product, accumulated in fp32, rounded once

The dtype of the activations decides: a model computes in bf16 because the output of its embedding is cast to bf16,
whatever dtype its weights are stored in. On a CPU without bf16 instructions torch multiplies bf16 numbers one by one, a
hundred times slower than fp32. There the operands are widened to fp32, and the product is rounded once to bf16, as on
tensor cores. This is as fast as fp32, and the tensors saved for backward stay bf16.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from hlat.runtime.backend.base import ONEDNN, TORCH
from hlat.runtime.backend.device import linear_by_onednn
from hlat.runtime.backend.table import backend_of, types_with
from hlat.runtime.distributed.join import in_fake_world

_SPLIT_BACKWARD = ContextVar("split_backward", default=False)

# Device types, as one text: torch.compile guards it by one comparison, and a tuple by a comparison for each element.
_EMULATE_BF16 = " ".join(types_with(lambda backend: backend.product_dtype(torch.bfloat16) != torch.bfloat16))
_ROUND_EMBEDDING_GRADIENTS = types_with(lambda backend: backend.rounds_embedding_gradients)


@contextmanager
def computing_as_simulated(device: torch.device) -> Iterator[None]:
    """Compute on a device within the block as its simulated backend does: the constants above are of the real one."""
    backend = backend_of(device)
    widened = (device.type,) if backend.product_dtype(torch.bfloat16) != torch.bfloat16 else ()
    rounded = (device.type,) if backend.rounds_embedding_gradients else ()
    with patch.dict(globals(), _EMULATE_BF16=" ".join(widened), _ROUND_EMBEDDING_GRADIENTS=rounded):
        yield


def needs_widening(x: torch.Tensor) -> bool:
    """True if products of this tensor have to be computed in fp32 and rounded."""
    return _EMULATE_BF16 != "" and x.dtype == torch.bfloat16 and x.device.type in _EMULATE_BF16.split()


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``a @ b`` in new memory or in ``out``, inside autograd functions: not differentiable."""
    if not needs_widening(a):
        return torch.matmul(a, b, out=out)
    wide = a.float() @ b.float()
    return wide.to(a.dtype) if out is None else out.copy_(wide)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``x @ weight.T + bias`` in the dtype of ``x``; gradients have the dtypes of their inputs."""
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if uses_onednn(x):
        if not torch.is_grad_enabled():
            return linear_by_onednn(x, weight, bias)
        if x.requires_grad or weight.requires_grad:
            product: torch.Tensor = _OneDnnLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
            return product
    if not needs_widening(x):
        return F.linear(x, weight, bias)
    out: torch.Tensor = _WideLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return out


def uses_onednn(x: torch.Tensor) -> bool:
    """True if products are computed by oneDNN rather than by the library of torch's choice."""
    # A compiler chooses itself, and a rehearsal computes nothing: its operations are those of torch.
    return (
        x.dtype == torch.float32
        and not torch.compiler.is_compiling()
        and backend_of(x.device).fp32_by_onednn
        and not _SPLIT_BACKWARD.get()
        and not in_fake_world()
    )


def product_library(dtype: torch.dtype, device: torch.device) -> str:
    """Name what computes the products of eager blocks in training: products with the same name have the same bits."""
    # Zero-bubble schedules compute with torch in any case; another schedule adds in another order anyway.
    x = torch.empty(0, dtype=dtype, device=device)
    return ONEDNN if uses_onednn(x) else f"{TORCH}, widened to fp32" if needs_widening(x) else TORCH


@contextmanager
def split_backward() -> Iterator[None]:
    """Within this context products leave backward to torch, which computes each gradient only when it is asked for."""
    # Zero-bubble schedules ask for the gradients by input and by weight in two passes; a function of autograd's would
    # compute both in each.
    token = _SPLIT_BACKWARD.set(True)
    try:
        yield
    finally:
        _SPLIT_BACKWARD.reset(token)


class _OneDnnLinear(torch.autograd.Function):
    """Products by oneDNN, which takes transposed operands as they are; torch calls it for packed weights only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return linear_by_onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grads[0].flatten(0, -2)
        by_weight = linear_by_onednn(rows.T, x.flatten(0, -2).T) if ctx.needs_input_grad[1] else None
        by_x = linear_by_onednn(grads[0], weight.T) if ctx.needs_input_grad[0] else None
        return by_x, by_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


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
    """A linear layer whose weight follows the dtype of its input; ``hlat.model.initialise`` fills it."""

    def reset_parameters(self) -> None:
        """Leave the weight as it is: on the meta device, torch's initialisation imports its compiler."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


def embed(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Look up rows of a matrix, (...) -> (..., width); the gradient of a row is accumulated in fp32 or wider."""
    # torch's CPU kernel accumulates in the dtype of the weight: in bf16 the gradient of a frequent token, a sum of
    # thousands of terms per micro-batch, would stop growing.
    if weight.dtype != torch.bfloat16 or weight.device.type not in _ROUND_EMBEDDING_GRADIENTS:
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
    """An embedding whose gradient is accumulated in fp32; ``hlat.model.initialise`` fills it."""

    def reset_parameters(self) -> None:
        """Leave the weight as it is, as in ``Linear``."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return embed(ids, self.weight)
