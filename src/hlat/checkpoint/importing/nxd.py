"""Shards of NeuronX Distributed (NxD), as HLAT and NxDT saved them, as canonical tensors.

    [dp_rank_XX_][ep_rank_XX_]tp_rank_XX_pp_rank_XX.pt     one state dictionary per tensor- and pipeline-parallel rank:
                                     ....pt.tensors/tensor_I.pt   tensors, or references to these ("xser", HLAT's way)
    tensor ranks of a stage --rows or columns of each, in rank order--> heads in the ranks' order --> canonical order

A rank stores

    self_attn.qkv_proj.weight          its rows of q, then of k, then of v (a column-parallel layer with stride 3)
    self_attn.qkv_proj.weight_q, _k, _v     or these three; or weight_qkv, them one after the other
    mlp.gate_up_proj.weight            its rows of gate, then of up (stride 2)

and everything else under the names of Hugging Face. If there are more ranks than key heads, NxD repeats the matrices
of keys and values ``kv_size_multiplier`` times, here called copies. Rank by rank the key heads are then 0, 1, ..., 7,
0, 1, ..., 7, ... (Trainium 1), or 0, 0, ..., 1, 1, ... (Trainium 2). The query heads of a rank belong to its key
heads, so their order over the ranks is not that of Hugging Face. Here query heads, and the columns of the output
projection, are sorted by key head, and one copy of keys and values is taken, after comparing it with the others.

Files are read by ``torch.load(weights_only=True, mmap=True)``, which builds tensors and plain values and refuses every
class but one: the reference, which is replaced by a class of this file. Only tensors that are used are read from disk.

Sources: neuronx-distributed, ``parallel_layers/layers.py`` (create_local_weight) and ``modules/qkv_linear.py``; the
models of awslabs/HLAT.
"""

import functools
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hlat.checkpoint.importing.base import (
    SourceFormat,
    SourceModel,
    SourceTensor,
    canonical_shapes_of,
    checked,
    required_model,
)
from hlat.config import ModelConfig
from hlat.model import EMBEDDING, HEAD
from hlat.runtime.errors import CheckpointError
from hlat.runtime.terminal import listed

SHARD = re.compile(r"(?:dp_rank_(?P<dp>\d+)_)?(?:ep_rank_(?P<ep>\d+)_)?tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)\.pt")

_LISTED = 8  # ranks in a message


class TensorReference:
    """A reference to the file of a tensor, in place of ``torch_xla.utils.serialization.TensorReference``."""

    tid: object = None


_REFERENCE = (TensorReference, "torch_xla.utils.serialization.TensorReference")


