"""Which row of which Hugging Face tensor is row i of one of our parameters. The one place that knows.

    our parameter                     Hugging Face (canonical) tensors
    layers.0.attention.qkv.weight <-> model.layers.0.self_attn.{q,k,v}_proj.weight
    embedding.weight              <-> model.embed_tokens.weight

A fused matrix is laid out group by group; a group takes the next rows of each of its parts:

    qkv      one group per kv head:  [q heads of group 0 | k of group 0 | v of group 0 | q heads of group 1 | ...]
    gate_up  ``gate_up_groups``:     [block 0 of gate | block 0 of up | block 1 of gate | ...]

A tensor-parallel share (``ModelPart``) has layouts of its own, whose parts begin somewhere in the canonical tensors. It
meets the same columns of the output projections as an unfused share would. Initialisation, checkpoints, export and
sharding all go through ``RowLayout``, never through arithmetic of their own.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from hlat.config.sections import ModelConfig
from hlat.model.model_shard import WHOLE, ModelPart, heads_of, inner_columns, vocabulary_rows

_MOST_GROUPS = 64
_SMALLEST_BLOCK = 128


def gate_up_groups(config: ModelConfig, part: ModelPart = WHOLE) -> int:
    """Number of blocks into which gate and up, or a share's rows of them, are cut where they are one matrix.

    For the whole: starts at the gcd of kv heads and intermediate size and is doubled as long as it divides the
    intermediate size, up to 64. A block stays at 128 rows or more in doing so: the activation reads gate and up with a
    stride of a block, which down to 128 costs nothing measurable on a CPU and at 96 twice the time in bf16. A share
    has its part of these blocks, or one block where they cannot be shared out.
    """
    inner = config.intermediate_size
    groups = math.gcd(config.n_kv_heads, inner)
    while 2 * groups <= _MOST_GROUPS and inner % (2 * groups) == 0 and inner // (2 * groups) >= _SMALLEST_BLOCK:
        groups *= 2
    return groups // part.tensor_count if groups % part.tensor_count == 0 else 1


@dataclass(frozen=True)
class Part:
    """A canonical tensor and the rows of it that a parameter holds.

    Attributes:
        name: the canonical name.
        rows_per_group: how many of its rows a group holds.
        first_row: which of its rows comes first here.
        owned: whether they are counted and saved here; of several shares that hold the same rows one owns them.
    """

    name: str
    rows_per_group: int
    first_row: int = 0
    owned: bool = True


@dataclass(frozen=True)
class Run:
    """``count`` consecutive rows of a parameter that are consecutive rows of a canonical tensor too."""

    name: str
    canonical_start: int
    start: int
    count: int


@dataclass(frozen=True)
class Piece:
    """Rows of a parameter that are one block of a canonical tensor.

    A range of a parameter's rows takes of each of its canonical tensors rows that follow one another, because in both
    the rows of a tensor come in the same order; here they lie in ``runs``.
    """

    name: str
    canonical_start: int
    runs: tuple[Run, ...]
    owned: bool

    @property
    def rows(self) -> int:
        """How many rows."""
        return sum(run.count for run in self.runs)


@dataclass(frozen=True)
class RowLayout:
    """One parameter of ours as rows of canonical tensors.

    Attributes:
        parts: the canonical tensors, in their order within a group.
        groups: how often the parts repeat.
        columns: the size of every dimension but the first; () for vectors.
        first_column: where these columns begin in the canonical tensors.
        row_size: elements of a row of the canonical tensors; None for as many as here.
    """

    parts: tuple[Part, ...]
    groups: int
    columns: tuple[int, ...]
    first_column: int = 0
    row_size: int | None = None

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
        """Shape of what is here of each canonical tensor."""
        return {part.name: (self.groups * part.rows_per_group, *self.columns) for part in self.parts}

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        """The rows ``start <= row < stop`` of the parameter, in order, as runs of canonical rows."""
        period = self.rows // self.groups
        for group in range(start // period, -(-stop // period)):
            first = group * period
            for part in self.parts:
                low, high = max(start, first), min(stop, first + part.rows_per_group)
                if low < high:
                    canonical = part.first_row + group * part.rows_per_group + low - first
                    yield Run(part.name, canonical, low, high - low)
                first += part.rows_per_group

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """The rows ``start <= row < stop`` of the parameter as blocks of canonical tensors, at most one of each."""
        found: dict[str, list[Run]] = {}
        for run in self.runs(start, stop):
            found.setdefault(run.name, []).append(run)
        owned = {part.name: part.owned for part in self.parts}
        return [Piece(name, runs[0].canonical_start, tuple(runs), owned[name]) for name, runs in found.items()]

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


def parameter_layouts(config: ModelConfig, part: ModelPart = WHOLE) -> dict[str, RowLayout]:
    """The layout of every parameter of ``Decoder(config, part)``, by its name there, in the order of the data."""
    first = part.tensor_index == 0  # of the copies that the tensor group holds of a norm, it owns its own
    width, rows = config.hidden_size, vocabulary_rows(config, part)
    layouts: dict[str, RowLayout] = {}
    if part.embedding:
        layouts["embedding.weight"] = _rows("model.embed_tokens.weight", rows, width)
    for index in part.layer_range(config):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        layouts[f"{ours}.attention_norm.weight"] = _vector(f"{theirs}.input_layernorm.weight", width, first)
        layouts |= _attention(config, part, f"{ours}.attention", f"{theirs}.self_attn")
        layouts[f"{ours}.feed_forward_norm.weight"] = _vector(f"{theirs}.post_attention_layernorm.weight", width, first)
        layouts |= _feed_forward(config, part, f"{ours}.feed_forward", f"{theirs}.mlp")
    if part.head:
        layouts["norm.weight"] = _vector("model.norm.weight", width, first)
        if not config.tie_embeddings:
            layouts["head.weight"] = _rows("lm_head.weight", rows, width)
        elif not part.embedding:  # a copy of the embedding, which is elsewhere
            layouts["head.weight"] = _rows("model.embed_tokens.weight", rows, width, owned=False)
    return layouts


def _vector(name: str, size: int, owned: bool) -> RowLayout:
    return RowLayout((Part(name, size, owned=owned),), 1, ())


def _rows(name: str, rows: range, width: int, owned: bool = True) -> RowLayout:
    return RowLayout((Part(name, len(rows), rows.start, owned),), 1, (width,))


def _columns(name: str, rows: int, columns: range, row_size: int) -> RowLayout:
    return RowLayout((Part(name, rows),), 1, (len(columns),), columns.start, row_size)


def _attention(config: ModelConfig, part: ModelPart, ours: str, theirs: str) -> dict[str, RowLayout]:
    head_dim, width, heads = config.n_head_dim, config.hidden_size, heads_of(config, part)
    per_group = heads.queries // heads.kvs
    rows = {  # rows in a group, first row, owned
        "q": (per_group * head_dim, heads.first_query * head_dim, True),
        "k": (head_dim, heads.first_kv * head_dim, heads.owns_kv),
        "v": (head_dim, heads.first_kv * head_dim, heads.owns_kv),
    }
    layouts: dict[str, RowLayout] = {}
    for kind, columns in (("weight", (width,)), ("bias", ())):
        if kind == "bias" and not config.qkv_bias:
            continue
        parts = {name: Part(f"{theirs}.{name}_proj.{kind}", *numbers) for name, numbers in rows.items()}
        if config.coalesce:
            layouts[f"{ours}.qkv.{kind}"] = RowLayout(tuple(parts.values()), heads.kvs, columns)
        else:
            layouts |= {f"{ours}.{name}.{kind}": RowLayout((one,), heads.kvs, columns) for name, one in parts.items()}
    if config.qk_norm:
        first = part.tensor_index == 0
        layouts[f"{ours}.q_norm.weight"] = _vector(f"{theirs}.q_norm.weight", head_dim, first)
        layouts[f"{ours}.k_norm.weight"] = _vector(f"{theirs}.k_norm.weight", head_dim, first)
    columns_here = range(heads.first_query * head_dim, (heads.first_query + heads.queries) * head_dim)
    layouts[f"{ours}.output.weight"] = _columns(f"{theirs}.o_proj.weight", width, columns_here, config.heads * head_dim)
    return layouts


def _feed_forward(config: ModelConfig, part: ModelPart, ours: str, theirs: str) -> dict[str, RowLayout]:
    width, inner = config.hidden_size, inner_columns(config, part)
    groups = gate_up_groups(config, part)
    parts = {n: Part(f"{theirs}.{n}_proj.weight", len(inner) // groups, inner.start) for n in ("gate", "up")}
    if config.coalesce:
        layouts = {f"{ours}.gate_up.weight": RowLayout(tuple(parts.values()), groups, (width,))}
    else:
        layouts = {f"{ours}.{name}.weight": RowLayout((one,), groups, (width,)) for name, one in parts.items()}
    layouts[f"{ours}.down.weight"] = _columns(f"{theirs}.down_proj.weight", width, inner, config.intermediate_size)
    return layouts
