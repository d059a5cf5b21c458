"""The compiled library of ``kernels.c``: its functions, their arguments, and the threads that run them.

    kernels.c --the C compiler, a second--> shared library --ctypes, blocks of rows--> threads of torch's OpenMP

The threads are those that torch's own kernels run on: a second pool would compete with them for the cores. They take
blocks of rows; what a block computes does not depend on who computes it.
"""

import ctypes
import functools
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hlat.model.kernels.source import KERNEL_FLAGS, KERNEL_SOURCE
from hlat.runtime.backend.c_library import CompilationFailed, compile_c_library, find_c_compiler
from hlat.runtime.distributed.join import in_fake_world

_LOG = logging.getLogger(__name__)
# Endings of the names of functions, by the dtype of their operands
SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_FUNCTIONS = (
    "norm",
    "norm_backward",
    "norm_weight",
    "rotate",
    "swiglu",
    "swiglu_backward",
    "loss_sums",
    "loss_gradient",
    "first_equal",
    "attend",
    "attend_backward",
    "attend_sums",
)
_WITH_SCRATCH = ("attend", "attend_backward")
DTYPES = tuple(SUFFIXES)  # dtypes of the operands


class Rows(ctypes.Structure):
    """Rows of a tensor: ``inner`` rows at a stride of elements, and so on for every outer index."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("inner", ctypes.c_int64),
        ("outer_stride", ctypes.c_int64),
        ("inner_stride", ctypes.c_int64),
    )


class Norm(ctypes.Structure):
    """Arguments of ``norm``, ``norm_backward`` and ``norm_weight``."""

    _fields_ = (
        ("width", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("x", Rows),
        ("gradient", Rows),
        ("weight", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("block_rows", ctypes.c_int64),
        ("blocks", ctypes.c_int64),
    )


class Rotation(ctypes.Structure):
    """Arguments of ``rotate``, in the order of the struct in C."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("sequence", "groups", "heads", "half")),
        *((f"{name}_stride", ctypes.c_int64) for name in ("batch", "position", "group", "head")),
        *((name, ctypes.c_int64) for name in ("table_batch_stride", "table_stride")),
        *((name, ctypes.c_void_p) for name in ("x", "cos", "sin", "out")),
        ("direction", ctypes.c_float),
    )


class Gated(ctypes.Structure):
    """Arguments of ``swiglu`` and ``swiglu_backward``."""

    _fields_ = (
        ("width", ctypes.c_int64),
        *((name, Rows) for name in ("gate", "up", "gradient", "gate_out", "up_out")),
    )


class Loss(ctypes.Structure):
    """Arguments of ``loss_sums``, ``loss_gradient`` and ``first_equal``."""

    _fields_ = (
        ("width", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("logits", "rows", "peak", "sum", "label", "factor", "first")),
    )


class HeadRows(ctypes.Structure):
    """A tensor (batch, heads, rows, width) by its strides in elements; a row is stored without gaps."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "row")))


class Attended(ctypes.Structure):
    """Arguments of ``attend``, ``attend_backward`` and ``attend_sums``."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "groups", "queries", "keys", "width")),
        *((name, ctypes.c_int64) for name in ("padded_keys", "padded_width")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("first", "last")),
        *((name, HeadRows) for name in ("q", "k", "v", "out", "gradient", "by_q", "by_k", "by_v", "log_sums")),
        *((name, ctypes.c_void_p) for name in ("key_sums", "value_sums")),
    )


class Library:
    """The functions of the library, and the function of OpenMP that runs them on several threads.

    ``parallel`` is ``GOMP_parallel`` of the OpenMP library that torch uses.
    """

    def __init__(self, library: ctypes.CDLL, parallel: Any) -> None:
        self._run = find_run(library)
        self._parallel = ctypes.cast(parallel, ctypes.c_void_p)
        library.scratch_bytes.restype = ctypes.c_int64
        self._scratch_bytes: int = library.scratch_bytes()
        self._kept = threading.local()
        library.build.restype = ctypes.c_char_p
        # The compiler and the instructions that it used, on which the bits of results depend.
        self.build: str = library.build().decode()
        # The compiler has to use AVX-512 or AVX2 for it
        self.attends = bool(library.has_attention())
        self._functions = {
            (name, dtype): ctypes.cast(getattr(library, f"{name}_{suffix}"), ctypes.c_void_p)
            for name in _FUNCTIONS
            for dtype, suffix in SUFFIXES.items()
        }

    def run(self, name: str, dtype: torch.dtype, arguments: ctypes.Structure, rows: int, block_rows: int) -> None:
        """Run a function of operands of a dtype on ``rows`` rows; the caller keeps the tensors that it points to."""
        # block_rows must not depend on the number of threads: blocks decide the bits of sums.
        function, threads = self._functions[name, dtype], torch.get_num_threads()
        size = self._scratch_bytes if name in _WITH_SCRATCH else 0
        memory = self._scratch(size * threads).data_ptr() if size else None
        self._run(self._parallel, threads, function, ctypes.byref(arguments), rows, block_rows, memory, size)

    def _scratch(self, size: int) -> torch.Tensor:
        # Kept for the thread's next call: new pages would cost more than a small attention.
        found: torch.Tensor | None = getattr(self._kept, "scratch", None)
        if found is None or len(found) < size:
            found = self._kept.scratch = torch.empty(size, dtype=torch.uint8)  # aligned, as all memory of torch
        return found


@functools.cache
def library() -> Library | None:
    """Compile and return the library; None, with a warning that gives the reason, if that fails."""
    started = time.perf_counter()
    try:
        found = Library(compile_c_library(KERNEL_SOURCE, KERNEL_FLAGS), find_openmp())
    except (CompilationFailed, OSError) as problem:
        _LOG.warning("norms, RoPE, SwiGLU, attention and loss are computed by torch, more slowly: %s", problem)
        return None
    if not found.attends:
        _LOG.warning("attention is computed by torch, more slowly: the C compiler does not use AVX2 (%s)", found.build)
    _LOG.info("norms, RoPE, SwiGLU, attention and loss: compiled code loaded in %.1f s", time.perf_counter() - started)
    return found


def check_operand(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], device: torch.device
) -> None:
    """Raise TypeError or ValueError if an operand is not what a C function takes it for."""
    if tensor.dtype != dtype:
        raise TypeError(f"{name} is {tensor.dtype}, and {dtype} is needed")
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, and {tuple(shape)} is needed")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, and {device} is needed")


def is_available() -> bool:
    """True if the library can be used."""
    # A rehearsal computes nothing: a compiler is enough for it
    return find_c_compiler() is not None if in_fake_world() else library() is not None


def find_run(library: ctypes.CDLL) -> Any:
    """Find ``run_with_scratch`` of ``threads.h`` in a library."""
    run = library.run_with_scratch
    run.restype = None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    # OpenMP's function, threads, kernel, its arguments, rows, rows of a block, memory, and bytes of it for each thread
    run.argtypes = (pointer, number, pointer, pointer, number, number, pointer, number)
    return run


def find_openmp() -> Any:
    """Find ``GOMP_parallel`` of the OpenMP library whose threads torch uses; LLVM's and Intel's have it too."""
    # As the dynamic linker did for torch: first what the complete process sees, such as a library in LD_PRELOAD, then
    # what torch's library brings along.
    everywhere = ctypes.CDLL(None)
    if hasattr(everywhere, "GOMP_parallel"):
        return everywhere.GOMP_parallel
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError) as problem:
        raise CompilationFailed(f"torch's OpenMP library cannot be used: {problem}") from problem
