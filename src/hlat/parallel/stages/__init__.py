"""Pipeline stages: the layers of each, the order of its passes, and the bytes that a rank needs for them."""

from hlat.parallel.stages.pipeline_order import Kind, Order, order_of
from hlat.parallel.stages.rank_memory import RankBytes, ends_of, fullest_moment, rank_bytes, state_in_mode, stored
from hlat.parallel.stages.stage_layers import fullest_rank, held_parts, sizes_of_ranks, stage_layers
from hlat.parallel.stages.state_bytes import state_of
from hlat.parallel.stages.step_shape import Cut
from hlat.parallel.stages.transient_memory import layer_weights

__all__ = [
    "Cut",
    "Kind",
    "Order",
    "RankBytes",
    "ends_of",
    "fullest_moment",
    "fullest_rank",
    "held_parts",
    "layer_weights",
    "order_of",
    "rank_bytes",
    "sizes_of_ranks",
    "stage_layers",
    "state_in_mode",
    "state_of",
    "stored",
]
