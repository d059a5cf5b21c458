"""Pipeline stages: split of layers into stages, order of passes, and memory of a rank."""

from hlat.parallel.stages.eager_kernels import ACCELERATOR, EagerKernels
from hlat.parallel.stages.matrix_plan import Matrix, MatrixPlan, MatrixWindow, matrix_shapes
from hlat.parallel.stages.pass_label import LabelledPass, parse_pass_label, pass_label
from hlat.parallel.stages.pipeline_order import PassKind, PassOrder, pass_order
from hlat.parallel.stages.rank_memory import (
    RankBytes,
    has_embedding_and_head,
    peak_rank_bytes,
    rank_bytes,
    state_bytes_in_mode,
    state_sizes,
)
from hlat.parallel.stages.stage_layers import (
    peak_memory_rank,
    rank_model_shards,
    representative_ranks,
    stage_layer_counts,
    stage_layers,
)
from hlat.parallel.stages.state_bytes import gathered_ends, state_bytes_of_shards
from hlat.parallel.stages.step_shape import StepShape

__all__ = [
    "ACCELERATOR",
    "EagerKernels",
    "LabelledPass",
    "Matrix",
    "MatrixPlan",
    "MatrixWindow",
    "PassKind",
    "PassOrder",
    "RankBytes",
    "StepShape",
    "gathered_ends",
    "has_embedding_and_head",
    "matrix_shapes",
    "parse_pass_label",
    "pass_label",
    "pass_order",
    "peak_memory_rank",
    "peak_rank_bytes",
    "rank_bytes",
    "rank_model_shards",
    "representative_ranks",
    "stage_layer_counts",
    "stage_layers",
    "state_bytes_in_mode",
    "state_bytes_of_shards",
    "state_sizes",
]
