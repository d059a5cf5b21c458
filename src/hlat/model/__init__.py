"""The LLaMA-family decoder: modules, initial weights, parameter layout, counts and Hugging Face import and export."""

from hlat.model.build import build, replace_parameters
from hlat.model.decoder import Decoder
from hlat.model.document_mask import DocumentMask
from hlat.model.init import initialise
from hlat.model.kv_cache import KVCache, LayerCache
from hlat.model.layers import DecoderBlock
from hlat.model.local_parameters import LocalParameter, collect_local_parameters, local
from hlat.model.loss import IGNORED, CrossEntropy, Reduction, head_loss, next_tokens, row_losses
from hlat.model.matmul import attend, attention_backend, computing_as_simulated
from hlat.model.model_shard import ModelShard, kv_replication, shard_heads, vocabulary_rows
from hlat.model.spec import Axis, GradientSum

__all__ = [
    "IGNORED",
    "Axis",
    "CrossEntropy",
    "Decoder",
    "DecoderBlock",
    "DocumentMask",
    "GradientSum",
    "KVCache",
    "LayerCache",
    "LocalParameter",
    "ModelShard",
    "Reduction",
    "attend",
    "attention_backend",
    "build",
    "collect_local_parameters",
    "computing_as_simulated",
    "head_loss",
    "initialise",
    "kv_replication",
    "local",
    "next_tokens",
    "replace_parameters",
    "row_losses",
    "shard_heads",
    "vocabulary_rows",
]
