"""Tensor, sequence, pipeline, context and data parallelism, composed and applied to a model."""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.parallel.compile import compile_refusal, decide_compilation
    from hlat.parallel.device_check import device_problems, needs_whole_matrices
    from hlat.parallel.forward_model import ForwardModel, build_forward_model
    from hlat.parallel.host_sum import sum_on_host
    from hlat.parallel.micro_batch import MicroBatch
    from hlat.parallel.parallel_model import ParallelModel, build_parallel

__getattr__ = lazily(
    __name__,
    {
        "compile": ("compile_refusal", "decide_compilation"),
        "device_check": (
            "device_problems",
            "needs_whole_matrices",
        ),
        "forward_model": (
            "ForwardModel",
            "build_forward_model",
        ),
        "host_sum": ("sum_on_host",),
        "micro_batch": ("MicroBatch",),
        "parallel_model": (
            "ParallelModel",
            "build_parallel",
        ),
    },
)

__all__ = [
    "ForwardModel",
    "MicroBatch",
    "ParallelModel",
    "build_forward_model",
    "build_parallel",
    "compile_refusal",
    "decide_compilation",
    "device_problems",
    "needs_whole_matrices",
    "sum_on_host",
]
