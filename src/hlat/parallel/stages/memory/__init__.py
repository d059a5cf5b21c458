"""Memory of a rank within a step beyond its state: activations, gradients, temporary tensors and buffers."""

from hlat.parallel.stages.memory.in_flight import PENDING_SENDS
from hlat.parallel.stages.memory.transient_memory import transient_bytes

__all__ = ["PENDING_SENDS", "transient_bytes"]
