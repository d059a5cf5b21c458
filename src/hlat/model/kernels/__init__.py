"""Pointwise operations and the loss, compiled from C for the processor or by Triton for GPUs; attention in C.

are the kernels usable for this tensor? --yes--> operators ``torch.ops.hlat`` (operations.py, attention.py) --> kernels
--no---> the formulas in torch of pointwise.py and loss.py, torch's attention
"""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.model.kernels.attention import (
        ATTENTION,
        attend_to_ranges,
        check_attention,
        check_gradient,
        head_sums_shape,
    )
    from hlat.model.kernels.choice import (
        are_used_on,
        attention_is_used_on,
        builds_masks,
        describe_attention,
        describe_kernels,
        fuses_in_triton,
        has_attention,
        has_kernels,
    )
    from hlat.model.kernels.decode import DecodingLibrary, StepArguments, StepLayer, decoding_library
    from hlat.model.kernels.source import begin_compilation

# Lazy, because ``begin_compilation`` is for processes that have not imported torch yet.
__getattr__ = lazily(
    __name__,
    {
        "attention": ("ATTENTION", "attend_to_ranges", "check_attention", "check_gradient", "head_sums_shape"),
        "choice": (
            "are_used_on",
            "attention_is_used_on",
            "builds_masks",
            "describe_attention",
            "describe_kernels",
            "fuses_in_triton",
            "has_attention",
            "has_kernels",
        ),
        "decode": ("DecodingLibrary", "StepArguments", "StepLayer", "decoding_library"),
        "source": ("begin_compilation",),
    },
)

__all__ = [
    "ATTENTION",
    "DecodingLibrary",
    "StepArguments",
    "StepLayer",
    "are_used_on",
    "attend_to_ranges",
    "attention_is_used_on",
    "begin_compilation",
    "builds_masks",
    "check_attention",
    "check_gradient",
    "decoding_library",
    "describe_attention",
    "describe_kernels",
    "fuses_in_triton",
    "has_attention",
    "has_kernels",
    "head_sums_shape",
]
