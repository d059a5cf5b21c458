"""Tensor, sequence, pipeline, context and data parallelism, composed and applied to a model."""

from hlat.parallel.compile import decide_compilation
from hlat.parallel.forward_model import ForwardModel, build_forward_model
from hlat.parallel.micro_batch import MicroBatch
from hlat.parallel.parallel_model import ParallelModel, build_parallel

__all__ = [
    "ForwardModel",
    "MicroBatch",
    "ParallelModel",
    "build_forward_model",
    "build_parallel",
    "decide_compilation",
]
