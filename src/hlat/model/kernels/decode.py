"""The compiled library of ``decode.c``: decoding steps, and products of few rows.

It is compiled when a process starts to generate, a second and a half, and not with the kernels of training.
"""

import ctypes
import functools
import logging
from pathlib import Path

import torch

from hlat.model.kernels.attention import WIDEST_HEAD
from hlat.model.kernels.library import DTYPES, SUFFIXES, find_openmp, find_run
from hlat.model.kernels.source import KERNEL_FLAGS
from hlat.runtime.backend.table import backend_of
from hlat.runtime.compiled_code.c_library import CompilationFailed, compile_c_library
from hlat.runtime.distributed.fake_world import in_fake_world

_LOG = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("decode.c")
_BLOCK_BYTES = 1 << 16  # of decode.c: weights that a thread takes
_Matrices = ctypes.c_void_p * 3


def _fields(kind: type, *names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names]


class StepLayer(ctypes.Structure):
    """Weights of a block; norms and biases that it does not have are null."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "before_attention", "after_attention", "before_feed_forward", "after_feed_forward"),
        *_fields(ctypes.c_void_p, "q_norm", "k_norm"),
        *_fields(_Matrices, "qkv", "qkv_bias"),
        *_fields(ctypes.c_void_p, "output", "gate", "up", "down"),
    )


class StepArguments(ctypes.Structure):
    """Arguments of ``decode``: shapes, strides in elements, and memory; see ``decode.c``."""

    _fields_ = (
        *_fields(ctypes.c_int64, "layers", "rows", "width", "heads", "groups", "head_width", "inner", "parts"),
        ("part_rows", ctypes.c_int64 * 3),
        *_fields(ctypes.c_int64, "qkv_rows", "q_step", "k_start", "v_start", "kv_step", "gate_block", "gate_step"),
        *_fields(ctypes.c_int64, "whole_norms", "table_step", "layer_step", "value_step", "row_step", "head_step"),
        *_fields(ctypes.c_int64, "place", "first"),
        *_fields(ctypes.c_float, "eps", "scale"),
        ("layer", ctypes.POINTER(StepLayer)),
        *_fields(ctypes.c_void_p, "final_norm", "cos", "sin", "mask"),
        *_fields(ctypes.c_void_p, "x", "hidden", "qkv", "attended", "gated", "cache"),
    )


class _ProductArguments(ctypes.Structure):
    """Arguments of ``multiply_rows``."""

    _fields_ = (
        *_fields(ctypes.c_int64, "in_", "outs", "rows", "x_row", "out_row", "block", "step"),
        *_fields(ctypes.c_void_p, "weight", "up", "bias", "x", "added", "out"),
    )


class DecodingLibrary:
    """The functions of the library, and the function of OpenMP that runs them on several threads.

    Args:
        library: the compiled library.
        parallel: ``GOMP_parallel`` of the OpenMP library that torch uses.
    """

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
        """Run a step, all of whose pointers are to tensors of a dtype that the caller keeps."""
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
