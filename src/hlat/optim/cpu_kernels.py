"""Kernels of the optimizers on a CPU, from ``native.c``: AdamW update of bf16 weights, and sums of squares.

    native.c --the machine's C compiler, half a second--> shared library of this process --ctypes--> Kernel
    a tensor, bf16 -> squares, exact in float64 -> sums of ``RUN`` consecutive elements, added in a defined order

Why not ``torch.compile`` of the reference, which gives the same bits? Its C++ takes 20 s and more to compile instead of
half a second, writes to memory whenever it reinterprets a float as an integer, and runs at 0.4 times the speed
(``benchmarks/optimizer_step.py --compile``). By default it also removes a rounding to bf16 and back, on which
bf16-kahan depends.

The lines of every parameter are divided over as many threads as torch uses; ctypes releases the GIL.

Sums of squares have the same bits compiled or not, on any number of threads. ``native.c`` reads bf16 once; torch's norm
has to be given an fp32 copy. The order of additions in a run: element 16 i + j is added to sum j, for i = 0 to 15; then
the second half of the sums is added to the first until one is left. Elements past the end count as zeros.
"""

import ctypes
import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from hlat.optim.adamw_reference import Kernel, Operands
from hlat.runtime.backend.c_library import CompilationFailed, compile_c_library

_LOG = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("native.c")
_FLAGS = ("-ffp-contract=off", "-fopenmp-simd")  # a contracted product would not be rounded as the reference does
_FUNCTIONS = {
    "bf16-sr": "stochastic",
    "bf16": "nearest",
    "bf16-kahan": "kahan",
    "bf16-long": "nearest_long",
    "bf16-kahan-long": "kahan_long",
}
_GRADIENTS = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_SINGLE_THREAD = 1 << 16  # elements; for fewer, a second thread costs more than it saves

Arguments = tuple[int, ...]  # arguments of a library function for a parameter, after the range of lines
Call = tuple[Callable[..., None], int, Arguments]
"""A library function, its number of lines (or of runs, in sums of squares), and its other arguments."""


def native_kernel() -> Kernel | None:
    """Return the kernel; None, with a warning that gives the reason, if it cannot be compiled."""
    library = _library()
    return None if library is None else functools.partial(_update, library)


def native_square_sums(tensors: Sequence[torch.Tensor], run: int) -> torch.Tensor | None:
    """Compute ``square_sums`` of flat contiguous bf16 tensors with elements; None without a compiler."""
    library = _library()
    if library is None:
        return None
    # Rounded up: the elements past the end count as zeros.
    counts = [-(-tensor.numel() // run) for tensor in tensors]
    sums = torch.empty(sum(counts), dtype=torch.float64)
    targets = sums.split(counts) if counts else ()
    calls = [
        (library.square_sums, count, (tensor.numel(), tensor.data_ptr(), target.data_ptr()))
        for tensor, count, target in zip(tensors, counts, targets, strict=True)
    ]
    _call(calls, sum(tensor.numel() for tensor in tensors))
    return sums


@functools.cache
def _library() -> ctypes.CDLL | None:
    started = time.perf_counter()
    try:
        library = _compile()
    except (CompilationFailed, OSError) as problem:
        _LOG.warning("AdamW over bf16 weights runs uncompiled, about 20 times slower: %s", problem)
        return None
    _LOG.info("AdamW over bf16 weights: compiled code loaded in %.1f s", time.perf_counter() - started)
    return library


def _compile() -> ctypes.CDLL:
    library = compile_c_library(_SOURCE, _FLAGS)
    for kind in _FUNCTIONS.values():
        for gradient in _GRADIENTS.values():
            function = getattr(library, f"{kind}_{gradient}")
            function.restype = None
            function.argtypes = [ctypes.c_int64] * 3 + [ctypes.c_void_p] * 10 + [ctypes.c_int64]
    library.square_sums.restype = None
    library.square_sums.argtypes = [ctypes.c_int64] * 3 + [ctypes.c_void_p] * 2
    return library


def _update(library: ctypes.CDLL, parameters: Sequence[Operands], keys_2N: torch.Tensor, rounding: str) -> None:
    keys_2N = keys_2N.contiguous()
    kind = _FUNCTIONS[rounding]
    calls = [
        (getattr(library, f"{kind}_{_GRADIENTS[each.gradient.dtype]}"), each.addresses.count, _arguments(each, keys_2N))
        for each in parameters
        if each.weight.numel()  # a rank may hold no part of a parameter
    ]
    _call(calls, sum(each.weight.numel() for each in parameters))


def _call(calls: Sequence[Call], elements: int) -> None:
    # Any division gives the same bits: a line depends on that line only.
    threads = torch.get_num_threads()
    if threads == 1 or elements < _SINGLE_THREAD:
        _call_lines(calls, 0, 1)
    else:
        list(_threads(threads).map(functools.partial(_call_lines, calls, count=threads), range(threads)))


def _arguments(operands: Operands, keys_2N: torch.Tensor) -> Arguments:
    tensors = (
        operands.weight,
        operands.gradient,
        operands.exp_avg,
        operands.exp_avg_sq,
        operands.compensation,
        operands.scalars,
    )
    tables = (operands.addresses.rows_L, operands.addresses.columns_L, operands.addresses.names_L, keys_2N)
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors), "the kernel requires contiguous lines"
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in (*tensors, *tables)]
    return (operands.addresses.length, *pointers, keys_2N.shape[1])


def _call_lines(calls: Sequence[Call], index: int, count: int) -> None:
    for function, lines, arguments in calls:
        function(index * lines // count, (index + 1) * lines // count, *arguments)


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="hlat-adamw")


os.register_at_fork(
    after_in_child=_threads.cache_clear
)  # threads do not survive a fork; the old pool would wait for them forever


RUN = 256  # elements of a sum
_SUM_LANES = 16  # sums that native.c adds side by side; see the head of this module
_SQUARES_CHUNK = 1 << 15  # elements at a time: temporaries fit into the cache


def square_sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum the squares of each run of ``RUN`` elements of bf16 CPU tensors: float64, one number per run."""
    flat = [tensor.reshape(-1).contiguous() for tensor in tensors if tensor.numel()]  # a view may remain strided
    sums = native_square_sums(flat, RUN)
    return plain_square_sums(flat) if sums is None else sums


def plain_square_sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute the same in plain torch, which the compiled function reproduces bit for bit."""
    sums = [_sum_runs(chunk) for tensor in tensors for chunk in tensor.split(_SQUARES_CHUNK)]
    return torch.cat(sums) if sums else torch.zeros(0, dtype=torch.float64)


def _sum_runs(values: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(values, (0, -values.numel() % RUN)).double()
    total, *others = padded.square().view(-1, RUN // _SUM_LANES, _SUM_LANES).unbind(1)
    for other in others:
        total = total + other
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total.squeeze(1)
