"""Checkpoints of torchtitan's LLaMA: files of torch.distributed.checkpoint (DCP) under torchtitan's names.

    .metadata --without unpickling--> tensors by name, in the chunks of any layout
    layers.0.attention.wq.weight --canonical name, rows reordered--> model.layers.0.self_attn.q_proj.weight

Optimizer state, schedule and data state are left aside. torchtitan rotates neighbouring elements (2i, 2i + 1) of a
head, as Meta's release of LLaMA does; Hugging Face's layout, and hlat's, rotates (i, i + half). So the rows of each
head of the query and key projections are reordered: even rows first, then odd ones.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from hlat.checkpoint.format.index import INDEX_NAME, StoredTensor, parse_index
from hlat.checkpoint.format.tensor_files import Region, read_regions
from hlat.checkpoint.importing.base import SourceFormat, SourceModel, SourceTensor, checked, required_model
from hlat.checkpoint.protocol.reader import MARKER_NAME
from hlat.config import ModelConfig
from hlat.runtime.errors import CheckpointError

_ENDS = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
# Projections whose rows torchtitan has in another order; see the head of this module.
_ROTATED = (".self_attn.q_proj.weight", ".self_attn.k_proj.weight")
_NAME = re.compile(r"(?:model\.)?((?:layers\.(?P<layer>\d+)\.)?(?P<rest>.+))", re.DOTALL)
_WEIGHTS = re.compile(r"(?:model\.)?(?:tok_embeddings|layers|norm|output)\.", re.DOTALL)


class TorchtitanCheckpoint(SourceFormat):
    """A folder that torchtitan saved with DCP, or another program in its names."""

    name = "DCP files"
    signs = ".metadata and *.distcp, as torchtitan saves them"

    def recognises(self, folder: Path) -> bool:
        # Checkpoints of hlat have an index of DCP too.
        return (folder / INDEX_NAME).is_file() and not (folder / MARKER_NAME).is_file()

    def open(self, folder: Path, config: ModelConfig | None) -> SourceModel:
        config = required_model(config, folder, self.name)
        index = _read_index(folder)
        if not index:
            raise CheckpointError(
                f"{folder}: has no weights under torchtitan's names, such as tok_embeddings.weight and "
                "layers.0.attention.wq.weight."
            )
        found = {canonical_name(name): _source_tensor(folder, index, name, config.n_head_dim) for name in index}
        # With and without the prefix model., a folder can hold a tensor twice.
        if len(found) < len(index):
            last = {canonical_name(name): name for name in index}
            twice = [f"{name} and {other}" for name in index if (other := last[canonical_name(name)]) != name]
            reason = f"the same tensors under two names, as if of two models: {', '.join(twice[:3])}"
            raise CheckpointError(f"{folder}: {reason}. Save it again with one of them.")
        return SourceModel(config, checked(config, found, folder))


def _read_index(folder: Path) -> dict[str, StoredTensor]:
    """Read the index of the weights; CheckpointError if it is damaged, or files are missing."""
    try:
        sizes = {file.name: file.stat().st_size for file in folder.glob("*.distcp")}
        data = (folder / INDEX_NAME).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror}.") from error
    try:
        # Optimizer and schedule have classes of their own, which are passed over.
        return parse_index(data, sizes, lambda name: _WEIGHTS.match(name) is not None)
    except CheckpointError as error:
        raise CheckpointError(f"{folder / INDEX_NAME}: {error}") from error


def canonical_name(name: str) -> str:
    """Canonical name of a tensor; one that torchtitan's LLaMA does not have is returned unchanged."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, rest = match["layer"], match["rest"]
    if layer is None:
        return _ENDS.get(rest, name)
    return f"model.layers.{layer}.{_IN_LAYER[rest]}" if rest in _IN_LAYER else name


def _source_tensor(folder: Path, index: Mapping[str, StoredTensor], name: str, head_dim: int) -> SourceTensor:
    stored = index[name]
    rotated = canonical_name(name).endswith(_ROTATED)

    def read() -> torch.Tensor:
        (tensor,) = read_regions(folder, index, [Region(name, (0,) * len(stored.shape), stored.shape)])
        return halves_of_heads(tensor, head_dim) if rotated else tensor

    return SourceTensor(torch.empty(stored.shape, dtype=stored.dtype, device="meta"), read)


def halves_of_heads(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows of each head: rows 0, 2, 4, ... of the head, then rows 1, 3, 5, ..."""
    pairs: torch.Tensor = rows.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2).flatten(0, 2)
