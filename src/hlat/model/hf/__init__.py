"""Hugging Face model folders: read and write config.json and safetensors files; canonical tensor names and shapes."""

from hlat.model.hf.config import SpecialIds, hf_class
from hlat.model.hf.names import EMBEDDING, HEAD, canonical_shapes, check_canonical, check_layers, merge_tied
from hlat.model.hf.read import LazyTensors, read_hf, read_special_ids
from hlat.model.hf.write import write_hf

__all__ = [
    "EMBEDDING",
    "HEAD",
    "LazyTensors",
    "SpecialIds",
    "canonical_shapes",
    "check_canonical",
    "check_layers",
    "hf_class",
    "merge_tied",
    "read_hf",
    "read_special_ids",
    "write_hf",
]
