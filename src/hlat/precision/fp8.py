"""Matrix products in fp8, by torchao.

    linear layers of a block -> torchao's, which scale input, weight and gradient row by row, cast to e4m3 and multiply

Everything else is as in mixed: fp32 weights, gradients and optimizer, bf16 activations. Embedding and head stay bf16.
Rowwise scaling is torchao's recommendation for accuracy; it pays for wide layers only, and compiled.
"""

from importlib.util import find_spec

import torch
from torch import nn

from hlat.runtime import LaunchError
from hlat.runtime.backend import compute_capability

_FIRST_CAPABILITY = (8, 9)  # NVIDIA Ada and Hopper have fp8 tensor cores
_ALIGNED = 16  # elements to which the kernels want the sides of a matrix


def check_fp8(device: torch.device) -> None:
    """Whether fp8 runs here.

    Raises:
        LaunchError: there is no such hardware, or no torchao.
    """
    advice = "Use precision.mode=mixed, or bf16-sr for half the memory."
    if device.type != "cuda":
        raise LaunchError(f"precision.mode=fp8: a {device.type} has no fp8 products that torch can use. {advice}")
    capability = compute_capability(device)
    if capability < _FIRST_CAPABILITY:
        needed = "an NVIDIA GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell) is needed"
        raise LaunchError(f"precision.mode=fp8: {needed}, this one has {'.'.join(map(str, capability))}. {advice}")
    if find_spec("torchao") is None:
        raise LaunchError(f"precision.mode=fp8: torchao is not installed: pip install 'hlat[fp8]'. {advice}")


def convert_to_fp8(module: nn.Module) -> None:
    """Replace the linear layers inside a module, in place; names and parameters stay.

    Layers whose sides are not multiples of 16 stay as they are: the kernels do not take them.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: PLC0415  (an extra)

    config = Float8LinearConfig.from_recipe_name("rowwise")
    convert_to_float8_training(module, config=config, module_filter_fn=_suits)


def _suits(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and not any(side % _ALIGNED for side in module.weight.shape)
