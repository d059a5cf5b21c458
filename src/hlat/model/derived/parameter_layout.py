"""Row layout of parameters: the canonical (Hugging Face) tensor and row that each row of a parameter is.

    our parameter                     Hugging Face (canonical) tensors
    layers.0.attention.qkv.weight <-> model.layers.0.self_attn.{q,k,v}_proj.weight
    embedding.weight              <-> model.embed_tokens.weight

A fused matrix consists of groups; each group has the next rows of each of its canonical tensors:

    qkv      one group per kv head:  [q heads of group 0 | k of group 0 | v of group 0 | q heads of group 1 | ...]
    gate_up  ``gate_up_groups``:     [rows of gate in group 0 | rows of up in group 0 | rows of gate in group 1 | ...]

A tensor-parallel shard (``ModelShard``) has its own layouts, whose rows start at an offset in the canonical tensors.
The order of its fused columns is that of the rows of its output projection, as without fusing. Initialisation,
checkpoints, export and sharding all use ``RowLayout``; no other module computes row indices.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from hlat.config.sections import ModelConfig
from hlat.model.model_shard import FULL_MODEL, ModelShard, intermediate_columns, shard_heads, vocabulary_rows

_MAX_GROUPS = 64
_MIN_GROUP_ROWS = 128


def gate_up_groups(config: ModelConfig, shard: ModelShard = FULL_MODEL) -> int:
    """Number of groups of the fused gate and up matrix of a shard.

    The complete model has gcd(kv heads, intermediate size) groups, doubled while the number divides the intermediate
    size, is at most 64, and a group has at least 128 rows each of gate and up. The activation function reads gate and
    up with a stride of a group: down to 128 rows that costs nothing measurable on a CPU, at 96 it takes twice the time
    in bf16. A shard has its fraction of these groups, or one group if they cannot be divided evenly.
    """
    inner = config.intermediate_size
    groups = math.gcd(config.n_kv_heads, inner)
    while 2 * groups <= _MAX_GROUPS and inner % (2 * groups) == 0 and inner // (2 * groups) >= _MIN_GROUP_ROWS:
        groups *= 2
    return groups // shard.tensor_count if groups % shard.tensor_count == 0 else 1


@dataclass(frozen=True)
class CanonicalTensor:
    """A canonical tensor, and the rows of it that a parameter has.

    Attributes:
        name: canonical (Hugging Face) name.
        rows_per_group: number of its rows in each group of the parameter.
        first_row: first of its rows in the parameter.
        owned: True if this shard counts and saves the rows; if several shards have copies, one of them owns them.
    """

    name: str
    rows_per_group: int
    first_row: int = 0
    owned: bool = True


@dataclass(frozen=True)
class RowRun:
    """``count`` rows that are consecutive both in a parameter (from ``start``) and in a canonical tensor."""

    name: str
    canonical_start: int
    start: int
    count: int


@dataclass(frozen=True)
class RowBlock:
    """Consecutive rows of a canonical tensor, and the runs of parameter rows that they are stored in.

    Any range of a parameter's rows has consecutive rows of each of its canonical tensors, since their order is the same
    in both. Within the parameter they are separate ``runs`` if it is fused.
    """

    name: str
    canonical_start: int
    runs: tuple[RowRun, ...]
    owned: bool

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(run.count for run in self.runs)


@dataclass(frozen=True)
class RowLayout:
    """The rows of a parameter, described as rows of canonical tensors.

    Attributes:
        tensors: the canonical tensors, in their order within a group.
        groups: number of groups.
        columns: size of every dimension except the first; () for vectors.
        first_column: column of the canonical tensors that the parameter's first column is.
        row_size: elements of a row of the canonical tensors; None if the same as in the parameter.
    """

    tensors: tuple[CanonicalTensor, ...]
    groups: int
    columns: tuple[int, ...]
    first_column: int = 0
    row_size: int | None = None

    @property
    def rows(self) -> int:
        """Number of rows of the parameter."""
        return self.groups * sum(tensor.rows_per_group for tensor in self.tensors)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return (self.rows, *self.columns)

    @property
    def canonical_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of the rows and columns of each canonical tensor that the parameter has, by name."""
        return {tensor.name: (self.groups * tensor.rows_per_group, *self.columns) for tensor in self.tensors}

    def runs(self, start: int, stop: int) -> Iterator[RowRun]:
        """Iterate over the rows ``start <= row < stop`` of the parameter, in order, as runs of canonical rows."""
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
        """Group the rows ``start <= row < stop`` of the parameter into at most one block per canonical tensor."""
        runs_by_name: dict[str, list[RowRun]] = {}
        for run in self.runs(start, stop):
            runs_by_name.setdefault(run.name, []).append(run)
        owned = {tensor.name: tensor.owned for tensor in self.tensors}
        return [
            RowBlock(name, runs[0].canonical_start, tuple(runs), owned[name]) for name, runs in runs_by_name.items()
        ]

    def split(self, fused: torch.Tensor) -> dict[str, torch.Tensor]:
        """Split a complete parameter into its canonical tensors: copies, or the parameter itself if it is only one."""
        if len(self.tensors) == 1:
            return {self.tensors[0].name: fused}
        grouped = fused.unflatten(0, (self.groups, -1))
        grouped_rows = grouped.split([tensor.rows_per_group for tensor in self.tensors], dim=1)
        return {
            tensor.name: rows.flatten(0, 1).contiguous()
            for tensor, rows in zip(self.tensors, grouped_rows, strict=True)
        }

    def fuse(self, canonical: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Build the complete parameter from its canonical tensors; the inverse of ``split``."""
        if len(self.tensors) == 1:
            return canonical[self.tensors[0].name]
        grouped = [canonical[tensor.name].unflatten(0, (self.groups, -1)) for tensor in self.tensors]
        return torch.cat(grouped, dim=1).flatten(0, 1)


def parameter_layouts(config: ModelConfig, shard: ModelShard = FULL_MODEL) -> dict[str, RowLayout]:
    """Return the layout of every parameter of ``Decoder(config, shard)``, by name, in order of execution."""
    first = shard.tensor_index == 0  # the first rank of the tensor group owns replicated norm weights
    width, rows = config.hidden_size, vocabulary_rows(config, shard)
    layouts: dict[str, RowLayout] = {}
    if shard.embedding:
        layouts["embedding.weight"] = _rows("model.embed_tokens.weight", rows, width)
    for index in shard.layer_range(config):
        module, canonical = f"layers.{index}", f"model.layers.{index}"
        layouts[f"{module}.attention_norm.weight"] = _vector(f"{canonical}.input_layernorm.weight", width, first)
        layouts |= _attention(config, shard, f"{module}.attention", f"{canonical}.self_attn")
        layouts[f"{module}.feed_forward_norm.weight"] = _vector(
            f"{canonical}.post_attention_layernorm.weight", width, first
        )
        layouts |= _feed_forward(config, shard, f"{module}.feed_forward", f"{canonical}.mlp")
    if shard.head:
        layouts["norm.weight"] = _vector("model.norm.weight", width, first)
        if not config.tie_embeddings:
            layouts["head.weight"] = _rows("lm_head.weight", rows, width)
        elif not shard.embedding:  # a copy of the embedding, which another stage owns
            layouts["head.weight"] = _rows("model.embed_tokens.weight", rows, width, owned=False)
    return layouts


def _vector(name: str, size: int, owned: bool) -> RowLayout:
    return RowLayout((CanonicalTensor(name, size, owned=owned),), 1, ())


def _rows(name: str, rows: range, width: int, owned: bool = True) -> RowLayout:
    return RowLayout((CanonicalTensor(name, len(rows), rows.start, owned),), 1, (width,))


def _columns(name: str, rows: int, columns: range, row_size: int) -> RowLayout:
    return RowLayout((CanonicalTensor(name, rows),), 1, (len(columns),), columns.start, row_size)


def _attention(config: ModelConfig, shard: ModelShard, module: str, canonical: str) -> dict[str, RowLayout]:
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
        tensors = {name: CanonicalTensor(f"{canonical}.{name}_proj.{kind}", *numbers) for name, numbers in rows.items()}
        if config.coalesce:
            layouts[f"{module}.qkv.{kind}"] = RowLayout(tuple(tensors.values()), heads.kvs, columns)
        else:
            layouts |= {
                f"{module}.{name}.{kind}": RowLayout((tensor,), heads.kvs, columns) for name, tensor in tensors.items()
            }
    if config.qk_norm:
        first = shard.tensor_index == 0
        layouts[f"{module}.q_norm.weight"] = _vector(f"{canonical}.q_norm.weight", head_dim, first)
        layouts[f"{module}.k_norm.weight"] = _vector(f"{canonical}.k_norm.weight", head_dim, first)
    columns_here = range(heads.first_query * head_dim, (heads.first_query + heads.queries) * head_dim)
    layouts[f"{module}.output.weight"] = _columns(
        f"{canonical}.o_proj.weight", width, columns_here, config.heads * head_dim
    )
    return layouts


def _feed_forward(config: ModelConfig, shard: ModelShard, module: str, canonical: str) -> dict[str, RowLayout]:
    width, inner = config.hidden_size, intermediate_columns(config, shard)
    groups = gate_up_groups(config, shard)
    tensors = {
        n: CanonicalTensor(f"{canonical}.{n}_proj.weight", len(inner) // groups, inner.start) for n in ("gate", "up")
    }
    if config.coalesce:
        layouts = {f"{module}.gate_up.weight": RowLayout(tuple(tensors.values()), groups, (width,))}
    else:
        layouts = {
            f"{module}.{name}.weight": RowLayout((tensor,), groups, (width,)) for name, tensor in tensors.items()
        }
    down = f"{canonical}.down_proj.weight"
    layouts[f"{module}.down.weight"] = _columns(down, width, inner, config.intermediate_size)
    return layouts
