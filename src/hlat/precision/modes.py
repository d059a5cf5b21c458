"""The modes, as data: the one place that says which dtype what has."""

from dataclasses import dataclass

import torch

_FP32, _BF16 = torch.float32, torch.bfloat16


AUTO = "auto"


def resolve_mode(mode: str, fast_bf16: bool) -> str:
    """The mode that a recipe's ``precision.mode`` means.

    Args:
        mode: one of ``MODES``, or ``AUTO``.
        fast_bf16: whether the devices multiply bf16 faster than fp32.
    """
    if mode != AUTO:
        return mode
    return "mixed" if fast_bf16 else "fp32"


@dataclass(frozen=True)
class Mode:
    """Dtypes of a precision mode.

    Attributes:
        weights: what the optimizer steps and a checkpoint stores: the master weights.
        compute: activations, and products, which accumulate in fp32.
        gradients: of the weights, added up over micro-batches.
        reduction: of gradients over data-parallel ranks.
        moments: both of AdamW's.
        compensation: what rounding the weights has lost, kept beside them; None where it is not.
    """

    weights: torch.dtype
    compute: torch.dtype
    gradients: torch.dtype
    reduction: torch.dtype
    moments: torch.dtype
    compensation: torch.dtype | None = None

    @property
    def bytes_per_parameter(self) -> int:
        """Weights, gradients, moments and compensation, between forward and step."""
        kept = (self.weights, self.gradients, self.moments, self.moments)
        return sum(dtype.itemsize for dtype in kept) + (self.compensation.itemsize if self.compensation else 0)


MODES: dict[str, Mode] = {
    "fp32": Mode(_FP32, _FP32, _FP32, _FP32, _FP32),
    "mixed": Mode(_FP32, _BF16, _FP32, _FP32, _FP32),
    "fp8": Mode(_FP32, _BF16, _FP32, _FP32, _FP32),
    "bf16-sr": Mode(_BF16, _BF16, _BF16, _BF16, _BF16),
    "bf16": Mode(_BF16, _BF16, _BF16, _BF16, _BF16),
    "bf16-kahan": Mode(_BF16, _BF16, _BF16, _BF16, _BF16, _BF16),
}
