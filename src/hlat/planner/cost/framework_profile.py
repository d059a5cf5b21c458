"""Software profile of hlat: its kernels, overlap of communication, and dtypes of messages."""

from functools import lru_cache

from hlat.config.sections import compile_obstacle
from hlat.planner.memory import has_fused_kernels
from hlat.planner.problem import (
    CHIP_FAMILIES,
    FLASH_ATTENTION_1,
    FLASH_ATTENTION_2,
    FLASH_ATTENTION_3,
    FUSED_LOSS_BYTES,
    Candidate,
    PlanRequest,
    SoftwareProfile,
)
from hlat.precision import MODES


def hlat_profile(request: PlanRequest, candidate: Candidate) -> SoftwareProfile:
    """Profile of hlat on the request's cluster in this layout (docs/limits.md, docs/parallelism.md)."""
    return _software(
        request.cluster.chip.family or "measured",
        has_fused_kernels(request.cluster.chip),
        not compile_obstacle(candidate.pipeline, candidate.schedule),
        candidate.zero > 0,
        request.mode == "fp8",
        # In units of 16-bit products: for 32-bit products, rates are halved instead (devices.py).
        MODES[request.mode].reduction.itemsize * 2 // MODES[request.mode].compute.itemsize,
    )


_LOSS_BYTES = 44.0
"""Memory traffic of hlat's loss per logit where no compiler and no kernel fuses it (model/loss.py): conversion to fp32
6 bytes, largest logit 4, subtraction, exponentials and their product with a factor 8 each, sum 4, conversion 6."""
_KERNEL_LOSS_BYTES = 6.0
"""Memory traffic of its kernels (model/kernels/operations_triton.py): they read logits twice and overwrite them."""


@lru_cache
def _software(
    family: str, has_kernels: bool, compilable: bool, zero: bool, eight_bit: bool, gradient_bytes: int
) -> SoftwareProfile:
    compiled = CHIP_FAMILIES[family].compiled
    eager_kernel = FLASH_ATTENTION_1 if CHIP_FAMILIES[family].first_kernels else FLASH_ATTENTION_2
    return SoftwareProfile(
        attention=FLASH_ATTENTION_3 if compiled else eager_kernel,
        fused=compiled or compilable or has_kernels,
        # Without kernels, norms and rotations are sequences of torch's operations (model/pointwise.py).
        composed=not compiled and not compilable and not has_kernels,
        eager=not compiled and not compilable,
        # Tensor-parallel collectives, and the all-reduce of ZeRO 0, do not overlap with computation.
        overlaps_tensor=False,
        overlaps_data=zero,
        eight_bit=eight_bit,
        # As torch.utils.checkpoint does. Compilers remove more: see the constant `recomputed` of their families.
        early_stop=not compiled,
        gradient_bytes=gradient_bytes,
        gathers_blocks=True,
        balances_stages=True,
        loss_bytes=FUSED_LOSS_BYTES if compiled else _KERNEL_LOSS_BYTES if has_kernels else _LOSS_BYTES,
        # Only blocks are compiled on GPUs, not the head.
        pads_rows=compiled,
        adds_apart=not compiled,
    )
