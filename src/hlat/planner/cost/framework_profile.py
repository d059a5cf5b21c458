"""What hlat itself does that a time depends on: kernels, overlap, dtypes of what is sent."""

from functools import lru_cache

from hlat.config.sections import ZERO_BUBBLE
from hlat.planner.problem import FLASH_ATTENTION_2, FLASH_ATTENTION_3, Candidate, PlanRequest, SoftwareProfile
from hlat.precision import MODES

_ALWAYS_COMPILED = ("trainium", "tpu")


def hlat_profile(request: PlanRequest, one: Candidate) -> SoftwareProfile:
    """Hlat on this cluster, in this layout (docs/limits.md, docs/parallelism.md)."""
    return _software(
        request.cluster.chip.family or "measured",
        one.tensor == one.context == 1 and one.schedule not in ZERO_BUBBLE,
        one.zero > 0,
        request.mode == "fp8",
        # Of products in 16 bits; where they are in 32, rates are halved instead (devices.py).
        MODES[request.mode].reduction.itemsize * 2 // MODES[request.mode].compute.itemsize,
    )


@lru_cache
def _software(family: str, local: bool, zero: bool, eight_bit: bool, gradient_bytes: int) -> SoftwareProfile:
    compiled = family in _ALWAYS_COMPILED
    return SoftwareProfile(
        attention=FLASH_ATTENTION_3 if compiled else FLASH_ATTENTION_2,
        # Blocks are compiled where nothing inside of them communicates, and nothing takes their backward pass apart.
        fused=compiled or local,
        eager=not compiled and not local,
        # Collectives of tensor parallelism wait for each other and for products; so does ZeRO 0's all-reduce.
        overlaps_tensor=False,
        overlaps_data=zero,
        eight_bit=eight_bit,
        # torch.utils.checkpoint does. What a compiler removes, the constant `recomputed` of its family says.
        early_stop=not compiled,
        gradient_bytes=gradient_bytes,
    )
