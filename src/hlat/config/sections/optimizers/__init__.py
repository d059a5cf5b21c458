"""The optimizer section of a recipe: one class per ``optimizer.kind``, and their union.

    optimizer: {kind: NAME, ...}  --> the section class of NAME; a section without kind is adamw's

``hlat.optim.table`` has the implementation of each kind.
"""

from typing import Literal

from hlat.config.sections.base import fixed
from hlat.config.sections.training import OptimizerConfig

__all__ = ["AdamWConfig", "AnyOptimizerConfig"]


class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov and Hutter 2019) and gradient clipping."""

    kind: Literal["adamw"] = fixed("adamw")
    """Name of the optimizer."""


AnyOptimizerConfig = AdamWConfig
"""Section of any optimizer."""
