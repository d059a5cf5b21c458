"""Smaller models of a recipe's form: heads of the same width, and the same ratios between all sizes.

    ModelConfig --smaller_shapes--> every Shape below half of its parameters, of about its ratio of width to depth
    parameters --nearest--> the Shape of about that size whose ratios are nearest to the target's

Sizes are compared by the parameters of blocks: those of embedding and head hardly depend on the width that one would
choose, and are most of a small model.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hlat.config import ModelConfig
from hlat.model import count_parameters

_DEPTHS = (0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5)  # times the depth that keeps the ratio of width to depth
_WIDTHS = 32  # at most so many, evenly spaced
_LARGEST = 0.5  # of the target's blocks: a larger model would cost as much as it
_RATIO_WEIGHT = 1.0  # of a wrong ratio, beside a wrong size; a precaution, not measured (docs/notebook/forecasts.md)


@dataclass(frozen=True)
class Shape:
    """Sizes of a smaller model."""

    fields: Mapping[str, Any]  # of the model section
    parameters: int  # all of them
    block_parameters: int  # without embedding and head
    distortion: float = 0.0  # 0 if every ratio is the target's

    @property
    def name(self) -> str:
        return f"{self.fields['hidden_size']}x{self.fields['layers']}"

    def of(self, model: ModelConfig) -> ModelConfig:
        """Return a model with these sizes."""
        return model.model_copy(update=dict(self.fields))


def smaller_shapes(model: ModelConfig) -> list[Shape]:
    """List models of the same form with at most half of the parameters, the smallest first."""
    limit, found = _LARGEST * block_parameters(model), []
    for heads in range(1, model.heads + 1, max(1, model.heads // _WIDTHS)):
        width, rest = divmod(model.hidden_size * heads, model.heads)
        if rest:
            continue
        exact = model.layers * width / model.hidden_size
        for layers in sorted({max(1, round(exact * depth)) for depth in _DEPTHS}):
            fields = _fields(model, heads, width, layers)
            wrong_depth, wrong_group = layers / exact, heads / fields["kv_heads"] / (model.heads / model.n_kv_heads)
            distortion = math.log(wrong_depth) ** 2 + math.log(wrong_group) ** 2
            smaller = model.model_copy(update=fields)
            blocks = block_parameters(smaller)
            cut = first_layers(model, layers)
            if blocks <= limit and all(set(kinds) == set(getattr(model, name)) for name, kinds in cut.items()):
                found.append(Shape(fields, count_parameters(smaller).total, blocks, distortion))
    return sorted(found, key=lambda shape: shape.block_parameters)


def block_parameters(model: ModelConfig) -> int:
    """Count the parameters of a model without those of embedding and head."""
    counts = count_parameters(model)
    return int(counts.total - counts.embedding - counts.head)


def first_layers(model: ModelConfig, layers: int) -> dict[str, Any]:
    """Return the patterns of a model as those of one with fewer layers, which has their beginning."""
    given = {"layer_types": model.layer_types, "rope_layers": model.rope_layers}
    return {name: kinds[:layers] for name, kinds in given.items() if kinds}


def _fields(model: ModelConfig, heads: int, width: int, layers: int) -> dict[str, Any]:
    # Of few heads no group may be as large as the target's.
    groups = heads * model.n_kv_heads / model.heads
    kv_heads = max(each for each in range(1, heads + 1) if heads % each == 0 and each <= max(1, groups))
    step = 8 if model.intermediate_size % 8 == 0 else 1  # kernels want multiples
    return {
        "hidden_size": width,
        "layers": layers,
        "intermediate_size": max(step, step * round(model.intermediate_size * width / model.hidden_size / step)),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": model.n_head_dim,
        **first_layers(model, layers),
    }


def nearest(found: Sequence[Shape], parameters: float) -> Shape:
    """Return the shape with about so many parameters in blocks: by ratio, so that twice as many is as far as half."""
    return min(found, key=lambda one: math.log(one.block_parameters / parameters) ** 2 + _RATIO_WEIGHT * one.distortion)
