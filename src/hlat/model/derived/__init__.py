"""Quantities derived from the model section: row layout of parameters, parameter and FLOP counts, activation bytes."""

from typing import TYPE_CHECKING

from hlat.model.spec import RECOMPUTABLE
from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.model.derived.activations import RankWorkload, activation_bytes
    from hlat.model.derived.axes import axis_share, element_share
    from hlat.model.derived.counts import (
        attended_positions,
        block_share,
        count_parameters,
        flops_per_token,
        forward_flops_per_token,
        hidden_share,
    )
    from hlat.model.derived.parameter_layout import RowBlock, RowLayout, RowRun, parameter_layouts

__getattr__ = lazily(
    __name__,
    {
        "activations": (
            "RankWorkload",
            "activation_bytes",
        ),
        "axes": (
            "axis_share",
            "element_share",
        ),
        "counts": (
            "attended_positions",
            "block_share",
            "count_parameters",
            "flops_per_token",
            "forward_flops_per_token",
            "hidden_share",
        ),
        "parameter_layout": (
            "RowBlock",
            "RowLayout",
            "RowRun",
            "parameter_layouts",
        ),
    },
)

__all__ = [
    "RECOMPUTABLE",
    "RankWorkload",
    "RowBlock",
    "RowLayout",
    "RowRun",
    "activation_bytes",
    "attended_positions",
    "axis_share",
    "block_share",
    "count_parameters",
    "element_share",
    "flops_per_token",
    "forward_flops_per_token",
    "hidden_share",
    "parameter_layouts",
]
