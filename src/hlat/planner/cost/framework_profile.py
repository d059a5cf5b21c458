"""Software profile of hlat: its kernels, overlap of communication, and dtypes of messages."""

from dataclasses import dataclass
from functools import lru_cache

from hlat.planner.memory.rank_memory import has_fused_kernels
from hlat.planner.problem.execution import planned_execution
from hlat.planner.problem.families import CHIP_FAMILIES
from hlat.planner.problem.layouts import Candidate
from hlat.planner.problem.request import PlanRequest
from hlat.planner.problem.workload import (
    FLASH_ATTENTION_1,
    FLASH_ATTENTION_2,
    FLASH_ATTENTION_3,
    FUSED_LOSS_BYTES,
    MATERIALIZED_SCORES,
    SoftwareProfile,
)
from hlat.precision import MODES
from hlat.runtime.backend.base import AttentionKernel


def hlat_profile(request: PlanRequest, candidate: Candidate) -> SoftwareProfile:
    """Profile of hlat on the request's cluster in this layout (docs/limits.md, docs/parallelism.md)."""
    execution = planned_execution(request, candidate)
    return _software(
        request.cluster.chip.family or "measured",
        execution.attention,
        execution.compiled,
        has_fused_kernels(request.cluster.chip),
        candidate.zero > 0,
        request.mode == "fp8",
        # In units of 16-bit products: for 32-bit products, rates are halved instead (devices.py).
        MODES[request.mode].reduction.itemsize * 2 // MODES[request.mode].compute.itemsize,
    )


@dataclass(frozen=True)
class AttentionPrice:
    """Time of an attention kernel, by a kernel that published runs were fitted to.

    Attributes:
        kernel: that kernel, one of the four of ``SoftwareProfile.attention``.
        forward, backward: time of the passes, relative to it.
        slowed: time of the backward pass in deterministic mode, relative to it.
    """

    kernel: int
    forward: float = 1.0
    backward: float = 1.0
    slowed: float = 1.0


_PRICES = {
    # name of a kernel (``hlat.runtime.backend.base.AttentionKernel``) -> its price. One H100, causal, heads of 128, 8,192
    # tokens, forward and backward in TFLOP/s (flash-attention, pull request 1893): cuDNN 566, 470; FlashAttention 2
    # 306, and 166 deterministic; 3 660, 575, and 474 deterministic. The constants make 361, 290 of FlashAttention 2 and
    # 561, 450 of 3. Nobody has published how much determinism costs on other chips: the ratio is taken for all.
    "cudnn_attention": AttentionPrice(FLASH_ATTENTION_3),
    "flash_attention": AttentionPrice(FLASH_ATTENTION_2, slowed=1.75),
    "flash_attention_3": AttentionPrice(FLASH_ATTENTION_3, forward=0.85, backward=0.78, slowed=0.95),
    # PyTorch blog, FlexAttention (2024-08-07): 90 % of FlashAttention 2 forward, 85 % backward, deterministic as it is.
    "flex_attention within documents": AttentionPrice(FLASH_ATTENTION_2, forward=1 / 0.9, backward=1 / 0.85),
    # Memory-efficient attention of xFormers, priced as FlashAttention 1; what its deterministic mode costs is unknown.
    "efficient_attention": AttentionPrice(FLASH_ATTENTION_1),
    "math": AttentionPrice(MATERIALIZED_SCORES),
}


def _price(kernel: AttentionKernel | None, family: str) -> AttentionPrice:
    """Price of a kernel; where it has none, as of a chip's compiler, that of the kernels of the family's time."""
    eager = FLASH_ATTENTION_1 if CHIP_FAMILIES[family].first_kernels else FLASH_ATTENTION_2
    usual = AttentionPrice(FLASH_ATTENTION_3 if CHIP_FAMILIES[family].compiled else eager)
    return usual if kernel is None else _PRICES.get(kernel.name, usual)


_LOSS_BYTES = 44.0
"""Memory traffic of hlat's loss per logit where no compiler and no kernel fuses it (model/loss.py): conversion to fp32
6 bytes, largest logit 4, subtraction, exponentials and their product with a factor 8 each, sum 4, conversion 6."""
_KERNEL_LOSS_BYTES = 6.0
"""Memory traffic of its kernels (model/kernels/operations_triton.py): they read logits twice and overwrite them."""


@lru_cache
def _software(
    family: str,
    attention: AttentionKernel | None,
    compilable: bool,
    has_kernels: bool,
    zero: bool,
    eight_bit: bool,
    gradient_bytes: int,
) -> SoftwareProfile:
    compiled, price = CHIP_FAMILIES[family].compiled, _price(attention, family)
    slowed = attention is not None and attention.slowed
    return SoftwareProfile(
        attention=price.kernel,
        attention_forward=price.forward,
        attention_backward=price.slowed if slowed else price.backward,
        fused=compiled or compilable or has_kernels,
        # Without kernels, norms and rotations are sequences of torch's operations (model/pointwise.py).
        composed=not compiled and not compilable and not has_kernels,
        eager=not compiled and not compilable,
        # The all-reduce of ZeRO 0 does not overlap with computation.
        overlaps_data=zero,
        eight_bit=eight_bit,
        # As torch.utils.checkpoint does. Compilers remove more: see the constant `recomputed` of their families.
        early_stop=not compiled,
        gradient_bytes=gradient_bytes,
        loss_bytes=FUSED_LOSS_BYTES if compiled else _KERNEL_LOSS_BYTES if has_kernels else _LOSS_BYTES,
        # Only blocks are compiled on GPUs, not the head.
        pads_rows=compiled,
        adds_apart=not compiled,
    )
