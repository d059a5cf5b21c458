"""Optimizers, their protocol, and learning-rate schedules."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.optim.base import *
    from hlat.optim.cpu_kernels import *
    from hlat.optim.table import *

__getattr__ = lazily(
    __name__,
    {
        "base": (
            "COUNTER_BYTES LocalMatrices MatrixFunction Optimizer OptimizerSpec WholeMatrices check_schedule "
            "learning_rate placed rate_at"
        ),
        "cpu_kernels": "square_sums",
        "table": "build_optimizer optimizer_spec",
    },
)
