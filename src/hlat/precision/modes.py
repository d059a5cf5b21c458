"""Precision modes as data: dtype of weights, activations, gradients and optimizer state in each mode."""

from dataclasses import dataclass

import torch

_FP32, _BF16 = torch.float32, torch.bfloat16


AUTO = "auto"


def resolve_mode(mode: str, fast_bf16: bool) -> str:
    """Resolve a recipe's ``precision.mode`` to one of ``MODES``.

    Args:
        mode: one of ``MODES``, or ``AUTO``.
        fast_bf16: True if the devices multiply bf16 faster than fp32.
    """
    if mode != AUTO:
        return mode
    return "mixed" if fast_bf16 else "fp32"


@dataclass(frozen=True)
class Mode:
    """Dtypes of a precision mode.

    Attributes:
        weights: master weights: updated by the optimizer and stored in checkpoints.
        compute: activations and matrix products (which accumulate in fp32).
        gradients: gradients of the weights, accumulated over micro-batches.
        reduction: gradients while they are reduced over data-parallel ranks.
        moments: moments of the optimizer.
        compensation: rounding error of the weights, kept by Kahan summation; None if not kept.
    """

    weights: torch.dtype
    compute: torch.dtype
    gradients: torch.dtype
    reduction: torch.dtype
    moments: torch.dtype
    compensation: torch.dtype | None = None

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes of weights, gradients, moments and compensation per parameter, between backward and optimizer step."""
        dtypes = (self.weights, self.gradients, self.moments, self.moments)
        return sum(dtype.itemsize for dtype in dtypes) + (self.compensation.itemsize if self.compensation else 0)


MODES: dict[str, Mode] = {
    "fp32": Mode(_FP32, _FP32, _FP32, _FP32, _FP32),
    "mixed": Mode(_FP32, _BF16, _FP32, _FP32, _FP32),
    "fp8": Mode(_FP32, _BF16, _FP32, _FP32, _FP32),
    "bf16-sr": Mode(_BF16, _BF16, _BF16, _BF16, _BF16),
    "bf16": Mode(_BF16, _BF16, _BF16, _BF16, _BF16),
    "bf16-kahan": Mode(_BF16, _BF16, _BF16, _BF16, _BF16, _BF16),
}
