"""The compiled step of a decoder: one new token of each row through all blocks, in one call of C.

    embedding of the tokens (B, 1, D), cos and sin, KV cache --decode.c--> hidden states (B, 1, D), cache one longer
    hidden states --> logits, by the same products

Between its operations a step of torch calls 30 operators for each block; for a few rows that takes as long as the
products themselves. Numbers are rounded where torch rounds them, sums have another order.

Tensor suffixes: B rows, D model width, V vocabulary.
"""

import torch

from hlat.model.architectures import norm_place
from hlat.model.decoder import Decoder
from hlat.model.decoding.weights import StepWeights
from hlat.model.kernels.decode import DecodingLibrary, StepArguments, decoding_library
from hlat.model.kv_cache import KVCache
from hlat.model.loss import Head, Reduction, head_loss
from hlat.model.model_shard import FULL_MODEL

MOST_ROWS = 64
"""Most rows of a step."""


def compile_step(decoder: Decoder) -> "CompiledStep | None":
    """Return a step of a complete model that shares its weights, or has copies in the dtype in which it computes.

    The weights must not change or move while it is in use. None if the device, the dtype or the blocks of the model
    have no such step, or if it is a shard.
    """
    place, weight = norm_place(decoder.config), next(decoder.parameters())
    dtype = decoder.compute or weight.dtype
    if place is None or decoder.shard != FULL_MODEL:
        return None
    library = decoding_library(weight.device, dtype, decoder.config.n_head_dim)
    if library is None or decoder.norm is None or decoder.head is None:
        return None
    return CompiledStep(library, StepWeights(list(decoder.blocks()), decoder.norm, place, dtype), decoder.head, dtype)


class CompiledStep:
    """A step that C computes; see ``DecodingStep``.

    Args:
        library: the compiled functions.
        weights: the weights of blocks and final norm.
        head: the head of the model.
        dtype: dtype of the activations.
    """

    def __init__(self, library: DecodingLibrary, weights: StepWeights, head: Head, dtype: torch.dtype) -> None:
        self._library, self._weights, self._head, self._dtype = library, weights, head, dtype
        self._matrix_VD = head.matrix.detach().to(dtype).contiguous()

    def takes(self, x_BSD: torch.Tensor, cache: KVCache) -> bool:
        """Return True for one token of each of few rows, without gradients, in the dtype of weights and cache."""
        return (
            x_BSD.shape[1] == 1
            and x_BSD.shape[0] <= MOST_ROWS
            and x_BSD.dtype == cache.memory.dtype == self._dtype
            and not torch.is_grad_enabled()
        )

    def __call__(
        self, x_B1D: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], cache: KVCache, window: int | None
    ) -> torch.Tensor:
        """Compute (B, 1, D) -> (B, 1, D); keys and values are stored at the next position of the cache."""
        x_B1D = x_B1D.contiguous()
        rows, weights = len(x_B1D), self._weights
        widths = (x_B1D.shape[2], weights.fused, weights.heads, weights.inner)
        work = [x_B1D.new_empty((rows, width)) for width in widths]
        cos, sin = (table.contiguous() for table in tables)
        mask = None if cache.mask is None else cache.mask.contiguous()
        step = StepArguments.from_buffer_copy(weights.step)
        step.rows, step.place = rows, cache.length
        step.first = max(0, cache.length + 1 - window) if window is not None and mask is None else 0
        step.cos, step.sin, step.table_step = cos.data_ptr(), sin.data_ptr(), cos.shape[-1] if cos.dim() == 3 else 0
        step.mask = None if mask is None else mask.data_ptr()
        step.layer_step, step.value_step, step.row_step, step.head_step, *_ = cache.memory.stride()
        step.cache, step.x = cache.memory.data_ptr(), x_B1D.data_ptr()
        step.hidden, step.qkv, step.attended, step.gated = (each.data_ptr() for each in work)
        self._library.decode(self._dtype, step)
        return x_B1D

    def head(
        self, x: torch.Tensor, labels: torch.Tensor | None = None, *, reduction: Reduction = head_loss
    ) -> torch.Tensor:
        """Compute what ``Head.forward`` does: logits of few rows by the compiled products, the rest as it does."""
        rows_ND = x.reshape(-1, x.shape[-1])
        if labels is not None or len(rows_ND) > MOST_ROWS or torch.is_grad_enabled() or x.dtype != self._dtype:
            return type(self._head).forward(self._head, x, labels, reduction=reduction)
        return self._library.multiply(rows_ND.contiguous(), self._matrix_VD).view(*x.shape[:-1], -1)
