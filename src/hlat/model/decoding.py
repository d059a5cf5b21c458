"""Decoding of single tokens by one call of C for all blocks; torch's operations are the reference and the fallback.

    blocks of a decoder --their own memory, or a copy in the dtype of its products--> StepWeights
    embedding of the tokens (B, 1, D), cos and sin, KV cache
        --CompiledStep, ``kernels/decode.c``--> hidden states (B, 1, D), cache one longer --the same products--> logits

Between its operations a step of torch calls 30 operators for each block; for a few rows that takes as long as the
products themselves. Numbers are rounded where torch rounds them, sums have another order. Which weights a block has
follows from its modules: fused or split projections, biases, norms of queries and keys.

The library is compiled when a process starts to generate, a second and a half, and not with the kernels of training.

Tensor suffixes: B rows, D model width, V vocabulary.
"""

import ctypes
import functools
import logging
from pathlib import Path

import torch
from torch import nn

from hlat.model.architectures import norm_place
from hlat.model.architectures.base import NormPlace
from hlat.model.decoder import Decoder
from hlat.model.kernels.attention import WIDEST_HEAD
from hlat.model.kernels.library import DTYPES, SUFFIXES, fields, find_openmp, find_run
from hlat.model.kernels.matmul import Linear
from hlat.model.kernels.source import KERNEL_FLAGS
from hlat.model.kv_cache import KVCache
from hlat.model.layers import Attention, DecoderBlock, FeedForward, RMSNorm, ShardedRMSNorm
from hlat.model.loss import Head, Reduction, head_loss
from hlat.model.spec import FULL_MODEL
from hlat.runtime.backend.c_library import CompilationFailed, compile_c_library
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.join import in_fake_world

_LOG = logging.getLogger(__name__)
_SOURCE = Path(__file__).parent / "kernels" / "decode.c"
_BLOCK_BYTES = 1 << 16  # of decode.c: weights that a thread takes
_Matrices = ctypes.c_void_p * 3


class StepLayer(ctypes.Structure):
    """Weights of a block; norms and biases that it does not have are null."""

    _fields_ = (
        *fields(ctypes.c_void_p, "before_attention", "after_attention", "before_feed_forward", "after_feed_forward"),
        *fields(ctypes.c_void_p, "q_norm", "k_norm"),
        *fields(_Matrices, "qkv", "qkv_bias"),
        *fields(ctypes.c_void_p, "output", "gate", "up", "down"),
    )


class StepArguments(ctypes.Structure):
    """Arguments of ``decode``: shapes, strides in elements, and memory; see ``decode.c``."""

    _fields_ = (
        *fields(ctypes.c_int64, "layers", "rows", "width", "heads", "groups", "head_width", "inner", "parts"),
        ("part_rows", ctypes.c_int64 * 3),
        *fields(ctypes.c_int64, "qkv_rows", "q_step", "k_start", "v_start", "kv_step", "gate_block", "gate_step"),
        *fields(ctypes.c_int64, "whole_norms", "table_step", "layer_step", "value_step", "row_step", "head_step"),
        *fields(ctypes.c_int64, "place", "first"),
        *fields(ctypes.c_float, "eps", "scale"),
        ("layer", ctypes.POINTER(StepLayer)),
        *fields(ctypes.c_void_p, "final_norm", "cos", "sin", "mask"),
        *fields(ctypes.c_void_p, "x", "hidden", "qkv", "attended", "gated", "cache"),
    )


class _ProductArguments(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_int64, "in_", "outs", "rows", "x_row", "out_row", "block", "step"),
        *fields(ctypes.c_void_p, "weight", "up", "bias", "x", "added", "out"),
    )


