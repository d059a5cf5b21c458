"""Precision modes as data: dtype of weights, activations, gradients and optimizer state in each; and fp8 products.

    recipe's precision.mode --resolve_mode--> name of a mode --MODES--> Mode: dtypes
    mode fp8: device --check_fp8--> nothing, or LaunchError
              linear layers of a block --convert_to_fp8--> torchao's, which scale input, weight and gradient row by row,
                                                           cast to e4m3 and multiply

With fp8, everything else is as in mixed: fp32 weights, gradients and optimizer state, bf16 activations. Embedding and
head compute in bf16. torchao recommends rowwise scaling for accuracy; it is faster for wide, compiled layers only.
"""

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import nn

from hlat.runtime.backend.table import backend_of
from hlat.runtime.errors import LaunchError

_FP32, _BF16 = torch.float32, torch.bfloat16


AUTO = "auto"


def resolve_mode(mode: str, fast_bf16: bool) -> str:
    """Resolve a recipe's ``precision.mode``, one of ``MODES`` or ``AUTO``, to one of ``MODES``."""
    if mode != AUTO:
        return mode
    return "mixed" if fast_bf16 else "fp32"  # fast_bf16: devices multiply bf16 faster than fp32


@dataclass(frozen=True)
class Mode:
    """Dtypes of a precision mode; matrix products accumulate in fp32."""

    weights: torch.dtype  # master weights: updated by the optimizer and stored in checkpoints
    compute: torch.dtype  # activations and matrix products (which accumulate in fp32)
    gradients: torch.dtype  # gradients of the weights, accumulated over micro-batches
    reduction: torch.dtype  # gradients while they are reduced over data-parallel ranks
    moments: torch.dtype  # moments of the optimizer
    compensation: torch.dtype | None = None  # rounding error of the weights, kept by Kahan summation; None if not kept

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes of weights, gradients, two moments and compensation per parameter, before the optimizer step."""
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


_FP8_ALIGNMENT = 16  # elements; the kernels require both sides of a matrix to be multiples


def check_fp8(device: torch.device) -> None:
    """Check that fp8 can run on a device.

    Raises:
        LaunchError: the device has no fp8 products, or torchao is not installed.
    """
    advice = "Use precision.mode=mixed, or bf16-sr for half the memory."
    refusal = backend_of(device).fp8_refusal(device)
    if refusal:
        raise LaunchError(f"precision.mode=fp8: {refusal}. {advice}")
    if find_spec("torchao") is None:
        raise LaunchError(f"precision.mode=fp8: torchao is not installed: pip install 'hlat[fp8]'. {advice}")


def convert_to_fp8(module: nn.Module) -> None:
    """Replace the linear layers of a module by fp8 layers, in place; names and parameters stay the same."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: PLC0415  (an extra)

    # torchao recommends rowwise scaling for accuracy.
    config = Float8LinearConfig.from_recipe_name("rowwise")
    convert_to_float8_training(module, config=config, module_filter_fn=_fits_fp8_kernel)


def _fits_fp8_kernel(module: nn.Module, name: str) -> bool:
    # The kernels refuse other layers, which stay as they are.
    return isinstance(module, nn.Linear) and not any(side % _FP8_ALIGNMENT for side in module.weight.shape)
