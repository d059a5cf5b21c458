"""What is kept of the forward pass for backward, and what is computed again."""

from hlat.memory.activations import checkpoint_activations
from hlat.memory.in_flight import passes_in_flight
from hlat.memory.plan import POLICIES, Plan, plan_activations

__all__ = ["POLICIES", "Plan", "checkpoint_activations", "passes_in_flight", "plan_activations"]
