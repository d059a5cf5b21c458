"""Apply activation checkpointing to a model: save fewer activations, recompute them in backward (Chen et al. 2016).

none       everything that backward needs is saved
selective  core attention and the SwiGLU product are recomputed (HLAT; Korthikanti et al. 2022, section 5)
full       only the input of each block is saved
budget     the cheapest choice of tensors, block by block, that fits into a memory budget (``plan.py``)
"""

from collections.abc import Callable

import torch

from hlat.activation_checkpointing.plan import ActivationPlan
from hlat.activation_checkpointing.recomputation import LastRecomputed, RecomputingForward
from hlat.model import Decoder, DecoderBlock


def checkpoint_activations(model: Decoder, plan: ActivationPlan, compile_backend: str = "inductor") -> None:
    """Make the blocks of a model or pipeline stage recompute what the plan says.

    The forward method is wrapped, not the module: hooks around a block (gathering sharded weights) run once, those
    inside (collectives of tensor parallelism) run again with the step that they belong to. No parameter name changes.

    Args:
        model: model or pipeline stage.
        plan: what its blocks recompute.
        compile_backend: compiler of blocks that are compiled.
    """
    last = LastRecomputed()
    for block, recomputed in zip(model.blocks(), plan.recomputed, strict=True):
        if recomputed:
            forward = _recomputing_forward(block, recomputed, last, compile_backend)
            block.forward = forward  # type: ignore[method-assign]


def _recomputing_forward(
    block: DecoderBlock, recomputed: frozenset[str], last: LastRecomputed, compile_backend: str
) -> Callable[..., torch.Tensor]:
    forward: Callable[..., torch.Tensor] = RecomputingForward(block, recomputed, last)
    # If the block is compiled, compile the wrapper: block and recomputation are one graph.
    if not hasattr(block.forward, "_torchdynamo_orig_callable"):
        return forward
    return torch.compile(forward, dynamic=False, backend=compile_backend)
