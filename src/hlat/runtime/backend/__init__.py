"""Devices and the libraries below PyTorch: the only code that knows device types."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.runtime.backend.allocator import keep_freed_memory
    from hlat.runtime.backend.device import (
        accelerator_in_use,
        choose_device,
        configure_numerics,
        has_fast_bf16,
        is_on_host,
        nondeterministic_kernel_error,
        peak_memory_bytes,
        sum_dtype,
        synchronize,
    )
    from hlat.runtime.backend.openmp import ProcessorTime, set_spin_count
    from hlat.runtime.backend.settings import restored_settings
    from hlat.runtime.backend.table import BACKENDS, backend_of, interface_variables, types_with
    from hlat.runtime.backend.torch_private import untested_torch_warning

__getattr__ = lazily(
    __name__,
    {
        "allocator": ("keep_freed_memory",),
        "device": (
            "accelerator_in_use",
            "choose_device",
            "configure_numerics",
            "has_fast_bf16",
            "is_on_host",
            "nondeterministic_kernel_error",
            "peak_memory_bytes",
            "sum_dtype",
            "synchronize",
        ),
        "openmp": (
            "ProcessorTime",
            "set_spin_count",
        ),
        "settings": ("restored_settings",),
        "table": (
            "BACKENDS",
            "backend_of",
            "interface_variables",
            "types_with",
        ),
        "torch_private": ("untested_torch_warning",),
    },
)

__all__ = [
    "BACKENDS",
    "ProcessorTime",
    "accelerator_in_use",
    "backend_of",
    "choose_device",
    "configure_numerics",
    "has_fast_bf16",
    "interface_variables",
    "is_on_host",
    "keep_freed_memory",
    "nondeterministic_kernel_error",
    "peak_memory_bytes",
    "restored_settings",
    "set_spin_count",
    "sum_dtype",
    "synchronize",
    "types_with",
    "untested_torch_warning",
]
