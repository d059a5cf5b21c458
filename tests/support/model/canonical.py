"""Whole models under module names and under canonical names, converted by the row layouts of their parameters."""

from collections.abc import Mapping

import torch

from hlat.config import ModelConfig
from hlat.model.parameter_layout import RowLayout, canonical_shapes, check_canonical, parameter_layouts


def split(layout: RowLayout, fused: torch.Tensor) -> dict[str, torch.Tensor]:
    """Split a parameter into its canonical tensors; copies if it is fused."""
    if len(layout.tensors) == 1:
        return {layout.tensors[0].name: fused}
    grouped = fused.unflatten(0, (layout.groups, -1))
    grouped_rows = grouped.split([tensor.rows_per_group for tensor in layout.tensors], dim=1)
    return {
        tensor.name: rows.flatten(0, 1).contiguous() for tensor, rows in zip(layout.tensors, grouped_rows, strict=True)
    }


def fuse(layout: RowLayout, canonical: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Make a parameter of its canonical tensors."""
    if len(layout.tensors) == 1:
        return canonical[layout.tensors[0].name]
    grouped = [canonical[tensor.name].unflatten(0, (layout.groups, -1)) for tensor in layout.tensors]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def to_canonical(config: ModelConfig, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert complete tensors under parameter names to canonical tensors."""
    layouts = parameter_layouts(config)
    return {name: rows for each, fused in named.items() for name, rows in split(layouts[each], fused).items()}


def from_canonical(config: ModelConfig, canonical: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert canonical tensors to tensors under parameter names; CheckpointError as in ``check_canonical``."""
    check_canonical(canonical_shapes(config), canonical)
    return {name: fuse(layout, canonical) for name, layout in parameter_layouts(config).items()}
