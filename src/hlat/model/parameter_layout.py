"""Row layout of parameters: the canonical (Hugging Face) tensor and row that each row of a parameter is.

    our parameter                     Hugging Face (canonical) tensors
    layers.0.attention.qkv.weight <-> model.layers.0.self_attn.{q,k,v}_proj.weight
    embedding.weight              <-> model.embed_tokens.weight

    module names, fused or not --parameter_layouts--> canonical names and rows
    headers of canonical tensors --check_canonical--> all differences from the model, at once

A fused matrix consists of groups; each group has the next rows of each of its canonical tensors:

    qkv      one group per kv head:  [q heads of group 0 | k of group 0 | v of group 0 | q heads of group 1 | ...]
    gate_up  ``gate_up_groups``:     [rows of gate in group 0 | rows of up in group 0 | rows of gate in group 1 | ...]

A tensor-parallel shard (``ModelShard``) has its own layouts, whose rows start at an offset in the canonical tensors.
The order of its fused columns is that of the rows of its output projection, as without fusing. Layouts follow from the
description of the architecture (``spec.py``). Initialisation, checkpoints, export and sharding all use ``RowLayout``;
no other module computes row indices.

Conversion only reorders rows, so both directions are exact in every dtype. It serves weights, gradients and Adam
moments, which have the same shapes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

import torch

from hlat.config import ModelConfig
from hlat.model.architectures import model_spec
from hlat.model.spec import (
    FULL_MODEL,
    SHARDED,
    Axis,
    Fusion,
    ModelShard,
    ParameterSpec,
    TensorSpec,
    axis_range,
    axis_size,
    gate_up_groups,
)
from hlat.runtime.errors import CheckpointError
from hlat.runtime.terminal import listed, plural


@dataclass(frozen=True)
class CanonicalTensor:
    """A canonical tensor, and the rows of it that a parameter has."""

    name: str
    rows_per_group: int  # its rows in each group of the parameter
    spec: TensorSpec
    first_row: int = 0  # first of its rows in the parameter
    owned: bool = True  # this shard counts and saves the rows; if several shards have copies, one of them owns them


@dataclass(frozen=True)
class RowRun:
    """``count`` rows that are consecutive both in a parameter (from ``start``) and in a canonical tensor."""

    tensor: CanonicalTensor
    canonical_start: int
    start: int
    count: int

    @property
    def name(self) -> str:
        return self.tensor.name


@dataclass(frozen=True)
class RowBlock:
    """Consecutive rows of a canonical tensor, and the runs of parameter rows that they are stored in."""

    # The order of rows is the same in parameter and canonical tensor, so any range of a parameter's rows has
    # consecutive rows of each tensor. Within a fused parameter they are separate runs.
    tensor: CanonicalTensor
    canonical_start: int
    runs: tuple[RowRun, ...]

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def owned(self) -> bool:
        return self.tensor.owned

    @property
    def rows(self) -> int:
        return sum(run.count for run in self.runs)


@dataclass(frozen=True)
class RowLayout:
    """The rows of a parameter, described as rows of canonical tensors."""

    tensors: tuple[CanonicalTensor, ...]  # in their order within a group
    groups: int
    columns: tuple[int, ...]  # size of every dimension except the first; () for vectors
    first_column: int = 0  # column of the canonical tensors that the parameter's first column is
    row_size: int | None = None  # elements of a row of the canonical tensors; None if the same as in the parameter

    @property
    def rows(self) -> int:
        return self.groups * sum(tensor.rows_per_group for tensor in self.tensors)

    @cached_property
    def all_owned(self) -> bool:
        """True if the tensor-parallel shard owns all of the canonical tensors, not only some of them."""
        return all(tensor.owned for tensor in self.tensors)

    @property
    def is_hidden_matrix(self) -> bool:
        return all(tensor.spec.is_hidden_matrix for tensor in self.tensors)

    @property
    def shape(self) -> tuple[int, ...]:
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
                    yield RowRun(tensor, canonical, low, high - low)
                first += tensor.rows_per_group

    def row_blocks(self, start: int, stop: int) -> list[RowBlock]:
        """Group the rows ``start <= row < stop`` of the parameter into at most one block per canonical tensor."""
        runs_by_name: dict[str, list[RowRun]] = {}
        for run in self.runs(start, stop):
            runs_by_name.setdefault(run.name, []).append(run)
        return [RowBlock(runs[0].tensor, runs[0].canonical_start, tuple(runs)) for runs in runs_by_name.values()]


def parameter_layouts(config: ModelConfig, shard: ModelShard = FULL_MODEL) -> dict[str, RowLayout]:
    """Return the layout of every parameter of ``Decoder(config, shard)``, by name, in order of execution."""
    spec, block = model_spec(config), _Shapes(config, shard)
    layouts: dict[str, RowLayout] = {}
    if shard.embedding:
        layouts[spec.embedding.name] = block.layout(spec.embedding)
    for index in shard.layer_range(config):
        for parameter in spec.block:
            layouts[f"layers.{index}.{parameter.name}"] = block.layout(parameter, f"model.layers.{index}.")
    if shard.head:
        layouts[spec.norm.name] = block.layout(spec.norm)
        if spec.head is not None:
            layouts[spec.head.name] = block.layout(spec.head)
        elif not shard.embedding:  # a copy of the embedding, which another stage owns
            layouts["head.weight"] = block.layout(spec.embedding, owned=False)
    return layouts


class _Shapes:
    def __init__(self, config: ModelConfig, shard: ModelShard) -> None:
        self._ranges = {axis: axis_range(config, shard, axis) for axis in Axis}
        self._sizes = {axis: axis_size(config, axis) for axis in SHARDED}
        self._groups = {
            Fusion.SINGLE: 1,
            Fusion.KEY_HEADS: self._ranges[Axis.KEYS].count // config.n_head_dim,
            Fusion.GATE_UP: gate_up_groups(config, shard),
        }

    def layout(self, parameter: ParameterSpec, prefix: str = "", owned: bool = True) -> RowLayout:
        groups, columns = self._groups[parameter.fusion], parameter.tensors[0].columns
        tensors = tuple(self._tensor(tensor, prefix, groups, owned) for tensor in parameter.tensors)
        if columns is None:
            return RowLayout(tensors, groups, ())
        here = self._ranges[columns]
        return RowLayout(tensors, groups, (here.count,), here.first, self._sizes.get(columns))

    def _tensor(self, tensor: TensorSpec, prefix: str, groups: int, owned: bool) -> CanonicalTensor:
        rows = self._ranges[tensor.rows]
        mine = owned and (rows.owned or (tensor.columns in SHARDED))
        return CanonicalTensor(prefix + tensor.name, rows.count // groups, tensor, rows.first, mine)


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_MANY_LAYERS = 1_000
_MAX_LISTED = 100  # problems listed in an error
_T = TypeVar("_T")


class TensorHeader(Protocol):
    """Shape and data type of a tensor, or of an entry of an index."""

    @property
    def shape(self) -> Iterable[int]:
        """Lengths of the dimensions, rows first; () for a scalar."""

    @property
    # A file's word for a type that torch does not have
    def dtype(self) -> torch.dtype | str:
        """Data type of the elements, or a file's word for one that torch does not have."""


