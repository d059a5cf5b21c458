"""The initial weights: a pure function of (seed, canonical name, element index).

    seed, "model.layers.0.mlp.down_proj.weight", element i -> normal number i of that stream * std

HLAT's rule (arXiv 2404.10630 and awslabs/HLAT): matrices and embeddings Normal(0, std); the projections that
write into the residual stream, attention output and feed-forward down, std / sqrt(2 * layers) (Radford et al. 2019,
section 2.3); norms one, biases zero. An element's index is its row-major place in the canonical, unfused, unsharded
tensor, so neither coalescing nor sharding nor the size of a chunk can change a bit.
"""

import math

import torch
from torch import nn

from hlat.config import ModelConfig
from hlat.model.layout import RowLayout, Run, parameter_layouts
from hlat.runtime import normal_range, stream_key

_CHUNK = 1 << 22  # elements drawn at a time: 16 MiB of fp32 beside the weights


def initial_std(config: ModelConfig, canonical_name: str) -> float | None:
    """Standard deviation of a canonical tensor's initial values; None for norms (ones) and biases (zeros)."""
    if canonical_name.endswith(("norm.weight", ".bias")):
        return None
    if canonical_name.endswith(("o_proj.weight", "down_proj.weight")) and config.init_scaled_outputs:
        return config.init_std / math.sqrt(2 * config.layers)
    return config.init_std


def initial_rows(config: ModelConfig, seed: int, name: str, start: int, stop: int) -> torch.Tensor:
    """Initial values of the rows ``start <= row < stop`` of a parameter of ours: fp32, on the CPU.

    Args:
        config: the model.
        seed: the run's.
        name: the parameter's name in the module, such as "layers.3.attention.qkv.weight".
        start, stop: global rows, of the whole parameter.
    """
    return _rows(config, seed, parameter_layouts(config)[name], start, stop)


def _rows(config: ModelConfig, seed: int, layout: RowLayout, start: int, stop: int) -> torch.Tensor:
    width = math.prod(layout.columns)
    out = torch.empty(stop - start, width)
    for run in layout.runs(start, stop):
        out[run.start - start : run.start - start + run.count] = _values(config, seed, run, width)
    return out.view(stop - start, *layout.columns)


def _values(config: ModelConfig, seed: int, run: Run, width: int) -> torch.Tensor:
    std = initial_std(config, run.name)
    if std is None:
        return torch.full((run.count, width), 0.0 if run.name.endswith(".bias") else 1.0)
    first = run.canonical_start * width
    values = normal_range(stream_key(seed, "init", run.name), first, first + run.count * width)
    return values.mul_(std).view(run.count, width)


@torch.no_grad()
def initialise(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fill every parameter in place, some rows at a time, whatever its device and dtype."""
    layouts = parameter_layouts(config)
    for name, parameter in model.named_parameters():
        layout = layouts[name]
        step = max(1, _CHUNK // math.prod(layout.columns))
        for start in range(0, layout.rows, step):
            stop = min(start + step, layout.rows)
            parameter[start:stop].copy_(_rows(config, seed, layout, start, stop))