class DecodingLibrary:
    """The functions of the library; ``parallel`` is ``GOMP_parallel`` of the OpenMP library that torch uses."""

    def __init__(self, library: ctypes.CDLL, parallel: ctypes.c_void_p) -> None:
        self._parallel = parallel
        self._run = find_run(library)
        library.lanes.restype = ctypes.c_int64
        self._lanes: int = library.lanes()
        self._decode, self._multiply = {}, {}
        for dtype, suffix in SUFFIXES.items():
            function = getattr(library, f"decode_{suffix}")
            function.restype, function.argtypes = None, (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
            self._decode[dtype] = function
            self._multiply[dtype] = ctypes.cast(getattr(library, f"multiply_rows_{suffix}"), ctypes.c_void_p)

    def decode(self, dtype: torch.dtype, step: StepArguments) -> None:
        # The step has addresses only: the caller keeps the tensors, all of this dtype.
        self._decode[dtype](self._parallel, torch.get_num_threads(), ctypes.byref(step))

    def multiply(self, x_BD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        """Compute ``x @ weight.T`` for few rows: both contiguous, of one of ``DTYPES``; (B, V), rounded once."""
        assert x_BD.is_contiguous() and weight_VD.is_contiguous() and x_BD.dtype == weight_VD.dtype
        rows, width = x_BD.shape
        outs = len(weight_VD)
        out_BV = x_BD.new_empty((rows, outs))
        pointers = (weight_VD.data_ptr(), None, None, x_BD.data_ptr(), None, out_BV.data_ptr())
        product = _ProductArguments(width, outs, rows, width, outs, outs, outs, *pointers)
        together = max(1, _BLOCK_BYTES // (width * self._lanes * x_BD.itemsize))
        arguments = ctypes.byref(product), -(-outs // self._lanes), together
        self._run(self._parallel, torch.get_num_threads(), self._multiply[x_BD.dtype], *arguments, None, 0)
        return out_BV


def decoding_library(device: torch.device, dtype: torch.dtype, head_width: int) -> DecodingLibrary | None:
    """Return the library if it computes with tensors and heads of this kind, else None; the first call compiles it."""
    usable = dtype in DTYPES and head_width <= WIDEST_HEAD and backend_of(device).pointwise_kernels == "c"
    return _compiled() if usable and not in_fake_world() else None


@functools.cache
def _compiled() -> DecodingLibrary | None:
    try:
        parallel = ctypes.cast(find_openmp(), ctypes.c_void_p)
        return DecodingLibrary(compile_c_library(_SOURCE, KERNEL_FLAGS), parallel)
    except (CompilationFailed, OSError) as problem:
        _LOG.warning("tokens are decoded by torch, more slowly: %s", problem)
        return None


class StepWeights:
    """Weights of all blocks and of the final norm, and what ``StepArguments`` say about their shapes."""

    def __init__(self, blocks: list[DecoderBlock], norm: nn.Module, place: NormPlace, dtype: torch.dtype) -> None:
        self._dtype, self._kept = dtype, list[torch.Tensor]()
        first = blocks[0]
        # Arguments that are the same for every call; a call copies them.
        self.step = StepArguments(layers=len(blocks))
        self._layers = (StepLayer * len(blocks))(*(self._layer(block, place) for block in blocks))
        self.step.layer = self._layers
        self.step.final_norm, self.step.eps = self._norm(norm), first.attention_norm.eps
        self._describe_attention(first.attention)
        self._describe_feed_forward(first.feed_forward)
        self.step.width = first.attention_norm.weight.numel()

    def _layer(self, block: DecoderBlock, place: NormPlace) -> StepLayer:
        attention, feed_forward = block.attention, block.feed_forward
        layer = StepLayer(output=self._keep(attention.output.weight), down=self._keep(feed_forward.down.weight))
        norms = self._norm(block.attention_norm), self._norm(block.feed_forward_norm)
        if place is NormPlace.INPUT:
            layer.before_attention, layer.before_feed_forward = norms
        else:
            layer.after_attention, layer.after_feed_forward = norms
        layer.q_norm, layer.k_norm = self._norm(attention.q_norm), self._norm(attention.k_norm)
        for part, projection in enumerate(_projections(attention)):
            layer.qkv[part] = self._keep(projection.weight)
            layer.qkv_bias[part] = None if projection.bias is None else self._keep(projection.bias)
        if feed_forward.coalesce:
            layer.gate = self._keep(feed_forward.gate_up.weight)
            layer.up = layer.gate + feed_forward.block * feed_forward.gate_up.in_features * self._dtype.itemsize
        else:
            layer.gate, layer.up = self._keep(feed_forward.gate.weight), self._keep(feed_forward.up.weight)
        return layer

    def _norm(self, norm: nn.Module) -> int | None:
        return self._keep(norm.weight) if isinstance(norm, RMSNorm | ShardedRMSNorm) else None

    def _keep(self, weight: torch.Tensor) -> int:
        """Address of a weight, or of its copy in the dtype of the activations, which is kept alive."""
        self._kept.append(weight.detach().to(self._dtype).contiguous())
        return self._kept[-1].data_ptr()

    def _describe_attention(self, attention: Attention) -> None:
        step, width, share = self.step, attention.head_dim, attention.heads_per_group
        parts = [projection.out_features for projection in _projections(attention)]
        self.fused, self.heads = sum(parts), attention.output.in_features  # columns of q, k and v, and of q
        step.heads, step.head_width = self.heads // width, width
        step.groups = step.heads // share
        step.parts, step.part_rows, step.qkv_rows = len(parts), type(step.part_rows)(*parts), self.fused
        if attention.coalesce:  # a group of query heads, its key and its value follow each other
            step.q_step, step.kv_step = ((share + 2) * width,) * 2
            step.k_start, step.v_start = share * width, (share + 1) * width
        else:
            step.q_step, step.kv_step = share * width, width
            step.k_start, step.v_start = parts[0], parts[0] + parts[1]
        step.whole_norms = isinstance(attention.q_norm, ShardedRMSNorm)
        step.scale = width**-0.5

    def _describe_feed_forward(self, feed_forward: FeedForward) -> None:
        self.inner = self.step.inner = feed_forward.down.in_features
        self.step.gate_block = feed_forward.block
        self.step.gate_step = 2 * feed_forward.block if feed_forward.coalesce else feed_forward.block


def _projections(attention: Attention) -> list[Linear]:
    return [attention.qkv] if attention.coalesce else [attention.q, attention.k, attention.v]


MOST_ROWS = 64  # most rows of a step


def compile_step(decoder: Decoder) -> "CompiledStep | None":
    """Return a step of a complete model that shares its weights, or has copies in the dtype in which it computes.

    The weights must not change or move while it is in use. None if the device, the dtype or the blocks of the model
    have no such step, or if it is a shard.
    """
    place, weight = norm_place(decoder.config), next(decoder.parameters())
    dtype = decoder.compute or weight.dtype
    kinds = set(decoder.kinds.values())
    # One mask and one rotation, of complete heads, for all layers
    ropes = {kind.rope for kind in kinds}
    is_like = len(kinds) == 1 and all(rope is not None and rope.partial_rotary_factor == 1 for rope in ropes)
    if place is None or decoder.shard != FULL_MODEL or not is_like or decoder.config.alters_softmax:
        return None
    library = decoding_library(weight.device, dtype, decoder.config.n_head_dim)
    if library is None or decoder.norm is None or decoder.head is None:
        return None
    return CompiledStep(library, StepWeights(list(decoder.blocks()), decoder.norm, place, dtype), decoder.head, dtype)


class CompiledStep:
    """A step that C computes; see ``DecodingStep``."""

    def __init__(self, library: DecodingLibrary, weights: StepWeights, head: Head, dtype: torch.dtype) -> None:
        self._library, self._weights, self._head, self._dtype = library, weights, head, dtype
        self._matrix_VD = head.matrix.detach().to(dtype).contiguous()

    def takes(self, x_BSD: torch.Tensor, cache: KVCache) -> bool:
        """True for one token of each of few rows, without gradients, in the dtype of weights and cache."""
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
        # C reads addresses. These names keep copies alive until it returns.
        x_B1D = x_B1D.contiguous()
        rows, weights = len(x_B1D), self._weights
        widths = (x_B1D.shape[2], weights.fused, weights.heads, weights.inner)
        work = [x_B1D.new_empty((rows, width)) for width in widths]
        cos, sin = (table.contiguous() for table in tables)
        mask = cache.mask(window)
        mask = None if mask is None else mask.contiguous()
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
