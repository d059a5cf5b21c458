"""Devices and the libraries below PyTorch: the only code that knows device types."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.runtime.backend.base import ONEDNN, TORCH, AttentionHeads, AttentionKernel, Backend
    from hlat.runtime.backend.compile_cache import (
        compile_cache_folders,
        damaged_code_error,
        open_compile_cache,
        use_compile_cache,
    )
    from hlat.runtime.backend.device import (
        PRODUCTS,
        accelerator_in_use,
        choose_device,
        configure_numerics,
        device_error,
        find_device_type,
        has_fast_bf16,
        is_on_host,
        linear_by_onednn,
        peak_memory_bytes,
        select_device,
        synchronize,
    )
    from hlat.runtime.backend.openmp import ProcessorTime, set_spin_count
    from hlat.runtime.backend.settings import restored_settings
    from hlat.runtime.backend.table import (
        BACKENDS,
        OTHER_DEVICE_NAMES,
        absent_device,
        backend_of,
        driver_versions,
        expects_accelerator,
        interface_variables,
        is_device_file,
        is_simulated,
        simulated_backend,
        types_with,
    )
    from hlat.runtime.backend.torch_private import (
        untested_torch_warning,
    )

__getattr__ = lazily(
    __name__,
    {
        "compile_cache": (
            "compile_cache_folders",
            "damaged_code_error",
            "open_compile_cache",
            "use_compile_cache",
        ),
        "base": ("ONEDNN", "TORCH", "AttentionHeads", "AttentionKernel", "Backend"),
        "device": (
            "PRODUCTS",
            "accelerator_in_use",
            "choose_device",
            "configure_numerics",
            "device_error",
            "find_device_type",
            "has_fast_bf16",
            "is_on_host",
            "linear_by_onednn",
            "peak_memory_bytes",
            "select_device",
            "synchronize",
        ),
        "openmp": (
            "ProcessorTime",
            "set_spin_count",
        ),
        "settings": ("restored_settings",),
        "table": (
            "BACKENDS",
            "OTHER_DEVICE_NAMES",
            "absent_device",
            "backend_of",
            "driver_versions",
            "expects_accelerator",
            "interface_variables",
            "is_device_file",
            "is_simulated",
            "simulated_backend",
            "types_with",
        ),
        "torch_private": ("untested_torch_warning",),
    },
)

__all__ = [
    "BACKENDS",
    "ONEDNN",
    "OTHER_DEVICE_NAMES",
    "PRODUCTS",
    "TORCH",
    "AttentionHeads",
    "AttentionKernel",
    "Backend",
    "ProcessorTime",
    "absent_device",
    "accelerator_in_use",
    "backend_of",
    "choose_device",
    "compile_cache_folders",
    "configure_numerics",
    "damaged_code_error",
    "device_error",
    "driver_versions",
    "expects_accelerator",
    "find_device_type",
    "has_fast_bf16",
    "interface_variables",
    "is_device_file",
    "is_on_host",
    "is_simulated",
    "linear_by_onednn",
    "open_compile_cache",
    "peak_memory_bytes",
    "restored_settings",
    "select_device",
    "set_spin_count",
    "simulated_backend",
    "synchronize",
    "types_with",
    "untested_torch_warning",
    "use_compile_cache",
]
