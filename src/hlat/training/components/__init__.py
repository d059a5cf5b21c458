"""Training components: the protocol of what takes part in each step, and the components that the recipe asks for."""

from hlat.training.components.base import ComponentList, LoopStart, StepEnd, TrainingComponent
from hlat.training.components.installed import installed_components
from hlat.training.components.process import GarbageCollector, Profiler
from hlat.training.components.requested import requested_components
from hlat.training.components.saved_state import StateChanges, load_state

__all__ = [
    "ComponentList",
    "GarbageCollector",
    "LoopStart",
    "Profiler",
    "StateChanges",
    "StepEnd",
    "TrainingComponent",
    "installed_components",
    "load_state",
    "requested_components",
]
