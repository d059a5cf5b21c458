"""Optimizers, their protocol, and learning-rate schedules."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.optim.base import *
    from hlat.optim.cpu_kernels import *
    from hlat.optim.schedules import *
    from hlat.optim.table import *

__getattr__ = lazily(
    __name__,
    {
        "base": "COUNTER_BYTES LocalMatrices MatrixFunction Optimizer OptimizerSpec WholeMatrices",
        "cpu_kernels": "square_sums",
        "schedules": "check_schedule learning_rate placed rate_at",
        "table": "build_optimizer optimizer_spec",
    },
)
