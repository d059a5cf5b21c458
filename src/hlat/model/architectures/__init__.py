"""Architectures: a file for each kind of block, which describes the parameters of its models and has its modules.

``docs/architectures.md`` says how to add one. ``config/sections/model.py`` has their names in config.json.
"""

from typing import TYPE_CHECKING

from hlat.config import ModelConfig, OwnModelConfig, own_parts
from hlat.model.architectures.base import Architecture, NormPlace
from hlat.model.architectures.gemma import GEMMA
from hlat.model.architectures.gpt_oss import GPT_OSS
from hlat.model.architectures.llama import LLAMA
from hlat.model.architectures.olmo2 import OLMO2
from hlat.model.spec import ModelShard, ModelSpec

if TYPE_CHECKING:
    from hlat.model.layers import DecoderBlock

__all__ = ["NormPlace", "architecture_of", "build_block", "model_spec", "norm_place"]

_ARCHITECTURES: dict[str, Architecture] = {
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "gpt_oss": GPT_OSS,
    "llama": LLAMA,
    "ministral": LLAMA,
    "mistral": LLAMA,
    "olmo2": OLMO2,
    "olmo3": OLMO2,
    "phi3": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "smollm3": LLAMA,
}


def model_spec(config: ModelConfig) -> ModelSpec:
    """Describe a model's parameters and the tensors that its blocks save; imports no torch."""
    return architecture_of(config).describe(config)


def build_block(config: ModelConfig, shard: ModelShard) -> "DecoderBlock":
    """Build a block of a model's architecture, with the heads and columns of a shard; imports torch."""
    return architecture_of(config).block()(config, shard)


def norm_place(config: ModelConfig) -> NormPlace | None:
    """Return where the norms of a model's blocks are; None if its blocks differ in other ways from LLaMA's too."""
    return architecture_of(config).norm_place


def architecture_of(config: ModelConfig) -> Architecture:
    """Return the architecture of a model; RecipeError if one of the user's own cannot be used."""
    if not isinstance(config, OwnModelConfig):
        return _ARCHITECTURES[config.architecture]
    path, wanted = "model.architecture", "an hlat.model.architectures.base.Architecture"
    found: Architecture = own_parts.load_part(
        own_parts.ARCHITECTURES, path, config.architecture, wanted, lambda part: isinstance(part, Architecture)
    )
    own_parts.read_options(found.Options, config.own_options, "model", tuple(ModelConfig.model_fields))
    return found
