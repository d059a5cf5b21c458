"""The step of AdamW over bf16 weights on a CPU: ``native.c``, compiled when the first step asks for it.

    native.c --the machine's C compiler, half a second--> a library of this process --ctypes--> Kernel

Why not ``torch.compile`` of the reference, which gives the same bits: its C++ takes 20 s and more to compile where this
takes half of one, goes through memory wherever a float is taken for its bits, and then runs at 0.4 times the speed
(``benchmarks/optimizer_step.py --compile``). And unless told not to, it leaves out a rounding to bf16 and back, which
is what bf16-kahan is about. The library is built in a private temporary folder, loaded, and the folder removed:
nothing that is left on a disk is ever run.

The lines of every parameter are shared out over as many threads as torch uses; ctypes lets them run at once.
"""

import ctypes
import functools
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from hlat.optim.adamw_reference import Kernel, Operands

_LOG = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("native.c")
_COMPILERS = ("cc", "gcc", "clang", "c++", "g++", "clang++")
# Fast, but with every operation as IEEE 754 defines it: no contraction; -ffast-math would also flush subnormals.
_FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-shared", "-fPIC")
_TUNING = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler knows
_FUNCTIONS = {
    "bf16-sr": "stochastic",
    "bf16": "nearest",
    "bf16-kahan": "kahan",
    "bf16-long": "nearest_long",
    "bf16-kahan-long": "kahan_long",
}
_GRADIENTS = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_ALONE = 1 << 16  # elements below which a second thread costs more than it does

Addresses = tuple[int, ...]
"""A parameter's arguments of a function of the library, after the lines to step."""


class CompilationFailed(Exception):
    """No C compiler, or it failed; says why."""


@functools.cache
def native_kernel() -> Kernel | None:
    """The compiled kernel; None, with a warning that says why, where it cannot be compiled."""
    began = time.perf_counter()
    try:
        library = _compile()
    except (CompilationFailed, OSError) as problem:
        _LOG.warning("AdamW over bf16 weights runs uncompiled, some 20 times slower: %s", problem)
        return None
    _LOG.info("AdamW over bf16 weights: compiled in %.1f s", time.perf_counter() - began)
    return functools.partial(_update, library)


def _compile() -> ctypes.CDLL:
    compiler = os.environ.get("CC") or next(filter(shutil.which, _COMPILERS), None)
    if compiler is None:
        raise CompilationFailed(f"no C compiler: none of {', '.join(_COMPILERS)} is here")
    with tempfile.TemporaryDirectory(prefix="hlat-") as folder:
        output = Path(folder) / "native.so"
        for tuning in _TUNING:
            command = [*compiler.split(), "-x", "c", *_FLAGS, *tuning, str(_SOURCE), "-o", str(output), "-lm"]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode == 0:
                return _load(output)
    raise CompilationFailed(f"{compiler} failed: {result.stderr.strip()[-500:]}")


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for kind in _FUNCTIONS.values():
        for gradient in _GRADIENTS.values():
            function = getattr(library, f"{kind}_{gradient}")
            function.restype = None
            function.argtypes = [ctypes.c_int64] * 3 + [ctypes.c_void_p] * 10 + [ctypes.c_int64]
    return library


def _update(library: ctypes.CDLL, parameters: Sequence[Operands], keys_2N: torch.Tensor, rounding: str) -> None:
    """The ``Kernel``."""
    keys_2N = keys_2N.contiguous()
    kind = _FUNCTIONS[rounding]
    calls = [
        (getattr(library, f"{kind}_{_GRADIENTS[one.gradient.dtype]}"), one.lines.count, _addresses(one, keys_2N))
        for one in parameters
        if one.weight.numel()
    ]
    threads = torch.get_num_threads()
    if threads == 1 or sum(one.weight.numel() for one in parameters) < _ALONE:
        _share(calls, 0, 1)
    else:
        list(_threads(threads).map(functools.partial(_share, calls, count=threads), range(threads)))


def _addresses(one: Operands, keys_2N: torch.Tensor) -> Addresses:
    tensors = (one.weight, one.gradient, one.exp_avg, one.exp_avg_sq, one.compensation, one.scalars)
    tables = (one.lines.rows_L, one.lines.columns_L, one.lines.names_L, keys_2N)
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors), "lines follow one another"
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in (*tensors, *tables)]
    return (one.lines.length, *pointers, keys_2N.shape[1])


def _share(calls: Sequence[tuple[Callable[..., None], int, Addresses]], index: int, count: int) -> None:
    """Step one thread's lines of every parameter."""
    for function, lines, addresses in calls:
        function(index * lines // count, (index + 1) * lines // count, *addresses)


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="hlat-adamw")


os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not survive it, and a pool would wait for them
