"""Parameters to step: those of a small model in any share of it, filled by their place in the canonical tensors."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import nn

from hlat.config.sections import ModelConfig
from hlat.model import Decoder, LocalParameter, ModelShard, collect_local_parameters
from hlat.model.derived import RowLayout
from hlat.model.derived.parameter_layout import CanonicalTensor
from hlat.model.hf import canonical_shapes
from hlat.runtime.randomness import normal_block, stream_key

PLAIN = {"vocab_size": 37, "layers": 1, "hidden_size": 24, "intermediate_size": 40, "heads": 4, "kv_heads": 2}
BIASED = PLAIN | {"qkv_bias": True, "qk_norm": True, "head_dim": 6}


def config_of(**changes: object) -> ModelConfig:
    return ModelConfig.model_validate(BIASED | changes)


def plain_held(net: nn.Module) -> list[LocalParameter]:
    """The parameters of any module, each a canonical tensor of its own name."""
    return [
        LocalParameter(
            name,
            parameter,
            RowLayout((CanonicalTensor(name, parameter.shape[0]),), 1, tuple(parameter.shape[1:])),
            0,
            True,
        )
        for name, parameter in net.named_parameters()
    ]


def share(config: ModelConfig, part: ModelShard, cuts: Sequence[float] = ()) -> list[list[LocalParameter]]:
    """The parameters of a part of a model in bf16, each cut by rows at these fractions: a list for each process."""
    with torch.device("meta"):
        model = Decoder(config, part).to(torch.bfloat16)
    held = collect_local_parameters(model.to_empty(device="cpu"))
    edges = [0.0, *sorted(cuts), 1.0]
    return [[_rows(one, low, high) for one in held] for low, high in pairwise(edges)]


def _rows(one: LocalParameter, low: float, high: float) -> LocalParameter:
    """The rows between two fractions of all; there may be none."""
    rows = one.tensor.shape[0]
    first, stop = round(low * rows), round(high * rows)
    return replace(one, parameter=nn.Parameter(one.tensor[first:stop].clone()), first_row=first)


_normals = functools.cache(normal_block)


def fill(one: LocalParameter, tensor: torch.Tensor, purpose: str, scale: float = 1.0) -> None:
    """Give a tensor of the local shape normal values that depend on the place in the canonical tensors alone."""
    layout = one.layout
    columns = layout.columns[0] if layout.columns else 1
    for run in layout.runs(one.first_row, one.first_row + tensor.shape[0]):
        key = stream_key(0, purpose, run.name)
        row_size = (layout.row_size or columns) if layout.columns else 1
        values = _normals(key, run.canonical_start, run.count, row_size, layout.first_column, columns)
        tensor[run.start - one.first_row :][: run.count] = (scale * values).view(-1, *tensor.shape[1:]).to(tensor.dtype)


@torch.no_grad()
def fill_weights(held: Sequence[LocalParameter]) -> None:
    for one in held:
        fill(one, one.tensor, "weights", 0.1)


@torch.no_grad()
def fill_gradients(held: Sequence[LocalParameter], step: int) -> None:
    for one in held:
        one.parameter.grad = torch.empty_like(one.parameter)
        fill(one, one.parameter.grad, f"gradients of {step}")


Tensors = dict[str, torch.Tensor]


def canonical(
    config: ModelConfig,
    held: Sequence[LocalParameter],
    tensor_of: Callable[[LocalParameter], torch.Tensor],
    into: Tensors,
) -> Tensors:
    """Put local tensors where they belong in canonical ones, beside what is there of other shares already.

    What several shares hold has to be the same in all.
    """
    whole = canonical_shapes(config)
    for one in held:
        tensor, layout = tensor_of(one), one.layout
        for run in layout.runs(one.first_row, one.first_row + tensor.shape[0]):
            if run.name not in into:
                into[run.name] = torch.full(whole[run.name], torch.nan, dtype=torch.float32)
            place = into[run.name][run.canonical_start : run.canonical_start + run.count]
            if layout.columns:
                place = place[:, layout.first_column : layout.first_column + layout.columns[0]]
            values = tensor[run.start - one.first_row :][: run.count].float()
            assert bool((place.isnan() | (place == values)).all()), f"{run.name}: two copies differ"
            place.copy_(values)
    return into
