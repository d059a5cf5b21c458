"""NVIDIA GPUs, and those of AMD, which torch calls cuda too."""

import os
from pathlib import Path

import torch

from hlat.runtime.backend.base import FLEX, Backend, Collectives

DRIVER = Path("/proc/driver/nvidia/version")  # "NVRM version: NVIDIA UNIX ...  550.54.15  Tue ..."
_FIRST_WITH_BF16 = (8, 0)  # NVIDIA Ampere; AMD GPUs that torch supports report (9, 0) or more
_FIRST_WITH_FP8 = (8, 9)  # NVIDIA Ada and Hopper have fp8 tensor cores


class CudaBackend(Backend):
    """GPUs with CUDA or ROCm."""

    collectives = Collectives("nccl", interface_variable="NCCL_SOCKET_IFNAME")
    visible_devices_variable = "CUDA_VISIBLE_DEVICES"
    pins_memory = True
    fused_adamw = True
    rounding_kernel = "triton"
    document_kernel = FLEX
    float64 = True

    def configure_products(self, deterministic: bool) -> None:
        """Forbid cuBLAS to add partial sums in 16 bits, and fix its workspace for the same bits each time."""
        # By default cuBLAS may accumulate partial sums of a 16-bit product in 16 bits.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        if deterministic:
            # cuBLAS needs a fixed workspace to give the same bits each time (PyTorch notes on reproducibility).
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    def has_fast_bf16(self, device: torch.device) -> bool:
        """Return True from NVIDIA Ampere on."""
        return compute_capability(device) >= _FIRST_WITH_BF16

    def product_format(self, dtype: torch.dtype) -> str:
        """Return the number format of products: ``tf32`` for float32 if torch is set to use it."""
        if dtype == torch.float32:
            setting = torch.backends.cuda.matmul.fp32_precision
            if setting == "none":  # not set for matmul: the global setting applies
                setting = torch.backends.fp32_precision  # type: ignore[attr-defined]
            if setting == "tf32":
                return "tf32"
        return super().product_format(dtype)

    def fp8_refusal(self, device: torch.device) -> str:
        """Return the reason why the device has no fp8 products; empty from NVIDIA Ada on."""
        capability = compute_capability(device)
        if capability >= _FIRST_WITH_FP8:
            return ""
        needed = "needs an NVIDIA GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell)"
        return f"{needed}, this one has {'.'.join(map(str, capability))}"

    def compile_refusal(self, compute: torch.dtype, flops: float, world: int) -> str:
        """Return an empty string: compiled blocks are faster on GPUs, whatever the run."""
        return ""

    def software(self) -> dict[str, str]:
        """Return the versions of the driver, of CUDA (or ROCm) and of NCCL (or RCCL)."""
        found = {
            "cuda": str(torch.version.cuda or torch.version.hip),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
        try:
            lines = DRIVER.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:  # not NVIDIA's
            return found
        numbers = [word for word in lines[0].split() if word[0].isdigit() and "." in word] if lines else []
        return {**found, "driver": numbers[0]} if numbers else found

    def pin_memory(self, memory: torch.Tensor, device: torch.device) -> bool:
        """Register host memory with the driver."""
        with torch.cuda.device(device):  # a new thread starts on device 0
            return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0

    def unpin_memory(self, memory: torch.Tensor, device: torch.device) -> None:
        """Undo a successful ``pin_memory`` before the memory is freed."""
        with torch.cuda.device(device):
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of an NVIDIA GPU: (8, 9) is Ada, (9, 0) Hopper."""
    return torch.cuda.get_device_capability(device)


BACKEND = CudaBackend("cuda")