def canonical_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every canonical tensor of a model, in order of execution. Tied heads have none."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layout in parameter_layouts(config).values():
        shapes |= layout.canonical_shapes
    return shapes


def check_layers(config: ModelConfig, found: int, source: str) -> None:
    """Raise CheckpointError for over 1,000 layers and fewer tensors than layers; ``source`` names the tensors."""
    # Each layer has several tensors. Listing every missing name of so many layers would take too long.
    if config.layers > max(found, _MANY_LAYERS):
        reason = f"the model has {plural(config.layers, 'layer')}, but there are only {found:,} tensors"
        raise CheckpointError(f"{source} do not fit the model: {reason}.")


def check_canonical(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, TensorHeader], source: str = "these weights"
) -> None:
    """Check that tensors have the names and shapes of the model, and data types of weights.

    CheckpointError lists all (up to 100) that are missing, unexpected, of another shape or another kind of numbers.
    """
    problems = [f"{name}: missing, expected {_size(shape)}" for name, shape in expected.items() if name not in found]
    problems += [f"{name}: unexpected, the model has no such tensor" for name in found if name not in expected]
    problems += _wrong_shapes(found, expected)
    problems += _wrong_dtypes({name: tensor for name, tensor in found.items() if name in expected})
    _raise_if_any(problems, f"{source} do not fit the model")


def merge_tied(config: ModelConfig, found: Mapping[str, _T], read: Callable[[str], torch.Tensor]) -> dict[str, _T]:
    """Keep one tensor for the one matrix of a model with tied embeddings, whichever of its two names files give it.

    ``found`` is anything by the name of a tensor, ``read`` returns its values. CheckpointError: the two differ.
    """
    kept = dict(found)
    if not config.tie_embeddings or HEAD not in kept:
        return kept
    head = kept.pop(HEAD)
    if EMBEDDING not in kept:
        return {EMBEDDING: head, **kept}
    if not _same_values(read(HEAD), read(EMBEDDING)):
        reason = f"differs from {EMBEDDING}, although the model ties them"
        _raise_if_any([f"{HEAD}: {reason} (tie_word_embeddings)"], "these tensors do not fit the model")
    return kept


def _same_values(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.shape != second.shape:
        return False
    # Files may store one of the two in another precision; float64 holds all of them exactly.
    if first.dtype != second.dtype:
        return torch.equal(first.double(), second.double())
    # Bytes, because a NaN does not equal itself.
    return torch.equal(first.flatten().view(torch.uint8), second.flatten().view(torch.uint8))


def _wrong_dtypes(found: Mapping[str, TensorHeader]) -> list[str]:
    """A line for each data type that has no floating-point numbers of 16 bits or more."""
    by_dtype: dict[str, list[str]] = {}
    for name, tensor in found.items():
        # Numbers of 8 bits have scales somewhere; without them they are other weights.
        if tensor.dtype not in WEIGHT_DTYPES:
            by_dtype.setdefault(str(tensor.dtype).removeprefix("torch."), []).append(name)
    return [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: of the data type {dtype}, which is "
        "not one of weights. Save the model in bfloat16 or float32 with transformers first"
        for dtype, names in by_dtype.items()
    ]


def _wrong_shapes(named: Mapping[str, TensorHeader], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    return [
        f"{name}: is {_size(named[name].shape)}, the model has {_size(shape)}"
        for name, shape in expected.items()
        if name in named and tuple(named[name].shape) != shape
    ]


def _size(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"


def _raise_if_any(problems: list[str], head: str) -> None:
    if problems:
        shown = listed(problems, _MAX_LISTED, "\n  ")
        raise CheckpointError(f"{head}: {len(problems)} problem(s)\n  {shown}")
