"""The C source of the fused kernels, for processes that have not imported torch yet.

Compiling takes a second of one core, and so does importing torch, which comes before anything that uses the kernels.
"""

from pathlib import Path

from hlat.runtime.backend.c_library import begin_compiling
from hlat.runtime.backend.table import expects_accelerator

KERNEL_SOURCE = Path(__file__).with_name("kernels.c")
"""File in C11 with the functions that ``library.py`` calls."""
KERNEL_FLAGS = ("-ffp-contract=fast", "-Wno-psabi")
"""Flags of the compiler. Contracted products and sums are exacter; vectors pass between inlined functions only."""


_PROCESSORS = Path("/proc/cpuinfo")


def begin_compilation(device: str) -> None:
    """Start to compile the kernels in the background, if a run on this machine is likely to compute with them.

    That is decided for good once torch is there (``are_used_on``).

    Args:
        device: ``run.device`` of the recipe, a device type or auto.
    """
    if not expects_accelerator(device) and _has_vectors():
        begin_compiling(KERNEL_SOURCE, KERNEL_FLAGS)


def _has_vectors() -> bool:
    """Return True if Linux says that this machine's processors have AVX-512 or AVX2, which the kernels are for."""
    try:
        features = set(_PROCESSORS.read_text(encoding="utf-8", errors="replace").split())
    except OSError:
        return False
    return "avx512f" in features or features >= {"avx2", "fma"}
