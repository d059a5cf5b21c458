"""The protocol of an architecture: a description of its parameters, and the class of its blocks."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from hlat.config import ModelConfig
from hlat.model.spec import ModelSpec

if TYPE_CHECKING:
    from hlat.model.layers import DecoderBlock


def decoder_block() -> type["DecoderBlock"]:
    """Return the class of LLaMA's blocks."""
    from hlat.model.layers import DecoderBlock  # noqa: PLC0415  (imports torch)

    return DecoderBlock


class NormPlace(Enum):
    """Place of the two norms of a block, around attention and around the feed-forward layer."""

    INPUT = auto()
    """Each normalises what its half of the block reads from the residual stream."""
    OUTPUT = auto()
    """Each normalises what its half of the block adds to the residual stream."""


@dataclass(frozen=True)
class Architecture:
    """An architecture.

    Attributes:
        describe: returns the description of a model's parameters and saved tensors.
        block: returns the class of its decoder blocks, which is built with (model section, model shard). A function,
            so that a description, with which models are counted and planned, does not import torch.
        norm_place: where the norms of a block are, if its blocks are ``DecoderBlock`` in everything else; then the
            compiled decoding step (``hlat.model.decoding``) computes them. None if they are not: torch decodes.
    """

    describe: Callable[[ModelConfig], ModelSpec]
    block: Callable[[], type["DecoderBlock"]]
    norm_place: NormPlace | None = None
