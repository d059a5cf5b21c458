"""Activation checkpointing: keep less of the forward pass, compute it again in backward (Chen et al. 2016).

none       everything that backward needs is kept
selective  core attention and the SwiGLU product are computed again (HLAT; Korthikanti et al. 2022, section 5)
full       per block only its input is kept
budget     the cheapest choice, tensor by tensor and block by block, that fits (``plan.py``)
"""

from collections.abc import Callable

import torch

from hlat.activation_checkpointing.plan import ActivationPlan
from hlat.activation_checkpointing.recomputation import LastRecomputed, RecomputingForward
from hlat.model import Decoder, DecoderBlock


def checkpoint_activations(model: Decoder, plan: ActivationPlan) -> None:
    """Make every block of a model, or of a part of one, follow the plan for that part.

    The forward method is wrapped, not the module: hooks around a block (gathering sharded weights) run once, those
    inside (collectives of tensor parallelism) run again with what they belong to. No name in the model changes.
    """
    last = LastRecomputed()
    for block, recomputed in zip(model.blocks(), plan.recomputed, strict=True):
        if recomputed:
            block.forward = _applied(block, recomputed, last)  # type: ignore[method-assign]


def _applied(block: DecoderBlock, recomputed: frozenset[str], last: LastRecomputed) -> Callable[..., torch.Tensor]:
    forward: Callable[..., torch.Tensor] = RecomputingForward(block, recomputed, last)
    # Compiled before or after, it is one graph.
    return torch.compile(forward, dynamic=False) if hasattr(block.forward, "_torchdynamo_orig_callable") else forward
