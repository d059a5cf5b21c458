"""Optimizers, their protocol, and learning-rate schedules."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.optim.base import COUNTER_BYTES as COUNTER_BYTES
    from hlat.optim.base import LocalMatrices as LocalMatrices
    from hlat.optim.base import MatrixFunction as MatrixFunction
    from hlat.optim.base import Optimizer as Optimizer
    from hlat.optim.base import OptimizerSpec as OptimizerSpec
    from hlat.optim.base import WholeMatrices as WholeMatrices
    from hlat.optim.base import learning_rate as learning_rate
    from hlat.optim.cpu_kernels import square_sums as square_sums
    from hlat.optim.table import build_optimizer as build_optimizer
    from hlat.optim.table import optimizer_spec as optimizer_spec

__getattr__ = lazily(
    __name__,
    {
        "base": "COUNTER_BYTES LocalMatrices MatrixFunction Optimizer OptimizerSpec WholeMatrices learning_rate",
        "cpu_kernels": "square_sums",
        "table": "build_optimizer optimizer_spec",
    },
)
