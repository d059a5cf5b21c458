"""The C source of the fused kernels, for processes that have not imported torch yet.

Compiling takes a second of one core, and so does importing torch, which comes before anything that uses the kernels.
"""

from pathlib import Path

from hlat.runtime.backend.c_library import begin_compiling
from hlat.runtime.backend.table import expects_accelerator

KERNEL_SOURCE = Path(__file__).with_name("kernels.c")  # file in C11 with the functions that ``library.py`` calls
# Contracted products and sums are exacter. Vectors pass between inlined functions only, so psABI warnings do not matter
KERNEL_FLAGS = ("-ffp-contract=fast", "-Wno-psabi")


_PROCESSORS = Path("/proc/cpuinfo")


def begin_compilation(device: str) -> None:
    """Start to compile the kernels in the background, if a run on ``run.device`` is likely to compute with them."""
    # Only likely: the decision comes with torch (are_used_on).
    if not expects_accelerator(device) and _has_vectors():
        begin_compiling(KERNEL_SOURCE, KERNEL_FLAGS)


def _has_vectors() -> bool:
    # The kernels are for AVX-512 or AVX2 with FMA. Other systems than Linux have no such file.
    try:
        features = set(_PROCESSORS.read_text(encoding="utf-8", errors="replace").split())
    except OSError:
        return False
    return "avx512f" in features or features >= {"avx2", "fma"}
