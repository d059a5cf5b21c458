"""Activation checkpointing: keep what enters a block, compute the rest again in backward (Chen et al. 2016).

none   everything that backward needs is kept
full   per block only its input; each block's forward pass is computed twice
"""

from functools import partial

from torch.utils.checkpoint import checkpoint

from hlat.config import MemoryConfig
from hlat.model import Decoder


def checkpoint_activations(model: Decoder, config: MemoryConfig) -> None:
    """Make every block of a model, or of a part of one, follow the recipe's policy.

    The forward method is wrapped, not the module: hooks around a block (gathering sharded weights) run once, those
    inside (collectives of tensor parallelism) run again with the rest. No name in the model changes.
    """
    if config.activation_checkpointing == "none":
        return
    for block in model.blocks():
        # Nothing in a block draws from a random generator, so there is no generator state to put back.
        again = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        block.forward = again  # type: ignore[method-assign]
