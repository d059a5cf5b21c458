"""Parameters for optimizer tests: a small model in any sharding, filled by position in the canonical tensors."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import nn

from hlat.config.sections.model import ModelConfig
from hlat.model import Decoder, LocalParameter, ModelShard, collect_local_parameters
from hlat.model.parameter_layout import CanonicalTensor, RowLayout, canonical_shapes
from hlat.model.spec import Axis, Component, GradientSum, TensorSpec
from hlat.runtime.random_keys import stream_key
from hlat.runtime.randomness import normal_block

PLAIN = {"vocab_size": 37, "layers": 1, "hidden_size": 24, "intermediate_size": 40, "heads": 4, "kv_heads": 2}
BIASED = PLAIN | {"qkv_bias": True, "qk_norm": True, "head_dim": 6}


def config_of(**changes: object) -> ModelConfig:
    return ModelConfig.model_validate(BIASED | changes)


def plain_parameters(net: nn.Module) -> list[LocalParameter]:
    """Local parameters of any module; each is a canonical tensor with the parameter's name."""
    return [
        LocalParameter(
            name,
            parameter,
            RowLayout((CanonicalTensor(name, parameter.shape[0], _spec_of(parameter)),), 1, tuple(parameter.shape[1:])),
            0,
            True,
            config_of(),
        )
        for name, parameter in net.named_parameters()
    ]


def _spec_of(parameter: nn.Parameter) -> TensorSpec:
    columns = Axis.WIDTH if parameter.ndim > 1 else None
    return TensorSpec("plain", Axis.WIDTH, columns, Component.HEAD, gradient_sum=GradientSum.SEQUENCE)


def shard_model(config: ModelConfig, shard: ModelShard, cuts: Sequence[float] = ()) -> list[list[LocalParameter]]:
    """Build a model shard in bf16 and split each parameter by rows at some fractions: a list for each process."""
    with torch.device("meta"):
        model = Decoder(config, shard).to(torch.bfloat16)
    parameters = collect_local_parameters(model.to_empty(device="cpu"))
    edges = [0.0, *sorted(cuts), 1.0]
    return [[_rows(each, low, high) for each in parameters] for low, high in pairwise(edges)]


def _rows(parameter: LocalParameter, low: float, high: float) -> LocalParameter:
    """Select the rows between two fractions of all; there may be none."""
    rows = parameter.tensor.shape[0]
    first, stop = round(low * rows), round(high * rows)
    return replace(parameter, parameter=nn.Parameter(parameter.tensor[first:stop].clone()), first_row=first)


_normals = functools.cache(normal_block)


def fill(parameter: LocalParameter, tensor: torch.Tensor, purpose: str, scale: float = 1.0) -> None:
    """Fill a tensor of the local shape with normal values that depend only on the index in the canonical tensors."""
    layout = parameter.layout
    columns = layout.columns[0] if layout.columns else 1
    for run in layout.runs(parameter.first_row, parameter.first_row + tensor.shape[0]):
        key = stream_key(0, purpose, run.name)
        row_size = (layout.row_size or columns) if layout.columns else 1
        values = _normals(key, run.canonical_start, run.count, row_size, layout.first_column, columns)
        tensor[run.start - parameter.first_row :][: run.count] = (
            (scale * values).view(-1, *tensor.shape[1:]).to(tensor.dtype)
        )


@torch.no_grad()
def fill_weights(parameters: Sequence[LocalParameter]) -> None:
    for parameter in parameters:
        fill(parameter, parameter.tensor, "weights", 0.1)


@torch.no_grad()
def fill_gradients(parameters: Sequence[LocalParameter], step: int) -> None:
    for parameter in parameters:
        parameter.parameter.grad = torch.empty_like(parameter.parameter)
        fill(parameter, parameter.parameter.grad, f"gradients of {step}")


Tensors = dict[str, torch.Tensor]


def canonical(
    config: ModelConfig,
    parameters: Sequence[LocalParameter],
    tensor_of: Callable[[LocalParameter], torch.Tensor],
    into: Tensors,
) -> Tensors:
    """Copy local tensors into canonical ones, next to those of other shards.

    Copies of the same rows in several shards have to be equal.
    """
    shapes = canonical_shapes(config)
    for parameter in parameters:
        tensor, layout = tensor_of(parameter), parameter.layout
        for run in layout.runs(parameter.first_row, parameter.first_row + tensor.shape[0]):
            if run.name not in into:
                into[run.name] = torch.full(shapes[run.name], torch.nan, dtype=torch.float32)
            target = into[run.name][run.canonical_start : run.canonical_start + run.count]
            if layout.columns:
                target = target[:, layout.first_column : layout.first_column + layout.columns[0]]
            values = tensor[run.start - parameter.first_row :][: run.count].float()
            assert bool((target.isnan() | (target == values)).all()), f"{run.name}: two copies differ"
            target.copy_(values)
    return into