@dataclass(frozen=True)
class RankFile:
    """The file of a rank, opened when its first tensor is needed."""

    path: Path

    @cached_property
    def entries(self) -> dict[str, Any]:
        """Names and values: tensors, references and others; CheckpointError if damaged, or if it would run code."""
        content = _load(self.path)
        # Some versions wrap the state dictionary.
        if isinstance(content, Mapping) and isinstance(inner := content.get("model"), Mapping):
            content = inner
        if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
            raise CheckpointError(f"{self.path}: not a state dictionary.")
        return dict(content)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, whose values are read when used; CheckpointError if it is missing or damaged."""
        value = self.entries.get(name)
        if isinstance(value, TensorReference):
            # The id becomes part of a path, so it must not be a text.
            if type(value.tid) is not int or value.tid < 0:
                raise CheckpointError(f"{self.path}: {name} refers to an impossible file.")
            value = _load(self.path.with_name(f"{self.path.name}.tensors") / f"tensor_{value.tid}.pt")
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.layout != torch.strided:
            raise CheckpointError(f"{self.path}: {name} is missing, or not a tensor of floating-point numbers.")
        return value.detach()


def _load(path: Path) -> Any:
    try:
        # weights_only: nothing that the file names is run; the only class it may name is the reference.
        with torch.serialization.safe_globals([_REFERENCE]):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: no such file. Copy the complete checkpoint, with its .tensors folders."
        ) from None
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0][:200]
        raise CheckpointError(f"{path}: not plain tensors; nothing was run ({reason}).") from error
    except Exception as error:  # torch raises many kinds for damaged files
        if isinstance(error, OSError) and error.errno is not None:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from error
        raise CheckpointError(
            f"{path}: damaged ({type(error).__name__}: {str(error)[:200]}). Copy it again."
        ) from error


@dataclass(frozen=True)
class RankFiles:
    """The files of all tensor and pipeline ranks."""

    tensor: int  # degree of tensor parallelism
    pipeline: int  # degree of pipeline parallelism
    by_rank: Mapping[tuple[int, int], RankFile]  # by (tensor rank, pipeline rank)

    def of_stage(self, pipeline_rank: int) -> Iterator[RankFile]:
        for tensor_rank in range(self.tensor):
            yield self.by_rank[tensor_rank, pipeline_rank]


def shard_folder(folder: Path) -> Path | None:
    """Find the folder that has the shards: the given one, or ``model`` in it; None if there are none."""
    for place in (folder, folder / "model"):
        if place.is_dir() and any(SHARD.fullmatch(file.name) for file in place.iterdir()):
            return place
    return None


def find_rank_files(folder: Path) -> RankFiles:
    """Find the model's file of every rank; CheckpointError if some are missing, or if there are experts."""
    place = shard_folder(folder)
    matches = [(file, match) for file in (place or folder).iterdir() if (match := SHARD.fullmatch(file.name))]
    if any(int(match["ep"] or 0) > 0 for _, match in matches):
        raise CheckpointError(f"{folder}: has expert-parallel ranks; hlat has no mixtures of experts.")
    # Data-parallel ranks have the same weights: those of the first are taken.
    found = {
        (int(match["tp"]), int(match["pp"])): RankFile(file) for file, match in matches if int(match["dp"] or 0) == 0
    }
    tensor, pipeline = (1 + max((rank[axis] for rank in found), default=-1) for axis in (0, 1))
    missing = [
        f"tensor rank {tp}, pipeline rank {pp}"
        for pp in range(pipeline)
        for tp in range(tensor)
        if (tp, pp) not in found
    ]
    if missing or not found:
        names = listed(missing, _LISTED, "; ") or "data-parallel rank 0"
        raise CheckpointError(f"{folder}: files of ranks are missing: {names}.")
    return RankFiles(tensor, pipeline, found)


_Q, _K, _V = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
_FUSED = {
    "self_attn.qkv_proj.weight": (_Q, _K, _V),
    "self_attn.qkv_proj.weight_qkv": (_Q, _K, _V),
    "self_attn.qkv_proj.weight_q": (_Q,),
    "self_attn.qkv_proj.weight_k": (_K,),
    "self_attn.qkv_proj.weight_v": (_V,),
    "mlp.gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
}
_NOT_WEIGHTS = re.compile(r".*(?:rotary_emb\.inv_freq|_extra_state)", re.DOTALL)
_IN_LAYER = re.compile(r"(model\.layers\.\d+\.)(.+)", re.DOTALL)
_COLUMNS = ("o_proj.weight", "down_proj.weight")  # row-parallel layers: ranks have columns of the matrix


class NxdShards(SourceFormat):
    """Weights of HLAT, and of NxDT's Hugging Face style LLaMA models."""

    name = "shards of NeuronX Distributed"
    signs = "dp_rank_XX_tp_rank_XX_pp_rank_XX.pt, in it or in its folder model"

    def recognises(self, folder: Path) -> bool:
        return shard_folder(folder) is not None

    def open(self, folder: Path, config: ModelConfig | None) -> SourceModel:
        config = required_model(config, folder, self.name)
        files = find_rank_files(folder)
        pieces = _pieces(files)
        expected = canonical_shapes_of(config, len(pieces), folder)
        heads = _head_order(config, files, pieces, folder)
        shapes = {HEAD: expected[EMBEDDING], **expected}  # a tied matrix may have the name of the head, or both
        tensors = {}
        for name, piece in pieces.items():
            shape = shapes.get(name, ())
            header = torch.empty(shape, dtype=piece.dtype(), device="meta")
            tensors[name] = SourceTensor(header, functools.partial(heads.read, name, piece, shape))
        # Names and kinds of numbers; the shapes of the shards are compared below, where several parts share a tensor.
        found = checked(config, tensors, folder)
        pieces = {name: pieces.get(name) or pieces[HEAD] for name in found}
        stored = {name: heads.stored_shape(name, shape) for name, shape in expected.items()}
        problems = [text for name, shape in stored.items() for text in pieces[name].problems(name, shape)]
        if problems := problems + _total_problems(pieces, stored):
            raise CheckpointError("\n  ".join([f"{folder}: shards do not fit the model", *problems[:100]]))
        return SourceModel(config, found)


