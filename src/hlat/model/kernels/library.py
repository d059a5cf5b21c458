"""The compiled library of ``kernels.c``, the operators of torch that it computes, and the choice between it and torch.

    kernels.c --the C compiler, a second--> shared library --ctypes, blocks of rows--> threads of torch's OpenMP
    a tensor, or a device --has_kernels, are_used_on--> torch.ops.hlat.NAME, or the formulas in torch

    @operator: torch.ops.hlat.NAME --CPU tensors--> blocks of rows --> ``kernels.c``
                                   --tensors of GPUs--> ``operations_triton.py``
                                   --fake and meta tensors--> shapes of the results

The threads are those that torch's own kernels run on: a second pool would compete with them for the cores. They take
blocks of rows; what a block computes does not depend on who computes it.

Registered operators have a name in profiles and traces, and a rehearsal counts the memory of their results. They are
called from the autograd functions beside them (``pointwise.py``, ``loss.py``, ``attention.py``), which decide what to
save. They pass addresses to C, so each checks its operands first, also those without memory.
"""

import ctypes
import functools
import importlib.util
import logging
import threading
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from hlat.model.kernels.source import KERNEL_FLAGS, KERNEL_SOURCE
from hlat.runtime.backend.base import TORCH, Backend
from hlat.runtime.backend.c_library import CompilationFailed, compile_c_library, find_c_compiler
from hlat.runtime.backend.table import backend_of, types_with
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


def run(name: str, dtype: torch.dtype, arguments: ctypes.Structure, rows: int, block_rows: int) -> None:
    """Run a function of the library, as ``Library.run`` does; for callers that have asked if it is usable."""
    found = library()
    assert found is not None and (found.attends or name not in _WITH_SCRATCH), "the caller asked are_used_on()"
    found.run(name, dtype, arguments, rows, block_rows)


def fields(kind: type, *names: str) -> list[tuple[str, type]]:
    """Return fields of one C type for a ``ctypes.Structure``."""
    return [(name, kind) for name in names]


class Rows(ctypes.Structure):
    """Rows of a tensor: ``inner`` rows at a stride of elements, and so on for every outer index."""

    _fields_ = (("data", ctypes.c_void_p), *fields(ctypes.c_int64, "inner", "outer_stride", "inner_stride"))


def describe_rows(x: torch.Tensor) -> tuple[Rows, torch.Tensor]:
    """Describe the rows of a tensor for C, and return the tensor that has them."""
    x, *place = place_of_rows(x)
    return Rows(x.data_ptr(), *place), x


def place_of_rows(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """Describe where the rows of a tensor begin, or of a copy if its strides are too irregular: the tensor comes first.

    Then ``inner``, ``outer_stride`` and ``inner_stride``: ``inner`` rows follow each other at one stride, and such
    groups of rows at the other.
    """
    width = x.shape[-1]
    if x.is_contiguous():
        return x, 1, width, 0
    dimensions = [(size, stride) for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size != 1]
    merged: list[tuple[int, int]] = []
    for size, stride in dimensions:
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    if len(merged) > 2 or (width > 1 and x.stride(-1) != 1):
        return place_of_rows(x.contiguous())
    (_, outer), (inner, inner_stride) = ([(1, 0)] * 2 + merged)[-2:]
    return x, max(1, inner), outer, inner_stride


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


def check_dtype(name: str, x: torch.Tensor) -> None:
    """Raise TypeError for an operand of another dtype than the library's."""
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} is {x.dtype}, and one of {', '.join(map(str, DTYPES))} is needed")


def check_rows(name: str, x: torch.Tensor) -> None:
    """Raise TypeError or ValueError if the operand with which the others are compared has no rows of the library's."""
    check_dtype(name, x)
    if x.dim() == 0:
        raise ValueError(f"{name} is a single number, and rows of a last dimension are needed")


