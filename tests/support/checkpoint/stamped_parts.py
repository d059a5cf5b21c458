"""A state whose elements encode their canonical positions, sharded by any layout, in one process.

layout --processes--> local parameters of each of its processes --stamp--> filled by canonical position
"""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hlat.config.sections.model import ModelConfig
from hlat.config.sections.training import AdamWConfig
from hlat.model import Decoder, LocalParameter, ModelShard, collect_local_parameters, local
from hlat.model.parameter_layout import canonical_shapes
from hlat.optim import build_optimizer

FIELDS: dict[str, Any] = {
    "vocab_size": 61,
    "layers": 3,
    "hidden_size": 24,
    "intermediate_size": 40,
    "heads": 4,
    "kv_heads": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"kv_heads": 4},
    "mqa, tied": {"kv_heads": 1, "tie_embeddings": True},
    "bias, qk norm": {"qkv_bias": True, "qk_norm": True, "head_dim": 8},
    "tied": {"tie_embeddings": True},
}
KINDS = ("model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")


def config_of(family: str, coalesce: bool = True) -> ModelConfig:
    return ModelConfig.model_validate(FIELDS | FAMILIES[family] | {"coalesce": coalesce})


@dataclass(frozen=True)
class Layout:
    """Parallel layout: tensor-parallel shards of pipeline stages, their rows sharded like FSDP2 does, and replicas."""

    tensor: int = 1
    stages: tuple[int, ...] = (3,)  # layers per stage
    shards: int = 1
    replicas: int = 1

    def model_shards(self) -> list[ModelShard]:
        """List the model shards, stage by stage."""
        firsts = [sum(self.stages[:index]) for index in range(len(self.stages))]
        return [
            ModelShard(index, self.tensor, range(first, first + count), first == 0, first + count == sum(self.stages))
            for first, count in zip(firsts, self.stages, strict=True)
            for index in range(self.tensor)
        ]


@dataclass(frozen=True)
class Process:
    """Local parameters and optimizer of one process."""

    held: list[LocalParameter]
    optimizer: torch.optim.AdamW


def processes(config: ModelConfig, layout: Layout, dtype: torch.dtype = torch.float32) -> list[Process]:
    """Create all processes of a layout; their values are arbitrary."""
    made = []
    for part in layout.model_shards():
        with torch.device("meta"):
            model = Decoder(config, part).to(dtype)
        held = collect_local_parameters(model.to_empty(device="cpu"))
        for replica in range(layout.replicas):
            for index in range(layout.shards):
                made.append(add_optimizer([shard(parameter, index, layout.shards, replica == 0) for parameter in held]))
    return made


def add_optimizer(held: list[LocalParameter]) -> Process:
    """Create the optimizer of local parameters, with AdamW's moments as after a step."""
    optimizer = build_optimizer(held, AdamWConfig(lr=0.01))
    for local_parameter in held:
        moments = {name: torch.zeros_like(local_parameter.parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[local_parameter.parameter] = {"step": torch.tensor(5.0)} | moments
    return Process(held, optimizer)


def shard(full: LocalParameter, index: int, count: int, owned: bool) -> LocalParameter:
    """Take the rows that one of ``count`` processes stores, possibly none, as a parameter of its own."""
    rows = full.tensor.shape[0]
    size = -(-rows // count)
    first, stop = min(index * size, rows), min((index + 1) * size, rows)
    parameter = nn.Parameter(full.tensor[first:stop].clone())
    return replace(full, parameter=parameter, first_row=first, owned=owned)


def saved_tensors(process: Process) -> Iterable[tuple[str, LocalParameter, torch.Tensor]]:
    """Yield every local tensor that is saved: prefix of its names, parameter, tensor."""
    for parameter in process.held:
        yield KINDS[0], parameter, parameter.tensor
        for kind, moment in zip(KINDS[1:], ("exp_avg", "exp_avg_sq"), strict=True):
            yield kind, parameter, local(process.optimizer.state[parameter.parameter][moment])


@torch.no_grad()
def stamp(process: Process, salt: int) -> None:
    """Set every element to the value of its position in the canonical tensors."""
    for kind, parameter, tensor in saved_tensors(process):
        tensor.copy_(expected_local(kind, parameter, tensor, salt))


def expected_local(kind: str, parameter: LocalParameter, tensor: torch.Tensor, salt: int) -> torch.Tensor:
    """Values of a stamped local tensor."""
    out = torch.empty_like(tensor)
    width, first = (parameter.layout.columns or (1,))[0], parameter.layout.first_column
    for run in parameter.layout.runs(parameter.first_row, parameter.first_row + tensor.shape[0]):
        rows = torch.arange(run.canonical_start, run.canonical_start + run.count)[:, None]
        positions = rows * (parameter.layout.row_size or width) + torch.arange(first, first + width)
        target = out[run.start - parameter.first_row : run.start - parameter.first_row + run.count]
        target.copy_(values(f"{kind}{run.name}", positions, salt).view(target.shape))
    return out


def values(name: str, positions: torch.Tensor, salt: int) -> torch.Tensor:
    """Pseudo-random float32 values, by tensor name and row-major position."""
    mixed = (positions + zlib.crc32(f"{salt} {name}".encode())) * 0x9E3779B1 % (1 << 32)
    return mixed.double().div(1 << 31).sub(1).float()


def expected(config: ModelConfig, salt: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The stamped state as canonical tensors, computed without a layout."""
    return {
        kind + name: values(kind + name, torch.arange(torch.Size(shape).numel()), salt).view(shape).to(dtype)
        for kind in KINDS
        for name, shape in canonical_shapes(config).items()
    }
