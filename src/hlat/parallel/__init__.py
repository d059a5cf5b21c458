"""Tensor, sequence, pipeline, context and data parallelism, composed and applied to a model."""

from hlat.parallel.compile import decide_compilation
from hlat.parallel.micro_batch import MicroBatch
from hlat.parallel.parallel_model import ParallelModel, build_parallel

__all__ = ["MicroBatch", "ParallelModel", "build_parallel", "decide_compilation"]