def block_rows(width: int) -> int:
    """Number of rows of a block that a thread takes."""
    return max(1, _BLOCK_ELEMENTS // max(1, width))


_BLOCK_ELEMENTS = 1 << 14  # of a block: about 10 microseconds
_TRITON = "triton"
_TRITON_TYPES = types_with(lambda backend: backend.pointwise_kernels == _TRITON)
OPERATORS = torch.library.Library("hlat", "FRAGMENT")
# Operators that have a kernel in Triton, by name: the implementation of each for tensors without memory
RESULTS: dict[str, Callable[..., Any]] = {}
Kernel = Callable[..., None]


def operator(schema: str, results: Callable[..., Any], triton: bool = True) -> Callable[[Kernel], Kernel]:
    """Register a kernel for CPU tensors as an operator, and its namesake in Triton for those of GPUs, if there is one.

    ``results`` checks the operands and allocates the results; a kernel takes both, and writes the results.
    """
    OPERATORS.define(schema)
    name = schema.partition("(")[0]
    # Torch calls it too if only some operands have memory.
    OPERATORS.impl(name, results, "Meta")
    if triton:
        RESULTS[name] = results
        torch.library.impl(f"hlat::{name}", _TRITON_TYPES, in_triton(name, results), lib=OPERATORS)

    def register(kernel: Kernel) -> Kernel:
        OPERATORS.impl(name, _computed(results, lambda: kernel), "CPU")
        return kernel

    return register


def in_triton(name: str, results: Callable[..., Any]) -> Callable[..., Any]:
    """Return the implementation of an operator in Triton: ``results`` checks and allocates, a namesake computes."""
    # Imported by the first call: only CUDA builds of torch have Triton.
    return _computed(results, lambda: getattr(import_module("hlat.model.kernels.operations_triton"), name))


def _computed(results: Callable[..., Any], kernel: Callable[[], Kernel]) -> Callable[..., Any]:
    def compute(*operands: Any) -> Any:
        found = results(*operands)
        written = () if found is None else found if isinstance(found, tuple) else (found,)
        kernel()(*operands, *written)
        return found

    return compute


def has_kernels(x: torch.Tensor) -> bool:
    """True if the operators compute with tensors of this device and dtype."""
    # Not for code that torch.compile traces: a compiler fuses the plain formulas itself.
    return x.dtype in DTYPES and are_used_on(x.device)


def are_used_on(device: torch.device) -> bool:
    """Return True if eager models compute with the operators on a device, in the dtypes that these have."""
    backend = backend_of(device)
    return _ARE_USABLE[backend.pointwise_kernels](backend, device)


def is_available() -> bool:
    """True if the library can be used."""
    # A rehearsal computes nothing: a compiler is enough for it
    return find_c_compiler() is not None if in_fake_world() else library() is not None


@functools.lru_cache(maxsize=16)  # asked by every operation, and the driver takes microseconds to answer
def fuses_in_triton(backend: Backend, device: torch.device) -> bool:
    """Return True if a device, which need not be on this machine, computes with the operators in Triton."""
    if backend.pointwise_kernels != _TRITON or backend.compile_obstacle(device):
        return False
    return backend.has_fast_bf16(device)


@functools.cache
def _can_launch(backend: Backend) -> bool:
    compiler, problem = backend.compiler, ""
    if importlib.util.find_spec("triton") is None:
        problem = "Triton is not installed"
    elif compiler is not None and not compiler.is_available():  # Triton's launchers are compiled when they are needed
        problem = f"no {compiler.missing} found"
    if problem:
        _LOG.warning("norms, RoPE, SwiGLU and loss are computed by torch, more slowly: %s", problem)
    return not problem


_ARE_USABLE: dict[str, Callable[[Backend, torch.device], bool]] = {
    # pointwise_kernels of a backend -> function of the backend and a device
    TORCH: lambda backend, device: False,
    "c": lambda backend, device: is_available(),
    _TRITON: lambda backend, device: fuses_in_triton(backend, device) and (in_fake_world() or _can_launch(backend)),
}


def describe_kernels(device: torch.device) -> str:
    """Name what computes norms, RoPE, SwiGLU and loss of eager models on a device, for messages and checkpoints.

    The same name means the same bits: it has the compiler and the instructions of the kernels, except in a rehearsal.
    """
    backend = backend_of(device)
    if not are_used_on(device):
        return TORCH
    if backend.pointwise_kernels == _TRITON:
        version = "" if in_fake_world() else f" (Triton {backend.compiler_versions(device)['Triton']})"
        return f"fused Triton kernels{version}"
    return f"fused C kernels{describe_build()}"


def describe_build() -> str:
    """Return compiler and instructions of the library in brackets; empty in a rehearsal, which compiles nothing."""
    compiled = None if in_fake_world() else library()
    return "" if compiled is None else f" ({compiled.build})"
