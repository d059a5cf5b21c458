"""The optimizer section of a recipe: one class per ``optimizer.kind``, and their union.

    optimizer: {kind: NAME, ...}  --> the section class of NAME; a section without kind is adamw's

``hlat.optim.table`` has the implementation of each kind.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from hlat.config.sections.base import fixed
from hlat.config.sections.training import OptimizerConfig

__all__ = ["AdamWConfig", "AnyOptimizerConfig", "MuonConfig"]


class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov and Hutter 2019) and gradient clipping."""

    kind: Literal["adamw"] = fixed("adamw")
    """Name of the optimizer."""


class MuonConfig(OptimizerConfig):
    """Muon (Jordan et al. 2024; Liu et al. 2025) for the matrices of attention and feed-forward layers."""

    kind: Literal["muon"] = fixed(formerly="adamw")
    """Name of the optimizer."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay rate of the momentum."""
    nesterov: bool = True
    """Use Nesterov's momentum, which looks one step ahead."""
    ns_steps: int = Field(5, ge=1, le=20)
    """Newton-Schulz iterations of an update; fewer than 5 leave many singular values far from 1."""
    adamw_lr: float | None = Field(None, gt=0)
    """Peak learning rate of AdamW for embeddings, head, norms and biases; null for lr, which suits both."""


def _kind_of(section: Any) -> Any:
    """Return the kind that a section states; adamw if it states none."""
    return section.get("kind", "adamw") if isinstance(section, dict) else getattr(section, "kind", "adamw")


AnyOptimizerConfig = Annotated[
    Annotated[AdamWConfig, Tag("adamw")] | Annotated[MuonConfig, Tag("muon")],
    Discriminator(_kind_of),
]
"""Section of any optimizer."""
