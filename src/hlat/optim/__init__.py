"""Optimizers, their protocol, and learning-rate schedules."""

from hlat.optim.base import COUNTER_BYTES, LocalMatrices, MatrixFunction, Optimizer, OptimizerSpec, WholeMatrices
from hlat.optim.schedule import learning_rate
from hlat.optim.square_sums import square_sums
from hlat.optim.table import build_optimizer, optimizer_spec

__all__ = [
    "COUNTER_BYTES",
    "LocalMatrices",
    "MatrixFunction",
    "Optimizer",
    "OptimizerSpec",
    "WholeMatrices",
    "build_optimizer",
    "learning_rate",
    "optimizer_spec",
    "square_sums",
]
