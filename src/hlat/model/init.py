"""The initial weights: a pure function of (seed, canonical name, element index).

    seed, "model.layers.0.mlp.down_proj.weight", element i -> normal number i of that stream * std

HLAT's rule (arXiv 2404.10630 and awslabs/HLAT): matrices and embeddings Normal(0, std); the projections that
write into the residual stream, attention output and feed-forward down, std / sqrt(2 * layers) (Radford et al. 2019,
section 2.3); norms one, biases zero. An element's index is its row-major place in the canonical, unfused, unsharded
tensor, so neither coalescing nor sharding nor the size of a chunk can change a bit.
"""

import math
from collections.abc import Iterable

import torch

from hlat.config.sections import ModelConfig
from hlat.model.derived import RowLayout, RowRun
from hlat.model.local_parameters import LocalParameter
from hlat.runtime.randomness import normal_block, stream_key

_CHUNK = 1 << 22  # elements drawn at a time: 16 MiB of fp32 beside the weights


def initial_std(config: ModelConfig, canonical_name: str) -> float | None:
    """Standard deviation of a canonical tensor's initial values; None for norms (ones) and biases (zeros)."""
    if canonical_name.endswith(("norm.weight", ".bias")):
        return None
    if canonical_name.endswith(("o_proj.weight", "down_proj.weight")) and config.init_scaled_outputs:
        return config.init_std / math.sqrt(2 * config.layers)
    return config.init_std


def initial_rows(config: ModelConfig, seed: int, layout: RowLayout, start: int, stop: int) -> torch.Tensor:
    """Initial values of the rows ``start <= row < stop`` of a parameter, or of a share of one: fp32, on the CPU.

    Args:
        config: the model.
        seed: the run's.
        layout: of the parameter, from ``parameter_layouts``.
        start, stop: rows of the layout.
    """
    width = math.prod(layout.columns)
    out = torch.empty(stop - start, width)
    for run in layout.runs(start, stop):
        out[run.start - start : run.start - start + run.count] = _values(config, seed, layout, run, width)
    return out.view(stop - start, *layout.columns)


def _values(config: ModelConfig, seed: int, layout: RowLayout, run: RowRun, width: int) -> torch.Tensor:
    std = initial_std(config, run.name)
    if std is None:
        return torch.full((run.count, width), 0.0 if run.name.endswith(".bias") else 1.0)
    key = stream_key(seed, "init", run.name)
    values = normal_block(key, run.canonical_start, run.count, layout.row_size or width, layout.first_column, width)
    return values.mul_(std)


@torch.no_grad()
def initialise(held: Iterable[LocalParameter], config: ModelConfig, seed: int) -> None:
    """Fill every parameter in place, some rows at a time, whatever its device, dtype and sharding."""
    for one in held:
        step = max(1, _CHUNK // math.prod(one.layout.columns))
        rows = one.tensor
        for start in range(0, rows.shape[0], step):
            stop = min(start + step, rows.shape[0])
            values = initial_rows(config, seed, one.layout, one.first_row + start, one.first_row + stop)
            rows[start:stop].copy_(values)
