"""Capabilities of GPUs that torch calls cuda: one table by vendor and compute capability, a pure function of the two.

    vendor, compute capability -> has("bf16"), has("fp8"), ... -> kernel of attention, reasons against fp8 and compiling

On builds for AMD, torch reports the number of the architecture as compute capability: (9, 0) is an MI200 (gfx90a)
there and a Hopper on builds for NVIDIA. It does not tell gfx906 and gfx908 from gfx90a, which count as the latter.

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

from dataclasses import dataclass

import torch

from hlat.runtime.backend.base import AttentionHeads

Capability = tuple[int, int]
"""Compute capability: (8, 9) is Ada, (9, 0) Hopper; on AMD (9, 4) is an MI300."""

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
    """Capabilities of GPUs of one vendor and compute capability.

    Attributes:
        vendor: "nvidia" or "amd".
        capability: as torch reports it.
    """

    vendor: str
    capability: Capability

    def has(self, feature: str) -> bool:
        """Return True if the GPU has a feature of the table."""
        return any(first <= self.capability <= last for first, last in _RANGES[feature][self.vendor])

    @property
    def number(self) -> str:
        """Compute capability as text, such as 8.9."""
        return ".".join(map(str, self.capability))

    @property
    def fp8_refusal(self) -> str:
        """Reason why hlat's fp8 products do not run, without a full stop; empty if they do."""
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
        """Reason why torch.compile cannot build kernels, without a full stop; empty if it can."""
        if self.has("triton"):
            return ""
        return f"Triton needs a GPU of compute capability 7.0 or later (Volta), this one has {self.number}"

    def attention_kernel(self, heads: AttentionHeads, deterministic: bool) -> str:
        """Return the kernel that torch chooses for causal attention, forward and backward, without a mask.

        Args:
            heads: heads of the attention.
            deterministic: True if torch's deterministic mode is on, in which cuDNN's attention is not allowed.

        Returns:
            A name of ``torch.nn.attention.SDPBackend`` in lower case.
        """
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
        """Largest head of flash attention; AMD's kernels (AOTriton), efficient attention too, have 256 on RDNA 3."""
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
        """Elements of which a head has to be a multiple: 16 bytes where tensor cores are used."""
        first_with_tensor_cores = (7, 0) if heads.is_16_bit else (8, 0)
        if self.vendor == NVIDIA and self.capability < first_with_tensor_cores:
            return 1
        return 8 if heads.is_16_bit else 4