@dataclass(frozen=True)
class _Piece:
    """A canonical tensor in the files of a stage's tensor ranks."""

    files: RankFiles  # of all ranks
    stage: int  # pipeline rank
    source: str  # name in the files
    part: int  # position among the parts of a fused tensor
    parts: int  # 1 for a tensor of its own

    def of_ranks(self) -> list[torch.Tensor]:
        return [file.tensor(self.source) for file in self.files.of_stage(self.stage)]

    def repeats(self, other: "_Piece") -> bool:
        # With tied embeddings, the first and the last stage store the same matrix.
        both = zip(self.of_ranks(), other.of_ranks(), strict=True)
        return self.source == other.source and all(torch.equal(first, second) for first, second in both)

    def dtype(self) -> torch.dtype:
        # Ranks should agree; if not, the type that all fit in.
        return functools.reduce(torch.promote_types, (tensor.dtype for tensor in self.of_ranks()))

    def problems(self, name: str, shape: tuple[int, ...]) -> list[str]:
        """Compare the shapes of all ranks with those of a tensor of this shape, all ranks together."""
        found = []
        for rank, tensor in enumerate(self.of_ranks()):
            local = tuple(self.own_rows(name, tensor, shape).shape)
            expected = _local_shape(name, shape, self.files.tensor)
            if local != expected:
                place = f"tensor rank {rank}, pipeline rank {self.stage}"
                found.append(f"{name}: {place} has {local} of it, the model has {expected}")
        return found

    def own_rows(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Take the rows of this part from a fused tensor."""
        if self.parts == 1:
            return tensor
        rows = _local_shape(name, shape, self.files.tensor)[0]
        # The first part has its share, the others share the rest: keys and values may be repeated.
        if self.part == 0:
            return tensor[:rows]
        return tensor[tensor.shape[0] - (self.parts - self.part) * rows :][:rows]


def _total_problems(pieces: dict[str, _Piece], stored: dict[str, tuple[int, ...]]) -> list[str]:
    """Check that fused tensors have the rows of their parts, and no others."""
    expected: dict[tuple[int, str], int] = {}
    for name, piece in pieces.items():
        if piece.parts > 1:
            rows = _local_shape(name, stored[name], piece.files.tensor)[0]
            expected[piece.stage, piece.source] = expected.get((piece.stage, piece.source), 0) + rows
    return [
        f"{source}: tensor rank {rank}, pipeline rank {stage} has {tensor.shape[0]} rows of it, the model has {rows}"
        for piece in pieces.values()
        if piece.parts > 1 and piece.part == 0
        for (stage, source), rows in [((piece.stage, piece.source), expected[piece.stage, piece.source])]
        for rank, tensor in enumerate(piece.of_ranks())
        if tensor.shape[0] != rows
    ]


def _pieces(files: RankFiles) -> dict[str, _Piece]:
    """Find the canonical tensors in the files of the first tensor rank."""
    found: dict[str, _Piece] = {}
    for stage in range(files.pipeline):
        for source in files.by_rank[0, stage].entries:
            if _NOT_WEIGHTS.fullmatch(source):
                continue
            match = _IN_LAYER.fullmatch(source)
            prefix, rest = (match[1], match[2]) if match else ("", source)
            parts = _FUSED.get(rest, (rest,))
            for index, part in enumerate(parts):
                piece, other = _Piece(files, stage, source, index, len(parts)), found.get(prefix + part)
                # Two models in one folder would be mixed layer by layer.
                if other is not None and not piece.repeats(other):
                    where = f"{other.source} of pipeline rank {other.stage} and {source} of pipeline rank {stage}"
                    raise CheckpointError(f"{prefix + part}: {where} differ, as if of two models. Save it again.")
                found[prefix + part] = piece
    return found


def _local_shape(name: str, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    if len(shape) < 2:  # norms, which every rank has
        return shape
    rows, columns = shape
    return (rows, columns // ranks) if name.endswith(_COLUMNS) else (rows // ranks, columns)


@dataclass(frozen=True)
class _HeadOrder:
    """Order in which the tensor ranks store query and key heads, and how to undo it."""

    key_heads: int  # number in the model
    copies: int  # how often each key head is stored
    key_order: Sequence[int]  # key head at each position of the ranks' key heads
    head_dim: int  # width of a head

    def stored_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0] * self.copies, *shape[1:]) if name.endswith((_K, _V)) else shape

    def read(self, name: str, piece: _Piece, shape: tuple[int, ...]) -> torch.Tensor:
        """Read a tensor from the files of all ranks; CheckpointError if copies of a key head differ."""
        stored = self.stored_shape(name, shape)
        local = [piece.own_rows(name, tensor, stored) for tensor in piece.of_ranks()]
        if len(shape) < 2:
            return local[0]
        joined = torch.cat(local, dim=1 if name.endswith(_COLUMNS) else 0)
        if name.endswith(_Q):
            return self._sort_queries(joined)
        if name.endswith((_K, _V)):
            return self._take_one_copy(joined, name)
        return self._sort_queries(joined.T).T if name.endswith("self_attn.o_proj.weight") else joined

    def _sort_queries(self, joined: torch.Tensor) -> torch.Tensor:
        # The order among the queries of a key head does not matter, and is kept.
        by_key: torch.Tensor = joined.unflatten(0, (len(self.key_order), -1))
        return by_key[sorted(range(len(self.key_order)), key=self.key_order.__getitem__)].flatten(0, 1)

    def _take_one_copy(self, joined: torch.Tensor, name: str) -> torch.Tensor:
        heads: torch.Tensor = joined.unflatten(0, (-1, self.head_dim))
        first = heads[[self.key_order.index(head) for head in range(self.key_heads)]]
        if not torch.equal(heads, first[list(self.key_order)]):
            raise CheckpointError(
                f"{name}: the copies of a key head on several ranks differ; the checkpoint is damaged."
            )
        return first.flatten(0, 1)


def _head_order(config: ModelConfig, files: RankFiles, pieces: dict[str, _Piece], folder: Path) -> _HeadOrder:
    """Find out from the first layer's keys how often key heads are repeated, and in which order."""
    heads, width = config.n_kv_heads, config.n_head_dim
    name = f"model.layers.0.{_K}"
    piece = pieces.get(name)
    if piece is None:
        return _HeadOrder(heads, 1, range(heads), width)  # the comparison of names says what is missing
    rows = [tensor.shape[0] for tensor in piece.of_ranks()]
    queries = config.heads * width // files.tensor if piece.parts > 1 else 0
    stored = sum((count - queries) // max(1, piece.parts - 1) for count in rows)
    copies, rest = divmod(stored, heads * width)
    if rest or copies < 1:
        raise CheckpointError(
            f"{folder}: the ranks have {stored} rows of {name} together, the model has {heads * width}, or a multiple."
        )
    candidates = [_HeadOrder(heads, copies, order, width) for order in _orders(heads, copies)]
    shape = (heads * width, config.hidden_size)
    # The files do not say which of the two orders they have: the one in which all copies are equal is right.
    for order in candidates:
        if piece.problems(name, order.stored_shape(name, shape)):
            return order  # the comparison of shapes says what is wrong
        try:
            order.read(name, piece, shape)
        except CheckpointError:
            continue
        return order
    raise CheckpointError(f"{folder}: {name} has {copies} copies of each key head, which differ from each other.")


def _orders(heads: int, copies: int) -> list[list[int]]:
    """Return the orders in which NxD repeats key heads: all of them again and again, or each one several times."""
    together = list(range(heads)) * copies
    return [together, sorted(together)]
