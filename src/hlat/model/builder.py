"""Build an unsharded decoder on one device: created on the meta device, allocated once, initialised from the seed."""

from collections.abc import Callable

import torch
from torch import nn

from hlat.config import ModelConfig
from hlat.model.decoder import Decoder
from hlat.model.init import initialise
from hlat.model.local_parameters import collect_local_parameters


def build(
    config: ModelConfig, *, device: torch.device | str, seed: int | None, dtype: torch.dtype = torch.float32
) -> Decoder:
    """Build a decoder on ``device``. It is created on the meta device first, so that no weight is allocated twice.

    Args:
        config: the model.
        device: device of the weights; "meta" allocates none.
        seed: seed of the initial weights; None leaves them uninitialised, to be loaded later.
        dtype: dtype of the weights.
    """
    with torch.device("meta"):
        model = Decoder(config)
    replace_parameters(model, lambda parameter: parameter.to(dtype))
    if torch.device(device).type == "meta":
        return model
    allocate(model, torch.device(device))
    if seed is not None:
        initialise(collect_local_parameters(model), config, seed)
    return model


def allocate(model: Decoder, device: torch.device) -> None:
    """Replace every parameter by one of the same shape and dtype with memory on a device, without values.

    ``torch.empty_like`` of a tensor on the meta device imports sympy, half a second.
    """
    replace_parameters(model, lambda each: torch.empty(each.shape, dtype=each.dtype, device=device))


def replace_parameters(model: Decoder, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every parameter by ``function`` of its detached tensor.

    ``nn.Module.to`` and ``to_empty`` do the same for real tensors. For the fake tensors of a rehearsal they swap the
    tensors' contents, which torch forbids for some of them.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(function(parameter.detach())))
