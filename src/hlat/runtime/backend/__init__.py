"""The device and the libraries below PyTorch: the only code that looks at a device type."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.runtime.backend.allocator import keep_freed_memory
    from hlat.runtime.backend.device import (
        accelerator_in_use,
        choose_device,
        compute_capability,
        configure_numerics,
        describe_device,
        has_fast_bf16,
        nondeterministic_kernel_error,
        peak_memory_bytes,
        pin_memory,
        synchronize,
        unpin_memory,
    )
    from hlat.runtime.backend.openmp import ProcessorTime, set_spin_count
    from hlat.runtime.backend.torch_private import untested_torch_warning

__getattr__ = lazily(
    __name__,
    {
        "allocator": ("keep_freed_memory",),
        "device": (
            "choose_device",
            "compute_capability",
            "describe_device",
            "has_fast_bf16",
            "accelerator_in_use",
            "peak_memory_bytes",
            "pin_memory",
            "nondeterministic_kernel_error",
            "configure_numerics",
            "synchronize",
            "unpin_memory",
        ),
        "openmp": (
            "ProcessorTime",
            "set_spin_count",
        ),
        "torch_private": ("untested_torch_warning",),
    },
)

__all__ = [
    "ProcessorTime",
    "accelerator_in_use",
    "choose_device",
    "compute_capability",
    "configure_numerics",
    "describe_device",
    "has_fast_bf16",
    "keep_freed_memory",
    "nondeterministic_kernel_error",
    "peak_memory_bytes",
    "pin_memory",
    "set_spin_count",
    "synchronize",
    "unpin_memory",
    "untested_torch_warning",
]
