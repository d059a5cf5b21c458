"""NVIDIA GPUs, and those of AMD, which torch calls cuda too.

    vendor, compute capability
        -> GpuCapabilities: has("bf16"), has("fp8"), ..., kernel of attention, reasons against fp8 and compiling
        -> CudaBackend: what torch can do on the GPUs of this process

The capabilities are one table, a pure function of vendor and compute capability. On builds for AMD, torch reports the
number of the architecture as compute capability: (9, 0) is an MI200 (gfx90a) there and a Hopper on builds for NVIDIA.
It does not tell gfx906 and gfx908 from gfx90a, which count as the latter.

Sources, read in November 2026:

- bf16: ``torch.cuda.is_bf16_supported(including_emulation=False)``; AMD, "Data types and precision support" of ROCm:
  matrix cores from CDNA on, WMMA from RDNA 3 on.
- tf32: ``torch.cuda.is_tf32_supported``.
- fp8: ``_scaled_mm_allowed_device`` in torch's ScaledBlas.cpp. AMD: gfx942 multiplies other formats (e4m3fnuz), gfx950
  and RDNA 4 those of NVIDIA; hlat has not been tried on any, so that all are refused.
- triton: ``CudaInterface.is_triton_capable`` in torch/_dynamo/device_interface.py.
- attention: ``select_sdp_backend`` in torch's transformers/cuda/sdp_utils.cpp. AMD: the architectures of
  ``evaluate_platform_supports_flash_attention`` in torch/testing/_internal/common_cuda.py.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hlat.runtime.backend.base import FLEX, AllocatorUse, AttentionHeads, Backend, Collectives, Compiler
from hlat.runtime.backend.faults import HangLimits
from hlat.runtime.backend.table import driver_versions
from hlat.runtime.version import installed_version

Capability = tuple[int, int]  # compute capability: (8, 9) is Ada, (9, 0) Hopper; on AMD (9, 4) is an MI300

NVIDIA, AMD = "nvidia", "amd"
LATEST: Capability = (99, 9)

_RANGES: dict[str, dict[str, tuple[tuple[Capability, Capability], ...]]] = {
    # feature -> vendor -> first and last compute capability that has it
    "bf16": {NVIDIA: (((8, 0), LATEST),), AMD: (((9, 0), (9, 9)), ((11, 0), LATEST))},
    "tf32": {NVIDIA: (((8, 0), LATEST),), AMD: (((9, 4), (9, 5)),)},
    "fp8": {NVIDIA: (((8, 9), LATEST),), AMD: ()},
    "triton": {NVIDIA: (((7, 0), LATEST),), AMD: (((0, 0), LATEST),)},
    "flash": {NVIDIA: (((8, 0), (12, 1)),), AMD: (((9, 0), (9, 5)), ((11, 0), (11, 0)), ((12, 0), (12, 0)))},
    "efficient": {NVIDIA: (((5, 0), (12, 1)),), AMD: (((9, 0), (9, 5)), ((11, 0), (11, 0)), ((12, 0), (12, 0)))},
    # where torch tries cuDNN before flash attention, with cuDNN 9.15.1 or later
    "cudnn": {NVIDIA: (((9, 0), (9, 0)), ((10, 0), (10, 0)), ((10, 3), (10, 3))), AMD: ()},
    # flash attention has no backward pass for heads of 193 to 224 elements
    "flash_gap": {NVIDIA: (((8, 6), (8, 9)), ((12, 0), (12, 1))), AMD: ()},
}


@dataclass(frozen=True)
class GpuCapabilities:
    """Capabilities of GPUs of one vendor and compute capability."""

    vendor: str  # "nvidia" or "amd"
    capability: Capability  # as torch reports it

    def has(self, feature: str) -> bool:
        """Return True if the GPU has a feature of the table ``_RANGES``."""
        return any(first <= self.capability <= last for first, last in _RANGES[feature][self.vendor])

    @property
    def number(self) -> str:
        return ".".join(map(str, self.capability))

    @property
    def fp8_refusal(self) -> str:
        if self.has("fp8"):
            return ""
        if self.vendor == AMD:
            return (
                "fp8 is supported on NVIDIA GPUs only: of AMD's, MI200 has no fp8, MI300 has other number formats "
                "(fnuz), and none was tried"
            )
        needed = "needs an NVIDIA GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell)"
        return f"{needed}, this one has {self.number}"

    @property
    def compile_obstacle(self) -> str:
        if self.has("triton"):
            return ""
        return f"Triton needs a GPU of compute capability 7.0 or later (Volta), this one has {self.number}"

    def attention_kernel(self, heads: AttentionHeads, deterministic: bool) -> str:
        """Return torch's choice for causal attention without a mask, as in ``AttentionKernel.name``."""
        # torch's deterministic mode does not allow cuDNN's attention.
        if self.has("cudnn") and not deterministic and self._fits_cudnn(heads):
            return "cudnn_attention"
        if self.has("flash") and self._fits_flash(heads):
            return "flash_attention"
        if self.has("efficient") and self._fits_efficient(heads):
            return "efficient_attention"
        return "math"

    def _fits_cudnn(self, heads: AttentionHeads) -> bool:
        widest = 256 if self.capability == (9, 0) else 128
        return heads.is_16_bit and heads.head_dim <= widest and heads.head_dim % 8 == 0

    def _fits_flash(self, heads: AttentionHeads) -> bool:
        if not heads.is_16_bit or heads.head_dim > self._widest_flash:
            return False
        return not (self.has("flash_gap") and 192 < heads.head_dim <= 224)

    @property
    def _widest_flash(self) -> int:
        # AMD's kernels (AOTriton), efficient attention too, have 256 on RDNA 3.
        return 512 if self.vendor == AMD and self.capability[0] != 11 else 256

    def _fits_efficient(self, heads: AttentionHeads) -> bool:
        if heads.grouped or heads.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return False
        if heads.dtype == torch.bfloat16 and not self.has("bf16"):
            return False
        if self.vendor == AMD and heads.head_dim > self._widest_flash:
            return False
        return heads.head_dim % self._alignment(heads) == 0

    def _alignment(self, heads: AttentionHeads) -> int:
        # With tensor cores a head is a multiple of 16 bytes.
        first_with_tensor_cores = (7, 0) if heads.is_16_bit else (8, 0)
        if self.vendor == NVIDIA and self.capability < first_with_tensor_cores:
            return 1
        return 8 if heads.is_16_bit else 4


