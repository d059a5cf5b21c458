"""A whole decoder on one device: made on the meta device, allocated once, filled from the seed."""

from collections.abc import Callable

import torch
from torch import nn

from hlat.config.sections import ModelConfig
from hlat.model.decoder import Decoder
from hlat.model.init import initialise
from hlat.model.local_parameters import collect_local_parameters


def build(
    config: ModelConfig, *, device: torch.device | str, seed: int | None, dtype: torch.dtype = torch.float32
) -> Decoder:
    """A decoder on ``device``, made on the meta device first so that no weight exists twice.

    Args:
        config: the model.
        device: where its weights go; "meta" for none at all.
        seed: of the initial weights; None leaves them uninitialised, to be loaded.
        dtype: of the weights.
    """
    with torch.device("meta"):
        model = Decoder(config)
    replace_parameters(model, lambda parameter: parameter.to(dtype))
    if torch.device(device).type == "meta":
        return model
    replace_parameters(model, lambda parameter: torch.empty_like(parameter, device=device))
    if seed is not None:
        initialise(collect_local_parameters(model), config, seed)
    return model


def replace_parameters(model: Decoder, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put in the place of every parameter what a function makes of it.

    ``nn.Module.to`` and ``to_empty`` do the same, but where tensors are a rehearsal's they exchange the contents, which
    torch forbids for some of them.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(function(parameter.detach())))
