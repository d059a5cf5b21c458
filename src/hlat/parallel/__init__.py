"""Tensor, sequence, pipeline, context and data parallelism, composed and applied to a model."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.parallel.data_parallel import *
    from hlat.parallel.device_support import *
    from hlat.parallel.forward_model import *
    from hlat.parallel.layout import *
    from hlat.parallel.matrix_exchange import *
    from hlat.parallel.parallel_model import *
    from hlat.parallel.process_groups import *
    from hlat.parallel.stages.in_flight import *
    from hlat.parallel.stages.rank_memory import *
    from hlat.parallel.stages.stage_layers import *
    from hlat.parallel.stages.transient_sizes import *

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
            "RankBytes gathered_ends has_embedding_and_head peak_rank_bytes rank_bytes state_bytes_of_shards "
            "state_sizes"
        ),
        "stages.stage_layers": "rank_model_shards representative_ranks stage_layer_counts stage_layers",
        "stages.transient_sizes": "ACCELERATOR EagerKernels",
    },
)
