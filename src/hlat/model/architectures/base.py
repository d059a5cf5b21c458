"""The protocol of an architecture: a description of its parameters, and the class of its blocks."""

from collections.abc import Callable
from dataclasses import dataclass

from hlat.config.sections import ModelConfig
from hlat.model.layers import DecoderBlock
from hlat.model.spec import ModelSpec


@dataclass(frozen=True)
class Architecture:
    """An architecture.

    Attributes:
        describe: returns the description of a model's parameters and saved tensors.
        block: class of its decoder blocks, which is built with (model section, model shard).
    """

    describe: Callable[[ModelConfig], ModelSpec]
    block: type[DecoderBlock]
