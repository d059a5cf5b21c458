"""Activation checkpointing: the activations that blocks save for backward, and those that they recompute."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.activation_checkpointing.plan import POLICIES as POLICIES
    from hlat.activation_checkpointing.plan import plan_activations as plan_activations
    from hlat.activation_checkpointing.plan import recomputed_steps as recomputed_steps
    from hlat.activation_checkpointing.recomputation import checkpoint_activations as checkpoint_activations

__getattr__ = lazily(
    __name__,
    {
        "plan": "POLICIES plan_activations recomputed_steps",
        "recomputation": "checkpoint_activations",
    },
)
