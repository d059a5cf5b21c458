"""Activation checkpointing: the activations that blocks save for backward, and those that they recompute."""

from hlat.activation_checkpointing.apply import checkpoint_activations
from hlat.activation_checkpointing.plan import POLICIES, plan_activations, recomputed_steps

__all__ = ["POLICIES", "checkpoint_activations", "plan_activations", "recomputed_steps"]
