"""What is kept of the forward pass for backward, and what is computed again."""

from hlat.memory.activations import checkpoint_activations
from hlat.memory.plan import POLICIES, Plan, plan_activations

__all__ = ["POLICIES", "Plan", "checkpoint_activations", "plan_activations"]
