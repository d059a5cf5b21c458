"""The LLaMA-family decoder: its modules, its initial weights, its names, its counts, and its Hugging Face form."""

from hlat.model.build import build, remake
from hlat.model.decoder import Decoder
from hlat.model.document_mask import Documents
from hlat.model.init import initialise
from hlat.model.kv_cache import KVCache, LayerCache
from hlat.model.layers import Block
from hlat.model.local_parameters import HeldParameter, held_parameters, local
from hlat.model.loss import IGNORED, CrossEntropy
from hlat.model.matmul import attend, attention_backend
from hlat.model.model_shard import ModelPart, heads_of, kv_copies, vocabulary_rows

__all__ = [
    "IGNORED",
    "Block",
    "CrossEntropy",
    "Decoder",
    "Documents",
    "HeldParameter",
    "KVCache",
    "LayerCache",
    "ModelPart",
    "attend",
    "attention_backend",
    "build",
    "heads_of",
    "held_parameters",
    "initialise",
    "kv_copies",
    "local",
    "remake",
    "vocabulary_rows",
]
