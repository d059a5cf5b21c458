"""What is kept of the forward pass for backward, and what is computed again."""

from hlat.memory.activations import checkpoint_activations

__all__ = ["checkpoint_activations"]
