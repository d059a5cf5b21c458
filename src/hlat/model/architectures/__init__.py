"""Architectures: a file for each kind of block, which describes the parameters of its models and has its modules.

``docs/architectures.md`` says how to add one. ``config/sections/model.py`` has their names in config.json.
"""

from typing import TYPE_CHECKING

from hlat.config import ModelConfig
from hlat.model.architectures.base import Architecture, NormPlace
from hlat.model.architectures.llama import LLAMA
from hlat.model.architectures.olmo2 import OLMO2
from hlat.model.spec import ModelShard, ModelSpec

if TYPE_CHECKING:
    from hlat.model.layers import DecoderBlock

__all__ = ["NormPlace", "build_block", "model_spec", "norm_place"]

_ARCHITECTURES: dict[str, Architecture] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "olmo2": OLMO2,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
}


def model_spec(config: ModelConfig) -> ModelSpec:
    """Describe a model's parameters and the tensors that its blocks save; imports no torch."""
    return _ARCHITECTURES[config.architecture].describe(config)


def build_block(config: ModelConfig, shard: ModelShard) -> "DecoderBlock":
    """Build a block of a model's architecture, with the heads and columns of a shard; imports torch."""
    return _ARCHITECTURES[config.architecture].block()(config, shard)


def norm_place(config: ModelConfig) -> NormPlace | None:
    """Return where the norms of a model's blocks are; None if its blocks differ in other ways from LLaMA's too."""
    return _ARCHITECTURES[config.architecture].norm_place
