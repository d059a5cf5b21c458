"""Choice between the kernels and torch, and its name in messages."""

import torch

import hlat.model.kernels.operations  # noqa: F401 - registers the operators
from hlat.model.kernels.attention import WIDEST_HEAD
from hlat.model.kernels.library import DTYPES, Library, is_available
from hlat.model.kernels.library import library as compiled_library
from hlat.runtime.backend import backend_of
from hlat.runtime.distributed import in_fake_world


def has_kernels(x: torch.Tensor) -> bool:
    """Return True if the operators compute with tensors of this device and dtype.

    Not for code that ``torch.compile`` traces: a compiler fuses the plain formulas itself.
    """
    return x.dtype in DTYPES and are_used_on(x.device)


def are_used_on(device: torch.device) -> bool:
    """Return True if eager models compute with the operators on a device, in the dtypes that these have."""
    return backend_of(device).fused_pointwise and is_available()


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
    if not are_used_on(device):
        return "torch"
    return f"fused C kernels{_build()}"


def _build() -> str:
    compiled = _compiled()
    return "" if compiled is None else f" ({compiled.build})"


def _compiled() -> Library | None:
    """Return the library; None in a rehearsal, which compiles nothing."""
    return None if in_fake_world() else compiled_library()
