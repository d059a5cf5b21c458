"""Which row of which Hugging Face tensor is row i of one of our parameters. The one place that knows.

    our parameter                     Hugging Face (canonical) tensors
    layers.0.attention.qkv.weight <-> model.layers.0.self_attn.{q,k,v}_proj.weight
    embedding.weight              <-> model.embed_tokens.weight

A fused matrix is laid out group by group; a group takes the next rows of each of its parts:

    qkv      one group per kv head:  [q heads of group 0 | k of group 0 | v of group 0 | q heads of group 1 | ...]
    gate_up  ``gate_up_groups``:     [block 0 of gate | block 0 of up | block 1 of gate | ...]

so any tensor-parallel shard of whole groups is a contiguous run of rows, works on its own, and meets the same rows of
the output projections as an unfused shard would. Initialisation, checkpoints, export and sharding all go through
``RowLayout``, never through arithmetic of their own.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from hlat.config import ModelConfig

_MOST_GROUPS = 64
_SMALLEST_BLOCK = 128


def gate_up_groups(config: ModelConfig) -> int:
    """Number of blocks into which gate and up are cut where they are one matrix.

    At least every degree that divides both kv heads and the intermediate size must divide it, so that where
    attention can be sharded the feed-forward can too; hence it starts at their gcd. It is then doubled as long as it
    divides the intermediate size, up to 64, for degrees above the number of kv heads (where kv heads are replicated:
    HLAT ran 8 of them on 32 ranks). A block stays at 128 rows or more in doing so: the activation reads gate and up
    with a stride of a block, which down to 128 costs nothing measurable on a CPU and at 96 twice the time in bf16.
    """
    inner = config.intermediate_size
    groups = math.gcd(config.n_kv_heads, inner)
    while 2 * groups <= _MOST_GROUPS and inner % (2 * groups) == 0 and inner // (2 * groups) >= _SMALLEST_BLOCK:
        groups *= 2
    return groups


@dataclass(frozen=True)
class Part:
    """A canonical tensor and how many of its rows a group holds."""

    name: str
    rows_per_group: int


@dataclass(frozen=True)
class Run:
    """``count`` consecutive rows of a parameter that are consecutive rows of a canonical tensor too."""

    name: str
    canonical_start: int
    start: int
    count: int


@dataclass(frozen=True)
class RowLayout:
    """One parameter of ours as rows of canonical tensors.

    Attributes:
        parts: the canonical tensors, in their order within a group.
        groups: how often the parts repeat.
        columns: the size of every dimension but the first; () for vectors.
    """

    parts: tuple[Part, ...]
    groups: int
    columns: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows of the parameter."""
        return self.groups * sum(part.rows_per_group for part in self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return (self.rows, *self.columns)

    @property
    def canonical_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each canonical tensor."""
        return {part.name: (self.groups * part.rows_per_group, *self.columns) for part in self.parts}

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        """The rows ``start <= row < stop`` of the parameter, in order, as runs of canonical rows."""
        period = self.rows // self.groups
        for group in range(start // period, -(-stop // period)):
            first = group * period
            for part in self.parts:
                low, high = max(start, first), min(stop, first + part.rows_per_group)
                if low < high:
                    yield Run(part.name, group * part.rows_per_group + low - first, low, high - low)
                first += part.rows_per_group

    def split(self, fused: torch.Tensor) -> dict[str, torch.Tensor]:
        """The canonical tensors of a whole parameter; the parameter itself where it has one part, else copies."""
        if len(self.parts) == 1:
            return {self.parts[0].name: fused}
        grouped = fused.unflatten(0, (self.groups, -1))
        pieces = grouped.split([part.rows_per_group for part in self.parts], dim=1)
        return {part.name: piece.flatten(0, 1).contiguous() for part, piece in zip(self.parts, pieces, strict=True)}

    def fuse(self, canonical: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The whole parameter from its canonical tensors; the inverse of ``split``."""
        if len(self.parts) == 1:
            return canonical[self.parts[0].name]
        pieces = [canonical[part.name].unflatten(0, (self.groups, -1)) for part in self.parts]
        return torch.cat(pieces, dim=1).flatten(0, 1)


def parameter_layouts(config: ModelConfig) -> dict[str, RowLayout]:
    """The layout of every parameter of ``Decoder(config)``, by its name there, in the order of the data."""
    width = config.hidden_size
    layouts = {"embedding.weight": _whole("model.embed_tokens.weight", config.vocab_size, width)}
    for index in range(config.layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        layouts[f"{ours}.attention_norm.weight"] = _whole(f"{theirs}.input_layernorm.weight", width)
        layouts |= _attention(config, f"{ours}.attention", f"{theirs}.self_attn")
        layouts[f"{ours}.feed_forward_norm.weight"] = _whole(f"{theirs}.post_attention_layernorm.weight", width)
        layouts |= _feed_forward(config, f"{ours}.feed_forward", f"{theirs}.mlp")
    layouts["norm.weight"] = _whole("model.norm.weight", width)
    if not config.tie_embeddings:
        layouts["head.weight"] = _whole("lm_head.weight", config.vocab_size, width)
    return layouts


def _whole(name: str, rows: int, *columns: int) -> RowLayout:
    return RowLayout((Part(name, rows),), 1, columns)


def _attention(config: ModelConfig, ours: str, theirs: str) -> dict[str, RowLayout]:
    groups, head_dim, width = config.n_kv_heads, config.n_head_dim, config.hidden_size
    rows = {"q": config.heads // groups * head_dim, "k": head_dim, "v": head_dim}
    layouts: dict[str, RowLayout] = {}
    for kind, columns in (("weight", (width,)), ("bias", ())):
        if kind == "bias" and not config.qkv_bias:
            continue
        parts = {name: Part(f"{theirs}.{name}_proj.{kind}", count) for name, count in rows.items()}
        if config.coalesce:
            layouts[f"{ours}.qkv.{kind}"] = RowLayout(tuple(parts.values()), groups, columns)
        else:
            layouts |= {f"{ours}.{name}.{kind}": RowLayout((part,), groups, columns) for name, part in parts.items()}
    if config.qk_norm:
        layouts[f"{ours}.q_norm.weight"] = _whole(f"{theirs}.q_norm.weight", head_dim)
        layouts[f"{ours}.k_norm.weight"] = _whole(f"{theirs}.k_norm.weight", head_dim)
    layouts[f"{ours}.output.weight"] = _whole(f"{theirs}.o_proj.weight", width, config.heads * head_dim)
    return layouts


def _feed_forward(config: ModelConfig, ours: str, theirs: str) -> dict[str, RowLayout]:
    inner, width = config.intermediate_size, config.hidden_size
    groups = gate_up_groups(config)
    parts = {name: Part(f"{theirs}.{name}_proj.weight", inner // groups) for name in ("gate", "up")}
    if config.coalesce:
        layouts = {f"{ours}.gate_up.weight": RowLayout(tuple(parts.values()), groups, (width,))}
    else:
        layouts = {f"{ours}.{name}.weight": RowLayout((part,), groups, (width,)) for name, part in parts.items()}
    layouts[f"{ours}.down.weight"] = _whole(f"{theirs}.down_proj.weight", width, inner)
    return layouts
