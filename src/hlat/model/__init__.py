"""The LLaMA-family decoder: its modules, its initial weights, its names, its counts, and its Hugging Face form."""

from hlat.model.activations import RECOMPUTABLE, Activations, Share, activations
from hlat.model.building import build, remake
from hlat.model.cache import KVCache, LayerCache
from hlat.model.canonical import canonical_shapes, check_canonical, check_layers, from_canonical, to_canonical
from hlat.model.counts import ParameterCount, count_parameters, flops_per_token, forward_flops_per_token
from hlat.model.decoder import Decoder
from hlat.model.documents import Documents
from hlat.model.held import HeldParameter, held_parameters, local
from hlat.model.hf_config import SpecialIds
from hlat.model.hf_read import LazyTensors, read_hf, read_special_ids
from hlat.model.hf_write import write_hf
from hlat.model.initial import initial_rows, initialise
from hlat.model.layers import AttentionCore, Block
from hlat.model.layout import Piece, RowLayout, Run, parameter_layouts
from hlat.model.loss import IGNORED, CrossEntropy, head_loss
from hlat.model.part import WHOLE, ModelPart, heads_of, kv_copies, vocabulary_rows
from hlat.model.products import attend, attention_backend

__all__ = [
    "IGNORED",
    "RECOMPUTABLE",
    "WHOLE",
    "Activations",
    "AttentionCore",
    "Block",
    "CrossEntropy",
    "Decoder",
    "Documents",
    "HeldParameter",
    "KVCache",
    "LayerCache",
    "LazyTensors",
    "ModelPart",
    "ParameterCount",
    "Piece",
    "RowLayout",
    "Run",
    "Share",
    "SpecialIds",
    "activations",
    "attend",
    "attention_backend",
    "build",
    "canonical_shapes",
    "check_canonical",
    "check_layers",
    "count_parameters",
    "flops_per_token",
    "forward_flops_per_token",
    "from_canonical",
    "head_loss",
    "heads_of",
    "held_parameters",
    "initial_rows",
    "initialise",
    "kv_copies",
    "local",
    "parameter_layouts",
    "read_hf",
    "read_special_ids",
    "remake",
    "to_canonical",
    "vocabulary_rows",
    "write_hf",
]
