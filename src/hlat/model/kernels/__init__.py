"""Pointwise operations and the loss in one pass over memory each, compiled from C for the processor.

are the kernels usable for this tensor? --yes--> operators ``torch.ops.hlat`` (operations.py) --> pointwise.c
--no---> the formulas in torch of pointwise.py and loss.py
"""

import torch

from hlat.model.kernels import operations as operations  # registers the operators
from hlat.model.kernels.library import DTYPES, begin, is_available
from hlat.model.kernels.library import library as compiled_library
from hlat.runtime.backend import backend_of, find_device_type
from hlat.runtime.distributed import in_fake_world

__all__ = ["are_used_on", "begin_compilation", "describe_kernels", "has_kernels"]


def begin_compilation() -> None:
    """Compile the operators in the background, if models on this machine's devices compute with them.

    A process that is going to train calls this early, so that the compiler runs while the process imports modules.
    """
    if backend_of(find_device_type("auto")).fused_pointwise:
        begin()


def has_kernels(x: torch.Tensor) -> bool:
    """Return True if the operators compute with tensors of this device and dtype.

    Not for code that ``torch.compile`` traces: a compiler fuses the plain formulas itself.
    """
    return x.dtype in DTYPES and are_used_on(x.device)


def are_used_on(device: torch.device) -> bool:
    """Return True if eager models compute with the operators on a device, in the dtypes that these have."""
    return backend_of(device).fused_pointwise and is_available()


def describe_kernels(device: torch.device) -> str:
    """Name what computes norms, RoPE, SwiGLU and loss of eager models on a device, for messages and checkpoints.

    Computations with the same name have the same bits: it has the compiler and the instructions of the kernels, except
    in a rehearsal, which compiles nothing.
    """
    if not are_used_on(device):
        return "torch"
    compiled = None if in_fake_world() else compiled_library()
    return "fused C kernels" if compiled is None else f"fused C kernels ({compiled.build})"
