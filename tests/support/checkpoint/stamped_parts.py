"""A state whose every element says where it belongs, held in any layout.

layout --processes--> what each process of it would hold, made in this one --stamp--> filled by canonical place
"""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hlat.config.sections import ModelConfig, OptimizerConfig
from hlat.model import Decoder, HeldParameter, ModelPart, held_parameters, local
from hlat.model.hf import canonical_shapes
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
class Cut:
    """A layout: tensor-parallel shares of stages, whose rows are sharded as FSDP2 does; the shards of all replicas."""

    tensor: int = 1
    stages: tuple[int, ...] = (3,)  # layers of each
    shards: int = 1
    replicas: int = 1

    def parts(self) -> list[ModelPart]:
        """The shares, stage by stage."""
        firsts = [sum(self.stages[:index]) for index in range(len(self.stages))]
        return [
            ModelPart(index, self.tensor, range(first, first + count), first == 0, first + count == sum(self.stages))
            for first, count in zip(firsts, self.stages, strict=True)
            for index in range(self.tensor)
        ]


@dataclass(frozen=True)
class Process:
    """What one process has."""

    held: list[HeldParameter]
    optimizer: torch.optim.AdamW


def processes(config: ModelConfig, cut: Cut, dtype: torch.dtype = torch.float32) -> list[Process]:
    """Every process of a layout, with unspecified content."""
    made = []
    for part in cut.parts():
        with torch.device("meta"):
            model = Decoder(config, part).to(dtype)
        held = held_parameters(model.to_empty(device="cpu"))
        for replica in range(cut.replicas):
            for index in range(cut.shards):
                made.append(with_optimizer([shard(one, index, cut.shards, replica == 0) for one in held]))
    return made


def with_optimizer(held: list[HeldParameter]) -> Process:
    """With AdamW's moments, as they are after a step."""
    optimizer = build_optimizer(held, OptimizerConfig(lr=0.01))
    for one in held:
        moments = {name: torch.zeros_like(one.parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[one.parameter] = {"step": torch.tensor(5.0)} | moments
    return Process(held, optimizer)


def shard(one: HeldParameter, index: int, count: int, owned: bool) -> HeldParameter:
    """The rows that one of several processes holds, as a parameter of its own; there may be none."""
    rows = one.tensor.shape[0]
    size = -(-rows // count)
    first, stop = min(index * size, rows), min((index + 1) * size, rows)
    parameter = nn.Parameter(one.tensor[first:stop].clone())
    return replace(one, parameter=parameter, first_row=first, owned=owned)


def tensors_of(process: Process) -> Iterable[tuple[str, HeldParameter, torch.Tensor]]:
    """Every local tensor that is saved, and what its names begin with."""
    for one in process.held:
        yield KINDS[0], one, one.tensor
        for kind, moment in zip(KINDS[1:], ("exp_avg", "exp_avg_sq"), strict=True):
            yield kind, one, local(process.optimizer.state[one.parameter][moment])


@torch.no_grad()
def stamp(process: Process, salt: int) -> None:
    """Give every element the value that belongs to its place in the canonical tensors."""
    for kind, one, tensor in tensors_of(process):
        tensor.copy_(local_expected(kind, one, tensor, salt))


def local_expected(kind: str, one: HeldParameter, tensor: torch.Tensor, salt: int) -> torch.Tensor:
    """What a stamped tensor holds."""
    out = torch.empty_like(tensor)
    width, first = (one.layout.columns or (1,))[0], one.layout.first_column
    for run in one.layout.runs(one.first_row, one.first_row + tensor.shape[0]):
        rows = torch.arange(run.canonical_start, run.canonical_start + run.count)[:, None]
        places = rows * (one.layout.row_size or width) + torch.arange(first, first + width)
        here = out[run.start - one.first_row : run.start - one.first_row + run.count]
        here.copy_(values(f"{kind}{run.name}", places, salt).view(here.shape))
    return out


def values(name: str, places: torch.Tensor, salt: int) -> torch.Tensor:
    """Scattered numbers, float32, by name and row-major place."""
    mixed = (places + zlib.crc32(f"{salt} {name}".encode())) * 0x9E3779B1 % (1 << 32)
    return mixed.double().div(1 << 31).sub(1).float()


def expected(config: ModelConfig, salt: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The stamped state as canonical tensors, made without any layout."""
    return {
        kind + name: values(kind + name, torch.arange(torch.Size(shape).numel()), salt).view(shape).to(dtype)
        for kind in KINDS
        for name, shape in canonical_shapes(config).items()
    }
