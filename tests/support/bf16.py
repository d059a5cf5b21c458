"""CPUs with bf16 instructions and without: plans are for the first kind, and a test may run on the second."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from hlat.model.kernels import matmul
from hlat.precision import MODES
from hlat.runtime.backend.cpu import BACKEND, CpuBackend


@contextmanager
def bf16_instructions() -> Iterator[None]:
    """Compute within the block as on a CPU that multiplies bf16 numbers; others widen operands for a moment."""
    with (
        patch.object(CpuBackend, "has_fast_bf16", lambda self, device: True),
        patch.object(matmul, "_EMULATE_BF16", ""),
    ):
        yield


def widens(mode: str) -> bool:
    """Return True if this machine's CPU widens the operands of products in a precision mode."""
    compute = MODES[mode].compute
    return BACKEND.product_dtype(compute) != compute
