"""Checkpoints as NeuronX Distributed writes them, from canonical weights, by the formulas of its documentation.

A full matrix of a column-parallel layer with stride s is cut into s * ranks pieces; rank r has pieces r, r + ranks, ...
"""

import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hlat.config.sections.model import ModelConfig


@dataclass(frozen=True)
class NxdLayout:
    """Layout of a checkpoint: degrees, how often keys are repeated and in which order, and how q, k, v are fused."""

    tensor: int
    pipeline: int
    copies: int = 1
    blocked: bool = False
    fusion: str = "stride"  # or "separate" (weight_q, ...), "one" (weight_qkv), "none" (q_proj, ...)
    references: bool = True


def column_parallel(full: torch.Tensor, rank: int, ranks: int, stride: int = 1) -> torch.Tensor:
    pieces = full.chunk(stride * ranks)
    return torch.cat(pieces[rank::ranks])


def query_heads(config: ModelConfig, layout: NxdLayout, rank: int) -> list[int]:
    """Canonical query heads of a rank, which belong to its key heads."""
    per_copy = config.heads // (config.n_kv_heads * layout.copies)
    found = []
    for position in stored_keys(config, layout, rank):
        key, copy = key_and_copy(config, layout, position)
        first = key * (config.heads // config.n_kv_heads) + copy * per_copy
        found += range(first, first + per_copy)
    return found


def stored_keys(config: ModelConfig, layout: NxdLayout, rank: int) -> range:
    """Positions, among the repeated key heads, of those that a rank has."""
    count = config.n_kv_heads * layout.copies // layout.tensor
    return range(rank * count, (rank + 1) * count)


def key_and_copy(config: ModelConfig, layout: NxdLayout, position: int) -> tuple[int, int]:
    if layout.blocked:
        return divmod(position, layout.copies)
    copy, key = divmod(position, config.n_kv_heads)
    return key, copy


def heads_of(full: torch.Tensor, heads: list[int], width: int) -> torch.Tensor:
    return full.unflatten(0, (-1, width))[heads].flatten(0, 1)


def rank_state(
    config: ModelConfig, weights: Mapping[str, torch.Tensor], layout: NxdLayout, rank: int, stage: int
) -> dict[str, torch.Tensor]:
    """State dictionary of a rank."""
    ranks, width = layout.tensor, config.n_head_dim
    state: dict[str, torch.Tensor] = {}
    if stage == 0:
        state["model.embed_tokens.weight"] = column_parallel(weights["model.embed_tokens.weight"], rank, ranks)
    per_stage = config.layers // layout.pipeline
    for layer in range(stage * per_stage, (stage + 1) * per_stage):
        here = f"model.layers.{layer}."
        q, k, v, o = (weights[f"{here}self_attn.{name}_proj.weight"] for name in "qkvo")
        state |= _attention(config, layout, rank, f"{here}self_attn.", q, k, v)
        queries = query_heads(config, layout, rank)
        state[f"{here}self_attn.o_proj.weight"] = heads_of(o.T, queries, width).T.contiguous()
        gate, up = (weights[f"{here}mlp.{name}_proj.weight"] for name in ("gate", "up"))
        state[f"{here}mlp.gate_up_proj.weight"] = column_parallel(torch.cat([gate, up]), rank, ranks, stride=2)
        state[f"{here}mlp.down_proj.weight"] = weights[f"{here}mlp.down_proj.weight"].chunk(ranks, 1)[rank].contiguous()
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            state[here + norm] = weights[here + norm]
        state[f"{here}self_attn.rotary_emb.inv_freq"] = torch.ones(width // 2)
    if stage == layout.pipeline - 1:
        state["model.norm.weight"] = weights["model.norm.weight"]
        state["lm_head.weight"] = column_parallel(weights["lm_head.weight"], rank, ranks)
    return state


def _attention(
    config: ModelConfig, layout: NxdLayout, rank: int, here: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> dict[str, torch.Tensor]:
    if layout.fusion == "stride":
        return {f"{here}qkv_proj.weight": column_parallel(torch.cat([q, k, v]), rank, layout.tensor, stride=3)}
    width = config.n_head_dim
    keys = [key_and_copy(config, layout, position)[0] for position in stored_keys(config, layout, rank)]
    local = (heads_of(q, query_heads(config, layout, rank), width), heads_of(k, keys, width), heads_of(v, keys, width))
    if layout.fusion == "one":
        return {f"{here}qkv_proj.weight_qkv": torch.cat(local)}
    form = "qkv_proj.weight_{}" if layout.fusion == "separate" else "{}_proj.weight"
    return {here + form.format(name): tensor for name, tensor in zip("qkv", local, strict=True)}


def write(
    folder: Path, config: ModelConfig, weights: Mapping[str, torch.Tensor], layout: NxdLayout, patch: pytest.MonkeyPatch
) -> Path:
    """Write the files of all ranks, and of a second data-parallel rank that differs, as an optimizer's would."""
    (folder / "model").mkdir(parents=True)
    for stage in range(layout.pipeline):
        for rank in range(layout.tensor):
            state = rank_state(config, weights, layout, rank, stage)
            ending = f"tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt"
            save(folder / "model" / f"dp_rank_00_{ending}", state, layout.references, patch)
            torch.save({}, folder / "model" / f"dp_rank_01_{ending}")
    (folder / "checkpoint").touch()
    (folder / "done").touch()
    return folder


def save(path: Path, state: Mapping[str, torch.Tensor], references: bool, patch: pytest.MonkeyPatch) -> None:
    """Write the file of a rank; with references, each tensor to a file of its own."""
    if not references:
        torch.save(dict(state), path)
        return
    kind = reference_class(patch)
    place = path.with_name(f"{path.name}.tensors")
    place.mkdir()
    for index, tensor in enumerate(state.values()):
        torch.save(tensor, place / f"tensor_{index}.pt")
    torch.save({name: kind(index) for index, name in enumerate(state)}, path)
    shapes = {index: {"dtype": tensor.dtype, "shape": tensor.shape} for index, tensor in enumerate(state.values())}
    torch.save(shapes, path.with_name(f"{path.name}.info.pt"))


def reference_class(patch: pytest.MonkeyPatch) -> type[Any]:
    """A class with the name of torch_xla's reference, of which only name and fields are in the files."""
    module = types.ModuleType("torch_xla.utils.serialization")

    class TensorReference:
        def __init__(self, tid: int) -> None:
            self.tid = tid

    TensorReference.__module__, TensorReference.__qualname__ = module.__name__, "TensorReference"
    module.TensorReference = TensorReference  # type: ignore[attr-defined]
    for name in ("torch_xla", "torch_xla.utils"):
        patch.setitem(sys.modules, name, types.ModuleType(name))
    patch.setitem(sys.modules, module.__name__, module)
    return TensorReference
