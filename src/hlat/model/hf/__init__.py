"""Hugging Face model folders: read and write config.json and safetensors files; canonical tensor names and shapes."""

from hlat.model.hf.config import SpecialIds, hf_class
from hlat.model.hf.names import canonical_shapes, check_canonical, check_layers
from hlat.model.hf.read import LazyTensors, read_hf, read_special_ids
from hlat.model.hf.write import write_hf

__all__ = [
    "LazyTensors",
    "SpecialIds",
    "canonical_shapes",
    "check_canonical",
    "check_layers",
    "hf_class",
    "read_hf",
    "read_special_ids",
    "write_hf",
]
