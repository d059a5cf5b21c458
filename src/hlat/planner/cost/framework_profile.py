"""What hlat itself does that a time depends on: kernels, overlap, dtypes of what is sent."""

from functools import lru_cache

from hlat.config.sections import ZERO_BUBBLE
from hlat.planner.problem import FUSED_FLASH, SECOND_FLASH, Candidate, Question, Software
from hlat.precision import MODES

_ALWAYS_COMPILED = ("trainium", "tpu")


def software_of(question: Question, one: Candidate) -> Software:
    """Hlat on this cluster, in this layout (docs/limits.md, docs/parallelism.md)."""
    return _software(
        question.cluster.chip.family or "measured",
        one.tensor == one.context == 1 and one.schedule not in ZERO_BUBBLE,
        one.zero > 0,
        question.mode == "fp8",
        # Of products in 16 bits; where they are in 32, rates are halved instead (devices.py).
        MODES[question.mode].reduction.itemsize * 2 // MODES[question.mode].compute.itemsize,
    )


@lru_cache
def _software(family: str, local: bool, zero: bool, eight_bit: bool, gradient_bytes: int) -> Software:
    compiled = family in _ALWAYS_COMPILED
    return Software(
        attention=FUSED_FLASH if compiled else SECOND_FLASH,
        # Blocks are compiled where nothing inside of them communicates, and nothing takes their backward pass apart.
        fused=compiled or local,
        eager=not compiled and not local,
        # Collectives of tensor parallelism wait for each other and for products; so does ZeRO 0's all-reduce.
        hides_tensor=False,
        hides_data=zero,
        eight_bit=eight_bit,
        # torch.utils.checkpoint does. What a compiler removes, the constant `recomputed` of its family says.
        stops_early=not compiled,
        gradient_bytes=gradient_bytes,
    )
