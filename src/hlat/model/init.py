"""Weight initialisation: a pure function of (seed, canonical name, element index).

    seed, "model.layers.0.mlp.down_proj.weight", element i -> i-th normal sample of that random stream * std

The distribution is HLAT's (arXiv 2404.10630 and awslabs/HLAT): matrices and embeddings Normal(0, std); the projections
that write into the residual stream (attention output and feed-forward down) Normal(0, std / sqrt(2 * layers)) (Radford
et al. 2019, section 2.3); norms one, biases zero. An element's index is its row-major index in the canonical (unfused,
unsharded) tensor, so coalescing, sharding and the chunk size do not change a single bit.
"""

import math
from collections.abc import Iterable

import torch

from hlat.config import ModelConfig
from hlat.model.derived.parameter_layout import RowLayout, RowRun
from hlat.model.local_parameters import LocalParameter
from hlat.model.spec import Initial
from hlat.runtime.randomness.philox_rng import normal_block
from hlat.runtime.randomness.rng_keys import stream_key

_CHUNK = 1 << 22  # elements drawn at a time: 16 MiB of fp32 in addition to the weights


_CONSTANTS = {Initial.ONES: 1.0, Initial.ZEROS: 0.0}


def initial_std(config: ModelConfig, initial: Initial) -> float:
    """Return the standard deviation of normal initial values."""
    if initial is Initial.RESIDUAL and config.init_scaled_outputs:
        return config.init_std / math.sqrt(2 * config.layers)
    return config.init_std


def initial_rows(config: ModelConfig, seed: int, layout: RowLayout, start: int, stop: int) -> torch.Tensor:
    """Compute the initial values of the rows ``start <= row < stop`` of a parameter or its shard: fp32, on the CPU.

    Args:
        config: the model.
        seed: seed of the run.
        layout: layout of the parameter or shard, from ``parameter_layouts``.
        start: first row, as a row of the layout.
        stop: row after the last.
    """
    width = math.prod(layout.columns)
    out = torch.empty(stop - start, width)
    for run in layout.runs(start, stop):
        out[run.start - start : run.start - start + run.count] = _run_values(config, seed, layout, run, width)
    return out.view(stop - start, *layout.columns)


def _run_values(config: ModelConfig, seed: int, layout: RowLayout, run: RowRun, width: int) -> torch.Tensor:
    initial = run.tensor.initial
    if initial in _CONSTANTS:
        return torch.full((run.count, width), _CONSTANTS[initial])
    key = stream_key(seed, "init", run.name)
    values = normal_block(key, run.canonical_start, run.count, layout.row_size or width, layout.first_column, width)
    return values.mul_(initial_std(config, initial))


@torch.no_grad()
def initialise(parameters: Iterable[LocalParameter], config: ModelConfig, seed: int) -> None:
    """Fill every parameter in place with its initial values, for any device, dtype and sharding."""
    for parameter in parameters:
        chunk = max(1, _CHUNK // math.prod(parameter.layout.columns))
        rows, layout, first = parameter.tensor, parameter.layout, parameter.first_row
        for start in range(0, rows.shape[0], chunk):
            stop = min(start + chunk, rows.shape[0])
            rows[start:stop].copy_(initial_rows(config, seed, layout, first + start, first + stop))
