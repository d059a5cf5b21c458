"""A layout, and the model in it: tensor, sequence, pipeline, context and data parallelism, composed."""

from hlat.parallel.compiling import Compilation, compilation
from hlat.parallel.footprint import StateBytes, held_parts, state_bytes
from hlat.parallel.layout import Coordinates, Layout
from hlat.parallel.micro_batch import MicroBatch
from hlat.parallel.model import ParallelModel, build_parallel
from hlat.parallel.stages import stage_layers

__all__ = [
    "Compilation",
    "Coordinates",
    "Layout",
    "MicroBatch",
    "ParallelModel",
    "StateBytes",
    "build_parallel",
    "compilation",
    "held_parts",
    "stage_layers",
    "state_bytes",
]