_LOG = logging.getLogger(__name__)

_ALLOCATOR = "PYTORCH_ALLOC_CONF"
_ALLOCATOR_NAMES = (_ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF")  # torch reads either, and the second first
_PINNED_AT_ONCE = 1 << 30  # bytes
_WORKSPACE, _FIXED_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"  # 8 buffers of 4096 KiB


class CudaBackend(Backend):
    """GPUs with CUDA or ROCm."""

    collectives = Collectives("nccl", interface_variable="NCCL_SOCKET_IFNAME")
    visible_devices_variable = "CUDA_VISIBLE_DEVICES"
    pins_memory = True
    fused_adamw = True
    scales_in_adamw = True
    has_graphs = True
    rounding_kernel = "triton"
    pointwise_kernels = "triton"
    document_kernel = FLEX
    # The compilers that Triton looks for (triton/runtime/build.py). Its launchers include Python.h.
    compiler: Compiler | None = Compiler("C", ("gcc", "clang"), "CC", "gcc", needs_headers=True)
    # In deterministic mode their backward passes add in a fixed order (FlashAttention 2 and 3). What that costs the
    # memory-efficient kernel is not known: it counts as equally fast.
    _slowed_attention = frozenset(("flash_attention", "flash_attention_3", "flash_attention_4"))
    float64 = True
    # Triton's own variable too: hlat's kernels are compiled by Triton, without inductor.
    compile_cache = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}

    def __init__(self, device_type: str, chip: GpuCapabilities | None = None) -> None:
        super().__init__(device_type)
        self._chip = chip
        self._has_set_workspace = False
        if chip is not None:
            self.compiler = None  # where that GPU is, which is not this machine

    def of_chip(self, vendor: str, capability: tuple[int, int] | None) -> "CudaBackend":
        assert capability is not None, "the catalog has one for every chip of this device type"
        return CudaBackend(self.device_type, GpuCapabilities(vendor, capability))

    def configure_process(self) -> None:
        # Segments that grow do not fragment: blocks of many sizes, such as those of ZeRO 3, leave gaps that no later
        # block fits into. torch reads the variable at the first allocation, and ignores it where the driver cannot. Not
        # measured.
        if gpu_vendor() == NVIDIA and not any(name in os.environ for name in _ALLOCATOR_NAMES):
            os.environ[_ALLOCATOR] = "expandable_segments:True"

    def configure_collectives(self, limits: HangLimits) -> None:
        # torch's flight recorder writes a dump when a collective times out, and when something is written to its pipe.
        # Not tried on a device. torch 2.11 and later know two names for the prefix of dumps.
        settings = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
        if limits.dumps is not None:
            settings |= dict.fromkeys(("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), str(limits.dumps))
        if limits.requests is not None:
            settings["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = str(limits.requests)
        if limits.patience is not None:  # limit of the thread that watches torch's own watchdog: 8 minutes by default
            settings["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] = str(int(limits.patience.total_seconds()))
        for name, value in settings.items():
            # A value of the user's stays.
            os.environ.setdefault(name, value)

    def record(self, work: Callable[[], None]) -> Callable[[], object]:
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # The graph keeps the memory that the work has allocated.
            with torch.cuda.graph(graph):
                work()
        except RuntimeError as error:  # a capture does no work, so nothing is lost
            torch.cuda.set_stream(before)  # torch 2.11 stays on the stream of a failed capture
            reason = error.__context__ or error
            _LOG.warning("CUDA cannot record this work, which is launched anew each time: %s", reason)
            return work
        return graph.replay

    def configure_products(self, deterministic: bool) -> None:
        # By default cuBLAS may accumulate partial sums of a 16-bit product in 16 bits.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        # cuBLAS needs a fixed workspace to give the same bits each time (PyTorch notes on reproducibility). torch reads
        # the variable at the first product: run.deterministic=auto, set like true at the start, is settled before.
        if deterministic and _WORKSPACE not in os.environ:
            os.environ[_WORKSPACE], self._has_set_workspace = _FIXED_WORKSPACE, True
        elif not deterministic and self._has_set_workspace and os.environ.get(_WORKSPACE) == _FIXED_WORKSPACE:
            del os.environ[_WORKSPACE]

    def _capabilities(self, device: torch.device) -> GpuCapabilities:
        return self._chip or GpuCapabilities(gpu_vendor(), compute_capability(device))

    def has_fast_bf16(self, device: torch.device) -> bool:
        return self._capabilities(device).has("bf16")

    def product_format(self, dtype: torch.dtype) -> str:
        if dtype == torch.float32:
            setting = torch.backends.cuda.matmul.fp32_precision
            if setting == "none":  # not set for matmul: the global setting applies
                setting = torch.backends.fp32_precision  # type: ignore[attr-defined]
            # With it torch computes products of float32 in tf32.
            if setting == "tf32":
                return "tf32"
        return super().product_format(dtype)

    def fp8_refusal(self, device: torch.device) -> str:
        return self._capabilities(device).fp8_refusal

    def compile_refusal(self, compute: torch.dtype, flops: float, world: int, device: torch.device) -> str:
        # Where Triton has the dtype, compiled blocks are faster, whatever the length of the run.
        found = self._capabilities(device)
        if found.compile_obstacle:
            return found.compile_obstacle
        if compute == torch.bfloat16 and not found.has("bf16"):
            return f"Triton has no bf16 below compute capability 8.0, and this GPU has {found.number}"
        return ""

    def compiler_versions(self, device: torch.device) -> dict[str, str]:
        toolkit = str(torch.version.cuda or torch.version.hip)
        return super().compiler_versions(device) | {"CUDA or ROCm": toolkit, "Triton": installed_version("triton")}

    def compile_obstacle(self, device: torch.device) -> str:
        return self._capabilities(device).compile_obstacle

    def _expected_attention(self, heads: AttentionHeads, deterministic: bool, device: torch.device) -> str:
        return self._capabilities(device).attention_kernel(heads, deterministic)

    def software(self) -> dict[str, str]:
        found = {
            "cuda": str(torch.version.cuda or torch.version.hip),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
        driver = driver_versions().get(self.device_type)  # None: not NVIDIA's
        return found if driver is None else {**found, "driver": driver}

    def allocator_use(self, device: torch.device) -> AllocatorUse:
        statistics = torch.cuda.memory_stats(device)
        return AllocatorUse(statistics.get("reserved_bytes.all.peak", 0), statistics.get("num_alloc_retries", 0))

    def pin_memory(self, memory: torch.Tensor, device: torch.device) -> bool:
        # In pieces: other calls to the driver may wait until a piece is done. All of the memory is registered or
        # nothing, so a copy may cross pieces (cudaMemcpyAsync).
        with torch.cuda.device(device):  # a new thread starts on device 0
            pieces = _pieces(memory)
            for number, (address, size) in enumerate(pieces):
                if int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) != 0:
                    _unregister(pieces[:number])
                    return False
        return True

    def unpin_memory(self, memory: torch.Tensor, device: torch.device) -> None:
        with torch.cuda.device(device):
            _unregister(_pieces(memory))


def _pieces(memory: torch.Tensor) -> list[tuple[int, int]]:
    begin, size = memory.data_ptr(), memory.nbytes
    return [(begin + at, min(_PINNED_AT_ONCE, size - at)) for at in range(0, size, _PINNED_AT_ONCE)]


def _unregister(pieces: list[tuple[int, int]]) -> None:
    for address, _ in pieces:
        torch.cuda.cudart().cudaHostUnregister(address)


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability as torch reports it: (8, 9) is Ada, (9, 0) Hopper, or MI200 on builds for AMD."""
    return torch.cuda.get_device_capability(device)


def gpu_vendor() -> str:
    """Vendor of the GPUs that this build of torch is for."""
    return AMD if torch.version.hip else NVIDIA


BACKEND = CudaBackend("cuda")
