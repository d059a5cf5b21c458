"""A whole decoder on one device: made on the meta device, allocated once, filled from the seed."""

import torch

from hlat.config import ModelConfig
from hlat.model.decoder import Decoder
from hlat.model.held import held_parameters
from hlat.model.initial import initialise


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
        model = Decoder(config).to(dtype)
    if torch.device(device).type == "meta":
        return model
    model.to_empty(device=device)
    if seed is not None:
        initialise(held_parameters(model), config, seed)
    return model
