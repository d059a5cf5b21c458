"""A layout, and the model in it: tensor, sequence, pipeline, context and data parallelism, composed."""

from hlat.parallel.compiling import Compilation, compilation
from hlat.parallel.cut import Cut
from hlat.parallel.footprint import StateBytes, state_of
from hlat.parallel.fullness import RankBytes, ends_of, fullest_moment, rank_bytes, state_in_mode, stored
from hlat.parallel.layout import Coordinates, Layout
from hlat.parallel.micro_batch import MicroBatch
from hlat.parallel.model import ParallelModel, build_parallel
from hlat.parallel.moments import layer_weights
from hlat.parallel.orders import Kind, Order, order_of
from hlat.parallel.stages import fullest_rank, held_parts, sizes_of_ranks, stage_layers, state_bytes

__all__ = [
    "Compilation",
    "Coordinates",
    "Cut",
    "Kind",
    "Layout",
    "MicroBatch",
    "Order",
    "ParallelModel",
    "RankBytes",
    "StateBytes",
    "build_parallel",
    "compilation",
    "ends_of",
    "fullest_moment",
    "fullest_rank",
    "held_parts",
    "layer_weights",
    "order_of",
    "rank_bytes",
    "sizes_of_ranks",
    "stage_layers",
    "state_bytes",
    "state_in_mode",
    "state_of",
    "stored",
]
