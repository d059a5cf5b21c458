"""Models loaded directly from Hugging Face folders, without a checkpoint in between.

config.json, safetensors --read_hf--> canonical tensors, one after another --> Decoder
"""

import functools
from pathlib import Path

import torch

from hlat.config.sections import ModelConfig
from hlat.model import Decoder, build, collect_local_parameters
from hlat.model.hf import read_hf


def load_hf_model(folder: Path, device: torch.device | str, dtype: torch.dtype | None = None) -> Decoder:
    """Load the model of a Hugging Face folder of an architecture that hlat has.

    Args:
        folder: folder with config.json and safetensors files; pickled weights are refused.
        device: device of the weights.
        dtype: data type of the weights; None for the stored one (if there are several, the one they promote to).

    Raises:
        RecipeError: hlat does not support this model.
        CheckpointError: files are missing or damaged.
    """
    fields, tensors = read_hf(folder)
    stored = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
    model = build(ModelConfig.model_validate(fields), device=device, seed=None, dtype=dtype or stored)
    for parameter in collect_local_parameters(model):
        for block in parameter.row_blocks():
            rows = parameter.row_views(block, parameter.tensor)
            counts = [view.shape[0] for view in rows]  # a complete model has all rows of each canonical tensor
            for target, source in zip(rows, tensors[block.name].split(counts), strict=True):
                target.copy_(source)
    return model
