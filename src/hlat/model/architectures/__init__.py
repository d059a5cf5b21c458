"""Architectures: one file each, which describes the parameters of its models (``hlat.model.spec``)."""

from hlat.config.sections import ModelConfig
from hlat.model.architectures.llama import llama_spec
from hlat.model.spec import ModelSpec

__all__ = ["model_spec"]


def model_spec(config: ModelConfig) -> ModelSpec:
    """Return the description of a model's parameters."""
    return llama_spec(config)
