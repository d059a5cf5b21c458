"""The device and the libraries under PyTorch: the only code that looks at a device type."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.runtime.backend.allocator import keep_freed_memory
    from hlat.runtime.backend.device import (
        choose_device,
        compute_capability,
        describe,
        has_fast_bf16,
        is_in_use,
        peak_memory_bytes,
        pin,
        refused_kernel,
        set_arithmetic,
        synchronize,
        unpin,
    )
    from hlat.runtime.backend.openmp import ProcessorTime, set_spin_count
    from hlat.runtime.backend.torch_private import untested_torch

__getattr__ = lazily(
    __name__,
    {
        "allocator": ("keep_freed_memory",),
        "device": (
            "choose_device",
            "compute_capability",
            "describe",
            "has_fast_bf16",
            "is_in_use",
            "peak_memory_bytes",
            "pin",
            "refused_kernel",
            "set_arithmetic",
            "synchronize",
            "unpin",
        ),
        "openmp": (
            "ProcessorTime",
            "set_spin_count",
        ),
        "torch_private": ("untested_torch",),
    },
)

__all__ = [
    "ProcessorTime",
    "choose_device",
    "compute_capability",
    "describe",
    "has_fast_bf16",
    "is_in_use",
    "keep_freed_memory",
    "peak_memory_bytes",
    "pin",
    "refused_kernel",
    "set_arithmetic",
    "set_spin_count",
    "synchronize",
    "unpin",
    "untested_torch",
]
