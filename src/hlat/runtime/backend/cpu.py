"""The CPU as a device: threads of the host, its memory, and the gloo library.

step n:      temporaries are freed --keep_freed_memory--> kept in the heap, not returned to the kernel
step n + 1:  temporaries of the same sizes <-- the heap, without a page fault
"""

import ctypes
import hashlib
import os
import platform
import resource
import sys
from pathlib import Path

import torch

from hlat.runtime.backend.base import TORCH, Backend, Collectives, Compiler, DocumentKernel
from hlat.runtime.backend.c_library import compiler_version, processor_fields
from hlat.runtime.terminal import plural

LONG_RUN = 4.5e14
"""FLOPs of a run per CPU thread of all its processes from which compiling pays: half an hour at 250 GFLOP/s.

Measured: 5 to 26 s of start-up for 1.01 to 1.02 times the speed of hlat's own kernels (docs/notebook/cpu-settings.md).
The decision depends on the recipe only, not on a measurement, so that a resumed run decides as the original run
did."""


_BF16_INSTRUCTIONS = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")


def pointwise_kernels() -> str:
    """Return the key of the kernels for this processor."""
    # The kernels are written for these instructions; elsewhere they were not measured.
    return "c" if torch.backends.cpu.get_cpu_capability() in ("AVX512", "AVX2") else TORCH


def fused_attention() -> bool:
    """Return True if compiled attention is used on this processor."""
    # torch's kernel uses AMX tiles; ours was not compared with that.
    return pointwise_kernels() != TORCH and not torch.cpu._is_amx_tile_supported()


class CpuBackend(Backend):
    """The processors of this machine."""

    collectives = Collectives("gloo", has_threads=False, interface_variable="GLOO_SOCKET_IFNAME")
    is_everywhere = True
    is_shared = True
    uses_host_threads = True
    fused_adamw = True
    rounding_kernel = "c"
    document_kernel = DocumentKernel("varlen", "flash_attention", is_compiled=False)
    materialises_masks = True
    compiler = Compiler("C++", ("g++", "clang++", "c++"), "CXX", "g++", needs_headers=True)
    float64 = True
    sums_norms_in_order = True
    has_integer_mv = True
    rounds_embedding_gradients = True
    # Constants, because every operation of a model asks for them
    pointwise_kernels = pointwise_kernels()
    fused_attention = fused_attention()
    packs_weights = torch.backends.mkldnn.is_available()  # oneDNN

    def device_count(self) -> int:
        return 1  # all processors count as one device

    def select(self, device: torch.device) -> None:
        """Do nothing: there is one device."""

    def synchronize(self, device: torch.device) -> None:
        """Do nothing: an operation has finished when it returns."""

    def is_initialized(self) -> bool:
        return False  # there is no driver

    def configure_process(self) -> None:
        keep_freed_memory()  # malloc allocates the tensors

    def has_fast_bf16(self, device: torch.device) -> bool:
        return any(getattr(torch.cpu, name, lambda: False)() for name in _BF16_INSTRUCTIONS)

    def product_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # torch multiplies bf16 numbers one by one where there are no instructions for them.
        emulated = dtype == torch.bfloat16 and not self.has_fast_bf16(torch.device(self.device_type))
        return torch.float32 if emulated else dtype

    def compile_refusal(self, compute: torch.dtype, flops: float, world: int, device: torch.device) -> str:
        if compute != torch.bfloat16 or not self.has_fast_bf16(torch.device(self.device_type)):
            return "little gain on a CPU without bf16 instructions or in fp32; run.compile=blocks forces it"
        if flops < LONG_RUN * torch.get_num_threads() * world:
            return "the run is too short to recover the compilation time; run.compile=blocks forces it"
        return ""

    def compiler_versions(self, device: torch.device) -> dict[str, str]:
        # Without the number of threads: the compiler has it in its cache's keys. Code is compiled against torch's
        # headers.
        versions = super().compiler_versions(device) | {"device": _processor()}
        return versions | {"C++ compiler": _compiler_version(self.compiler), "torch's folder": torch.__path__[0]}

    @property
    def fp32_by_onednn(self) -> bool:
        # On AMD's processors with AVX-512, MKL reaches half of oneDNN's speed (docs/notebook/speed.md).
        has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
        return self.packs_weights and has_avx512 and processor_fields().get("vendor_id") == "AuthenticAMD"

    def memory_bytes(self, device: torch.device) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def peak_memory_bytes(self, device: torch.device) -> int:
        status_file = Path("/proc/self/status")
        if status_file.is_file():
            # On Linux a child inherits getrusage's peak: a small process would report that of its launcher.
            status = status_file.read_text(encoding="ascii", errors="replace")
            return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere

    def describe(self, device: torch.device) -> str:
        return f"{self.device_type} ({plural(torch.get_num_threads(), 'thread')})"

    def chip_name(self, device: torch.device) -> str | None:
        return None  # the catalog has no CPUs: they are measured


def _processor() -> str:
    """Name of the processor and a hash of its instruction sets."""
    found = processor_fields()
    # Code is compiled for these (-march=native).
    features = found.get("flags") or found.get("Features") or platform.machine()
    digest = hashlib.sha256(" ".join(sorted(features.split())).encode()).hexdigest()[:8]
    return f"{found.get('model name') or platform.processor() or platform.machine()} (instructions {digest})"


def _compiler_version(compiler: Compiler | None) -> str:
    program = None if compiler is None else compiler.find()
    return "" if program is None else compiler_version(program).partition("\n")[0].strip()


BACKEND = CpuBackend("cpu")


# Parameters of mallopt(3), from malloc.h of the GNU C library.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

_MAPPED_FROM = 1 << 30  # bytes; larger blocks are mapped and unmapped separately
_OLD_LARGEST_MAPPED = 32 << 20  # bytes; the maximum of glibc before 2.35
_NEVER_TRIM = (1 << 31) - 1  # bytes; the maximum of mallopt


def keep_freed_memory() -> bool:
    """Make malloc keep freed memory, for the rest of this process; True if the C library accepted the settings."""
    # glibc maps each large block separately and returns it when it is freed: 65,000 page faults per step of a 33.6 M
    # model, as the temporaries of every step are mapped and zeroed again (docs/notebook/cpu-settings.md). The peak does
    # not change. Other C libraries, and replacements of malloc, have no such settings.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = bool(mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM))
    return kept and any(mallopt(_M_MMAP_THRESHOLD, size) for size in (_MAPPED_FROM, _OLD_LARGEST_MAPPED))
