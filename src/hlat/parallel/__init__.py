"""Tensor, sequence, pipeline, context and data parallelism, composed and applied to a model."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.parallel.data_parallel import LabelledPass as LabelledPass
    from hlat.parallel.data_parallel import MicroBatch as MicroBatch
    from hlat.parallel.data_parallel import parse_pass_label as parse_pass_label
    from hlat.parallel.data_parallel import sum_on_host as sum_on_host
    from hlat.parallel.device_support import compile_refusal as compile_refusal
    from hlat.parallel.device_support import decide_compilation as decide_compilation
    from hlat.parallel.device_support import device_problems as device_problems
    from hlat.parallel.device_support import needs_whole_matrices as needs_whole_matrices
    from hlat.parallel.forward_model import ForwardModel as ForwardModel
    from hlat.parallel.forward_model import build_forward_model as build_forward_model
    from hlat.parallel.layout import AXES as AXES
    from hlat.parallel.layout import Coordinates as Coordinates
    from hlat.parallel.layout import Layout as Layout
    from hlat.parallel.layout import StepShape as StepShape
    from hlat.parallel.matrix_exchange import MatrixPlan as MatrixPlan
    from hlat.parallel.matrix_exchange import matrix_shapes as matrix_shapes
    from hlat.parallel.parallel_model import ParallelModel as ParallelModel
    from hlat.parallel.parallel_model import build_parallel as build_parallel
    from hlat.parallel.process_groups import group_problems as group_problems
    from hlat.parallel.process_groups import rank_groups as rank_groups
    from hlat.parallel.stages.in_flight import PassKind as PassKind
    from hlat.parallel.stages.in_flight import PassOrder as PassOrder
    from hlat.parallel.stages.in_flight import pass_order as pass_order
    from hlat.parallel.stages.rank_memory import RankBytes as RankBytes
    from hlat.parallel.stages.rank_memory import gathered_ends as gathered_ends
    from hlat.parallel.stages.rank_memory import has_embedding_and_head as has_embedding_and_head
    from hlat.parallel.stages.rank_memory import peak_rank_bytes as peak_rank_bytes
    from hlat.parallel.stages.rank_memory import rank_bytes as rank_bytes
    from hlat.parallel.stages.rank_memory import state_bytes_in_mode as state_bytes_in_mode
    from hlat.parallel.stages.rank_memory import state_bytes_of_shards as state_bytes_of_shards
    from hlat.parallel.stages.rank_memory import state_sizes as state_sizes
    from hlat.parallel.stages.stage_layers import rank_model_shards as rank_model_shards
    from hlat.parallel.stages.stage_layers import representative_ranks as representative_ranks
    from hlat.parallel.stages.stage_layers import stage_layer_counts as stage_layer_counts
    from hlat.parallel.stages.stage_layers import stage_layers as stage_layers
    from hlat.parallel.stages.transient_sizes import ACCELERATOR as ACCELERATOR
    from hlat.parallel.stages.transient_sizes import EagerKernels as EagerKernels

__getattr__ = lazily(
    __name__,
    {
        "data_parallel": "LabelledPass MicroBatch parse_pass_label sum_on_host",
        "device_support": "compile_refusal decide_compilation device_problems needs_whole_matrices",
        "forward_model": "ForwardModel build_forward_model",
        "layout": "AXES Coordinates Layout StepShape",
        "matrix_exchange": "MatrixPlan matrix_shapes",
        "parallel_model": "ParallelModel build_parallel",
        "process_groups": "group_problems rank_groups",
        "stages.in_flight": "PassKind PassOrder pass_order",
        "stages.rank_memory": (
            "RankBytes gathered_ends has_embedding_and_head peak_rank_bytes rank_bytes state_bytes_in_mode "
            "state_bytes_of_shards state_sizes"
        ),
        "stages.stage_layers": "rank_model_shards representative_ranks stage_layer_counts stage_layers",
        "stages.transient_sizes": "ACCELERATOR EagerKernels",
    },
)
