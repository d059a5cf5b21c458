"""Which row of which Hugging Face tensor is row i of one of our parameters. The one place that knows.

    our parameter                     Hugging Face (canonical) tensors
    layers.0.attention.qkv.weight <-> model.layers.0.self_attn.{q,k,v}_proj.weight
    embedding.weight              <-> model.embed_tokens.weight

A fused matrix is laid out group by group; a group takes the next rows of each of its parts:

    qkv      one group per kv head:  [q heads of group 0 | k of group 0 | v of group 0 | q heads of group 1 | ...]
    gate_up  ``gate_up_groups``:     [block 0 of gate | block 0 of up | block 1 of gate | ...]

A tensor-parallel share (``ModelShard``) has layouts of its own, whose parts begin somewhere in the canonical tensors. It
meets the same columns of the output projections as an unfused share would. Initialisation, checkpoints, export and
sharding all go through ``RowLayout``, never through arithmetic of their own.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from hlat.config.sections import ModelConfig
from hlat.model.model_shard import FULL_MODEL, ModelShard, intermediate_columns, shard_heads, vocabulary_rows

_MOST_GROUPS = 64
_SMALLEST_BLOCK = 128


def gate_up_groups(config: ModelConfig, shard: ModelShard = FULL_MODEL) -> int:
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
    return groups // shard.tensor_count if groups % shard.tensor_count == 0 else 1


@dataclass(frozen=True)
class CanonicalTensor:
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
class RowRun:
    """``count`` consecutive rows of a parameter that are consecutive rows of a canonical tensor too."""

    name: str
    canonical_start: int
    start: int
    count: int


@dataclass(frozen=True)
class RowBlock:
    """Rows of a parameter that are one block of a canonical tensor.

    A range of a parameter's rows takes of each of its canonical tensors rows that follow one another, because in both
    the rows of a tensor come in the same order; here they lie in ``runs``.
    """

    name: str
    canonical_start: int
    runs: tuple[RowRun, ...]
    owned: bool

    @property
    def rows(self) -> int:
        """How many rows."""
        return sum(run.count for run in self.runs)


@dataclass(frozen=True)
class RowLayout:
    """One parameter of ours as rows of canonical tensors.

    Attributes:
        tensors: the canonical tensors, in their order within a group.
        groups: how often the tensors repeat.
        columns: the size of every dimension but the first; () for vectors.
        first_column: where these columns begin in the canonical tensors.
        row_size: elements of a row of the canonical tensors; None for as many as here.
    """

    tensors: tuple[CanonicalTensor, ...]
    groups: int
    columns: tuple[int, ...]
    first_column: int = 0
    row_size: int | None = None

    @property
    def rows(self) -> int:
        """Rows of the parameter."""
        return self.groups * sum(tensor.rows_per_group for tensor in self.tensors)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return (self.rows, *self.columns)

    @property
    def canonical_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of what is here of each canonical tensor."""
        return {tensor.name: (self.groups * tensor.rows_per_group, *self.columns) for tensor in self.tensors}

    def runs(self, start: int, stop: int) -> Iterator[RowRun]:
        """The rows ``start <= row < stop`` of the parameter, in order, as runs of canonical rows."""
        period = self.rows // self.groups
        for group in range(start // period, -(-stop // period)):
            first = group * period
            for tensor in self.tensors:
                low, high = max(start, first), min(stop, first + tensor.rows_per_group)
                if low < high:
                    canonical = tensor.first_row + group * tensor.rows_per_group + low - first
                    yield RowRun(tensor.name, canonical, low, high - low)
                first += tensor.rows_per_group

    def row_blocks(self, start: int, stop: int) -> list[RowBlock]:
        """The rows ``start <= row < stop`` of the parameter as blocks of canonical tensors, at most one of each."""
        found: dict[str, list[RowRun]] = {}
        for run in self.runs(start, stop):
            found.setdefault(run.name, []).append(run)
        owned = {tensor.name: tensor.owned for tensor in self.tensors}
        return [RowBlock(name, runs[0].canonical_start, tuple(runs), owned[name]) for name, runs in found.items()]

    def split(self, fused: torch.Tensor) -> dict[str, torch.Tensor]:
        """The canonical tensors of a whole parameter; the parameter itself where it has one tensor, else copies."""
        if len(self.tensors) == 1:
            return {self.tensors[0].name: fused}
        grouped = fused.unflatten(0, (self.groups, -1))
        pieces = grouped.split([tensor.rows_per_group for tensor in self.tensors], dim=1)
        return {
            tensor.name: piece.flatten(0, 1).contiguous() for tensor, piece in zip(self.tensors, pieces, strict=True)
        }

    def fuse(self, canonical: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The whole parameter from its canonical tensors; the inverse of ``split``."""
        if len(self.tensors) == 1:
            return canonical[self.tensors[0].name]
        pieces = [canonical[tensor.name].unflatten(0, (self.groups, -1)) for tensor in self.tensors]
        return torch.cat(pieces, dim=1).flatten(0, 1)


def parameter_layouts(config: ModelConfig, shard: ModelShard = FULL_MODEL) -> dict[str, RowLayout]:
    """The layout of every parameter of ``Decoder(config, shard)``, by its name there, in the order of the data."""
    first = shard.tensor_index == 0  # of the copies that the tensor group holds of a norm, it owns its own
    width, rows = config.hidden_size, vocabulary_rows(config, shard)
    layouts: dict[str, RowLayout] = {}
    if shard.embedding:
        layouts["embedding.weight"] = _rows("model.embed_tokens.weight", rows, width)
    for index in shard.layer_range(config):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        layouts[f"{ours}.attention_norm.weight"] = _vector(f"{theirs}.input_layernorm.weight", width, first)
        layouts |= _attention(config, shard, f"{ours}.attention", f"{theirs}.self_attn")
        layouts[f"{ours}.feed_forward_norm.weight"] = _vector(f"{theirs}.post_attention_layernorm.weight", width, first)
        layouts |= _feed_forward(config, shard, f"{ours}.feed_forward", f"{theirs}.mlp")
    if shard.head:
        layouts["norm.weight"] = _vector("model.norm.weight", width, first)
        if not config.tie_embeddings:
            layouts["head.weight"] = _rows("lm_head.weight", rows, width)
        elif not shard.embedding:  # a copy of the embedding, which is elsewhere
            layouts["head.weight"] = _rows("model.embed_tokens.weight", rows, width, owned=False)
    return layouts


def _vector(name: str, size: int, owned: bool) -> RowLayout:
    return RowLayout((CanonicalTensor(name, size, owned=owned),), 1, ())


def _rows(name: str, rows: range, width: int, owned: bool = True) -> RowLayout:
    return RowLayout((CanonicalTensor(name, len(rows), rows.start, owned),), 1, (width,))


def _columns(name: str, rows: int, columns: range, row_size: int) -> RowLayout:
    return RowLayout((CanonicalTensor(name, rows),), 1, (len(columns),), columns.start, row_size)


def _attention(config: ModelConfig, shard: ModelShard, ours: str, theirs: str) -> dict[str, RowLayout]:
    head_dim, width, heads = config.n_head_dim, config.hidden_size, shard_heads(config, shard)
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
        tensors = {name: CanonicalTensor(f"{theirs}.{name}_proj.{kind}", *numbers) for name, numbers in rows.items()}
        if config.coalesce:
            layouts[f"{ours}.qkv.{kind}"] = RowLayout(tuple(tensors.values()), heads.kvs, columns)
        else:
            layouts |= {
                f"{ours}.{name}.{kind}": RowLayout((tensor,), heads.kvs, columns) for name, tensor in tensors.items()
            }
    if config.qk_norm:
        first = shard.tensor_index == 0
        layouts[f"{ours}.q_norm.weight"] = _vector(f"{theirs}.q_norm.weight", head_dim, first)
        layouts[f"{ours}.k_norm.weight"] = _vector(f"{theirs}.k_norm.weight", head_dim, first)
    columns_here = range(heads.first_query * head_dim, (heads.first_query + heads.queries) * head_dim)
    layouts[f"{ours}.output.weight"] = _columns(f"{theirs}.o_proj.weight", width, columns_here, config.heads * head_dim)
    return layouts


def _feed_forward(config: ModelConfig, shard: ModelShard, ours: str, theirs: str) -> dict[str, RowLayout]:
    width, inner = config.hidden_size, intermediate_columns(config, shard)
    groups = gate_up_groups(config, shard)
    tensors = {
        n: CanonicalTensor(f"{theirs}.{n}_proj.weight", len(inner) // groups, inner.start) for n in ("gate", "up")
    }
    if config.coalesce:
        layouts = {f"{ours}.gate_up.weight": RowLayout(tuple(tensors.values()), groups, (width,))}
    else:
        layouts = {f"{ours}.{name}.weight": RowLayout((tensor,), groups, (width,)) for name, tensor in tensors.items()}
    layouts[f"{ours}.down.weight"] = _columns(f"{theirs}.down_proj.weight", width, inner, config.intermediate_size)
    return layouts
