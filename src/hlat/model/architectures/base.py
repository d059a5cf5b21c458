"""The protocol of an architecture: a description of its parameters, and the class of its blocks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hlat.config.sections import ModelConfig
from hlat.model.spec import ModelSpec

if TYPE_CHECKING:
    from hlat.model.layers import DecoderBlock


def decoder_block() -> type["DecoderBlock"]:
    """Return the class of LLaMA's blocks."""
    from hlat.model.layers import DecoderBlock  # noqa: PLC0415  (imports torch)

    return DecoderBlock


@dataclass(frozen=True)
class Architecture:
    """An architecture.

    Attributes:
        describe: returns the description of a model's parameters and saved tensors.
        block: returns the class of its decoder blocks, which is built with (model section, model shard). A function,
            so that a description, with which models are counted and planned, does not import torch.
    """

    describe: Callable[[ModelConfig], ModelSpec]
    block: Callable[[], type["DecoderBlock"]]
