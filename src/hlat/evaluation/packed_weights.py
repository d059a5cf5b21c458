"""Matrix products of a model by packed copies of its weights, for forward passes without gradients.

    weight --oneDNN, once--> blocks in the order in which its kernels read them --each product--> x @ weight.T

A token that is generated reads every weight once for a few rows, so that memory limits it, and the order in which
weights are read decides. ``F.linear`` on a CPU with AVX-512 reads weights at a fifth of the bandwidth of memory, the
product by packed weights at two thirds (docs/notebook/evaluation.md). It sums in another order, in fp32, and rounds
once. Where the backend has no such kernels, and in other dtypes, products stay as they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hlat.model import Decoder, Head, Linear
from hlat.runtime.backend.table import backend_of

FEWEST_TOKENS = 24
"""Tokens of a text from which packing the weights for it pays: it takes as long as 5 to 15 tokens of one row."""

_LARGEST_SHARE = 0.25  # of the machine's memory, for packed copies beside the weights
_MOST_ROWS = 8192  # of a packed matrix: for one row of x, oneDNN computes a larger one in a single thread
_DTYPES = (torch.float32, torch.bfloat16)


def pack_weights(decoder: Decoder) -> None:
    """Pack the weights of a model for good: its matrices give up their memory, one after the other.

    Afterwards the model computes hidden states and logits, and can no longer be saved or trained. It stays as it is if
    the packed matrices need more memory than they replace (wider ones where products are widened, the head beside a
    tied embedding) and this exceeds a quarter of the machine's.
    """
    modules = _modules(decoder)
    if not fits(decoder, _additional_bytes(modules, decoder)):
        return
    for module in modules:
        vars(module)["forward"] = _product(module, decoder)  # of this object: hooks are called as before
        for name, matrix in module.named_parameters(recurse=False):  # a tied head has none: the embedding keeps its own
            setattr(module, name, nn.Parameter(matrix.detach().new_empty(0), requires_grad=False))


@contextmanager
def packed_weights(decoder: Decoder, tokens: int) -> Iterator[None]:
    """Compute with packed copies of the weights within the block, if that pays and memory allows it.

    Args:
        decoder: the model, of which the block computes hidden states and logits only. Its weights must not change.
        tokens: number of tokens that the block generates, one after the other.
    """
    bytes_of_copies = sum(parameter.numel() for parameter in decoder.parameters()) * torch.float32.itemsize
    modules = _modules(decoder) if tokens >= FEWEST_TOKENS and fits(decoder, bytes_of_copies) else []
    try:
        for module in modules:
            vars(module)["forward"] = _product(module, decoder)
        yield
    finally:
        for module in modules:
            vars(module).pop("forward", None)


def _modules(decoder: Decoder) -> list[Linear | Head]:
    """Modules whose products can be packed; none where the backend or the dtype has no kernel for it."""
    weight = next(decoder.parameters())
    if not backend_of(weight.device).packs_weights or _compute(decoder) not in _DTYPES:
        return []
    return [module for module in decoder.modules() if isinstance(module, Linear | Head)]


def _compute(decoder: Decoder) -> torch.dtype:
    return decoder.compute or next(decoder.parameters()).dtype


def fits(decoder: Decoder, additional: int) -> bool:
    """True if so many bytes leave most of the memory to others; the same in every run on a machine."""
    device = next(decoder.parameters()).device
    return additional <= 0 or additional <= _LARGEST_SHARE * backend_of(device).memory_bytes(device)


def _additional_bytes(modules: list[Linear | Head], decoder: Decoder) -> int:
    """Bytes of the packed matrices, less those of the parameters that they replace."""
    additional = 0
    for module in modules:
        weight, bias = _operands(module)
        packed = backend_of(weight.device).product_dtype(_compute(decoder))
        additional += (weight.numel() + (0 if bias is None else bias.numel())) * packed.itemsize
        additional -= sum(parameter.nbytes for parameter in module.parameters(recurse=False))
    return additional


def _operands(module: Linear | Head) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Matrix and bias of a product."""
    return (module.matrix, None) if isinstance(module, Head) else (module.weight, module.bias)


def _product(module: Linear | Head, decoder: Decoder) -> "PackedProduct":
    """Return the product by a module's weights, packed in the dtype in which the model computes."""
    return PackedProduct(*_operands(module), _compute(decoder))


class PackedProduct:
    """Product by a packed matrix: (..., in) -> (..., out), in the dtype of its argument.

    Args:
        weight: (out, in).
        bias: (out,), or None.
        compute: dtype of the argument. If its products are widened (``Backend.product_dtype``), so is the weight.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, compute: torch.dtype) -> None:
        self._dtype = backend_of(weight.device).product_dtype(compute)
        narrow = weight.detach().to(compute)
        biases = None if bias is None else bias.detach().to(compute).to(self._dtype).split(_MOST_ROWS)
        parts = narrow.split(_MOST_ROWS)
        pack = torch.ops.mkldnn._reorder_linear_weight
        self._parts = [
            (pack(part.to(self._dtype).contiguous()), None if biases is None else biases[index])
            for index, part in enumerate(parts)
        ]

    def __call__(self, x: torch.Tensor, labels: None = None, *, reduction: object = None) -> torch.Tensor:
        """Multiply; ``labels`` and ``reduction`` are those of ``Head.forward``, which computes no loss here."""
        assert labels is None, "a model with packed weights computes hidden states and logits"
        wide = x.to(self._dtype)
        multiply = torch.ops.mkldnn._linear_pointwise
        outs = [multiply(wide, weight, bias, "none", [], "") for weight, bias in self._parts]
        out: torch.Tensor = outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)
        return out.to(x.dtype)
