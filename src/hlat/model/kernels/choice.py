"""Choice between the kernels and torch, and its name in messages."""

import functools
import importlib.util
import logging
from collections.abc import Callable

import torch

import hlat.model.kernels.operations  # noqa: F401 - registers the operators
from hlat.model.kernels.attention import WIDEST_HEAD
from hlat.model.kernels.library import DTYPES, Library, is_available
from hlat.model.kernels.library import library as compiled_library
from hlat.runtime.backend.base import TORCH, Backend
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.fake_world import in_fake_world

_LOG = logging.getLogger(__name__)


def has_kernels(x: torch.Tensor) -> bool:
    """Return True if the operators compute with tensors of this device and dtype.

    Not for code that ``torch.compile`` traces: a compiler fuses the plain formulas itself.
    """
    return x.dtype in DTYPES and are_used_on(x.device)


def are_used_on(device: torch.device) -> bool:
    """Return True if eager models compute with the operators on a device, in the dtypes that these have."""
    backend = backend_of(device)
    return _ARE_USABLE[backend.pointwise_kernels](backend, device)


@functools.lru_cache(maxsize=16)  # asked by every operation, and the driver takes microseconds to answer
def fuses_in_triton(backend: Backend, device: torch.device) -> bool:
    """Return True if a device, which need not be on this machine, computes with the operators in Triton."""
    if backend.pointwise_kernels != _TRITON or backend.compile_obstacle(device):
        return False
    return backend.has_fast_bf16(device)


def _has_triton(backend: Backend, device: torch.device) -> bool:
    return fuses_in_triton(backend, device) and (in_fake_world() or _can_launch(backend))


@functools.cache
def _can_launch(backend: Backend) -> bool:
    """Return True if this process can compile and launch Triton's kernels; else log the reason."""
    compiler, problem = backend.compiler, ""
    if importlib.util.find_spec("triton") is None:
        problem = "Triton is not installed"
    elif compiler is not None and not compiler.is_available():  # Triton's launchers are compiled when they are needed
        problem = f"no {compiler.missing} found"
    if problem:
        _LOG.warning("norms, RoPE, SwiGLU and loss are computed by torch, more slowly: %s", problem)
    return not problem


_TRITON = "triton"
_ARE_USABLE: dict[str, Callable[[Backend, torch.device], bool]] = {
    # pointwise_kernels of a backend -> function of the backend and a device
    TORCH: lambda backend, device: False,
    "c": lambda backend, device: is_available(),
    _TRITON: _has_triton,
}


def attention_is_used_on(device: torch.device | str) -> bool:
    """Return True if models compute attention by the compiled operator on a device, in its dtypes and widths."""
    if not backend_of(device).fused_attention or not is_available():
        return False
    compiled = _compiled()
    return compiled is None or compiled.attends


def builds_masks(device: torch.device | str) -> bool:
    """Return True if attention under context parallelism builds a mask in memory on a device."""
    return backend_of(device).materialises_masks and not attention_is_used_on(device)


def has_attention(device_type: str, dtype: torch.dtype, width: int) -> bool:
    """Return True if the operator of attention computes with heads of this kind.

    Args:
        device_type: type of the device of queries, keys and values.
        dtype: their dtype.
        width: width of a head.
    """
    return dtype in DTYPES and width <= WIDEST_HEAD and attention_is_used_on(device_type)


# torch.compile asks it once instead of tracing it. torch.compiler.assume_constant_result sets this, and imports torch's
# compiler to do so, which takes 0.8 s of every start.
has_attention._dynamo_marked_constant = True  # type: ignore[attr-defined]


def describe_attention() -> str:
    """Name the compiled attention, as ``describe_kernels`` does."""
    return f"fused C kernel{_build()}"


def describe_kernels(device: torch.device) -> str:
    """Name what computes norms, RoPE, SwiGLU and loss of eager models on a device, for messages and checkpoints.

    Computations with the same name have the same bits: it has the compiler and the instructions of the kernels, except
    in a rehearsal, which compiles nothing.
    """
    backend = backend_of(device)
    if not are_used_on(device):
        return TORCH
    if backend.pointwise_kernels == _TRITON:
        version = "" if in_fake_world() else f" (Triton {backend.compiler_versions(device)['Triton']})"
        return f"fused Triton kernels{version}"
    return f"fused C kernels{_build()}"


def _build() -> str:
    compiled = _compiled()
    return "" if compiled is None else f" ({compiled.build})"


def _compiled() -> Library | None:
    """Return the library; None in a rehearsal, which compiles nothing."""
    return None if in_fake_world() else compiled_library()
