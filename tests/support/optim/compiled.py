"""Compile Triton kernels for GPUs that this machine does not have, exactly as a call on one would.

with compiling(80) as kernels:          # compute capability 8.0
    adamw_triton.update(...)            # on CPU tensors; nothing is launched
kernels[0].asm["ptx"], kernels[0].asm["cubin"]
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

_WARP, _AMD_WARP = 32, 64  # threads


class _AbsentGpu:
    """Driver of a GPU of a compute capability or architecture, as much of it as compilation asks for."""

    def __init__(self, capability: int | str) -> None:
        self._capability = capability

    def get_current_device(self) -> int | str:
        return self._capability  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        if isinstance(self._capability, str):
            return GPUTarget("hip", self._capability, _AMD_WARP)
        return GPUTarget("cuda", self._capability, _WARP)


@contextmanager
def compiling(capability: int | str) -> Iterator[list[Any]]:
    """Inside the block, compile launched kernels for a GPU instead of launching them; yield those compiled so far.

    Each has the specialisation that Triton makes for the arguments: types, alignment, values of 1.

    Args:
        capability: compute capability of the GPU, such as 90; of AMD's the architecture, such as "gfx942".
    """
    compiled: list[Any] = []
    original = JITFunction.run

    def run(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = original(self, *arguments, grid=grid, warmup=True, **options)
        compiled.append(kernel)
        return kernel

    before = driver._active  # its reset_active asks for a real driver
    driver.set_active(_AbsentGpu(capability))
    JITFunction.run = run
    try:
        yield compiled
    finally:
        JITFunction.run = original
        driver.set_active(before)
