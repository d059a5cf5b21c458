"""Matrix products in fp8, with torchao.

    linear layers of a block -> torchao's, which scale input, weight and gradient row by row, cast to e4m3 and multiply

Everything else is as in mixed: fp32 weights, gradients and optimizer state, bf16 activations. Embedding and head
compute in bf16. torchao recommends rowwise scaling for accuracy; it is faster for wide, compiled layers only.
"""

from importlib.util import find_spec

import torch
from torch import nn

from hlat.runtime.backend.table import backend_of
from hlat.runtime.errors import LaunchError

_ALIGNMENT = 16  # elements; the kernels require both sides of a matrix to be multiples


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
    """Replace the linear layers of a module by fp8 layers, in place; names and parameters stay the same.

    Layers whose sides are not multiples of 16 are not replaced, since the kernels do not support them.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: PLC0415  (an extra)

    config = Float8LinearConfig.from_recipe_name("rowwise")
    convert_to_float8_training(module, config=config, module_filter_fn=_is_supported)


def _is_supported(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and not any(side % _ALIGNMENT for side in module.weight.shape)
