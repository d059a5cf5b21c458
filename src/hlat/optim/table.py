"""The table of optimizers, by ``optimizer.kind`` of a recipe.

optimizer section, precision mode --optimizer_spec--> OptimizerSpec
local parameters too --build_optimizer--> Optimizer
"""

from collections.abc import Sequence
from typing import Any

from hlat.config import OptimizerConfig, OwnOptimizerConfig
from hlat.model import LocalParameter
from hlat.optim.adamw import AdamWSpec
from hlat.optim.base import Optimizer, OptimizerSpec, WholeMatrices
from hlat.optim.muon import MuonSpec
from hlat.optim.own import own_spec

_SPECS: dict[str, type[OptimizerSpec[Any]]] = {"adamw": AdamWSpec, "muon": MuonSpec}


def optimizer_spec(config: OptimizerConfig, mode: str, in_hardware: bool = False) -> OptimizerSpec[Any]:
    """Return the description of a recipe's optimizer; ``in_hardware``: the device rounds stochastically."""
    if isinstance(config, OwnOptimizerConfig):
        return own_spec(config, mode, in_hardware)
    return _SPECS[config.kind](config, mode, in_hardware)  # type: ignore[attr-defined]


def build_optimizer(
    parameters: Sequence[LocalParameter],
    config: OptimizerConfig,
    mode: str = "fp32",
    seed: int = 0,
    matrices: WholeMatrices | None = None,
    in_hardware: bool = False,
) -> Optimizer:
    """Build the optimizer of local parameters; ``matrices`` is None if this process stores all unsharded."""
    return optimizer_spec(config, mode, in_hardware).build(parameters, seed, matrices)
