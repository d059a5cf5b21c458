"""What is kept of the forward pass for backward, and what is computed again."""

from hlat.activation_checkpointing.apply import checkpoint_activations
from hlat.activation_checkpointing.plan import POLICIES, plan_activations

__all__ = ["POLICIES", "checkpoint_activations", "plan_activations"]
