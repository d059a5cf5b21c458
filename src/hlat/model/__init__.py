"""The LLaMA-family decoder: its modules, its initial weights, its names, its counts, and its Hugging Face form."""

from hlat.model.activations import Activations, activations
from hlat.model.cache import KVCache
from hlat.model.canonical import canonical_shapes, from_canonical, to_canonical
from hlat.model.counts import ParameterCount, count_parameters, flops_per_token, forward_flops_per_token
from hlat.model.decoder import Decoder, build
from hlat.model.hf_config import SpecialIds
from hlat.model.hf_read import LazyTensors, read_hf, read_special_ids
from hlat.model.hf_write import write_hf
from hlat.model.initial import initial_rows
from hlat.model.layout import RowLayout, Run, parameter_layouts

__all__ = [
    "Activations",
    "Decoder",
    "KVCache",
    "LazyTensors",
    "ParameterCount",
    "RowLayout",
    "Run",
    "SpecialIds",
    "activations",
    "build",
    "canonical_shapes",
    "count_parameters",
    "flops_per_token",
    "forward_flops_per_token",
    "from_canonical",
    "initial_rows",
    "parameter_layouts",
    "read_hf",
    "read_special_ids",
    "to_canonical",
    "write_hf",
]
