"""Activation checkpointing: the activations that blocks save for backward, and those that they recompute."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.activation_checkpointing.plan import *
    from hlat.activation_checkpointing.recomputation import *

__getattr__ = lazily(
    __name__,
    {
        "plan": "POLICIES plan_activations recomputed_steps",
        "recomputation": "checkpoint_activations",
    },
)
