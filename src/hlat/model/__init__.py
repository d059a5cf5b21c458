"""The LLaMA-family decoder: modules, initial weights, parameter layout, counts and Hugging Face import and export."""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.model.builder import allocate, build, replace_parameters
    from hlat.model.decoder import Decoder
    from hlat.model.document_mask import DocumentMask
    from hlat.model.init import initialise
    from hlat.model.kv_cache import DeviceKVCache, KVCache, LayerCache
    from hlat.model.layers import DecoderBlock
    from hlat.model.local_parameters import LocalParameter, collect_local_parameters, local
    from hlat.model.loss import HEAD_ROWS, IGNORED, CrossEntropy, Head, Reduction, head_loss, next_tokens, row_losses
    from hlat.model.matmul import (
        Linear,
        attend,
        attention_heads,
        attention_kernel,
        computing_as_simulated,
        deterministic_by_default,
        product_library,
        recipe_heads,
        split_backward,
    )
    from hlat.model.model_shard import ModelShard, kv_replication, shard_heads, vocabulary_rows
    from hlat.model.spec import Axis, GradientSum
    from hlat.model.varlen_attention import DOCUMENT_ATTENTION

__getattr__ = lazily(
    __name__,
    {
        "builder": (
            "allocate",
            "build",
            "replace_parameters",
        ),
        "decoder": ("Decoder",),
        "document_mask": ("DocumentMask",),
        "init": ("initialise",),
        "kv_cache": (
            "DeviceKVCache",
            "KVCache",
            "LayerCache",
        ),
        "layers": ("DecoderBlock",),
        "local_parameters": (
            "LocalParameter",
            "collect_local_parameters",
            "local",
        ),
        "loss": (
            "HEAD_ROWS",
            "IGNORED",
            "CrossEntropy",
            "Head",
            "Reduction",
            "head_loss",
            "next_tokens",
            "row_losses",
        ),
        "matmul": (
            "Linear",
            "attend",
            "attention_heads",
            "attention_kernel",
            "computing_as_simulated",
            "deterministic_by_default",
            "product_library",
            "recipe_heads",
            "split_backward",
        ),
        "model_shard": (
            "ModelShard",
            "kv_replication",
            "shard_heads",
            "vocabulary_rows",
        ),
        "spec": (
            "Axis",
            "GradientSum",
        ),
        "varlen_attention": ("DOCUMENT_ATTENTION",),
    },
)

__all__ = [
    "DOCUMENT_ATTENTION",
    "HEAD_ROWS",
    "IGNORED",
    "Axis",
    "CrossEntropy",
    "Decoder",
    "DecoderBlock",
    "DeviceKVCache",
    "DocumentMask",
    "GradientSum",
    "Head",
    "KVCache",
    "LayerCache",
    "Linear",
    "LocalParameter",
    "ModelShard",
    "Reduction",
    "allocate",
    "attend",
    "attention_heads",
    "attention_kernel",
    "build",
    "collect_local_parameters",
    "computing_as_simulated",
    "deterministic_by_default",
    "head_loss",
    "initialise",
    "kv_replication",
    "local",
    "next_tokens",
    "product_library",
    "recipe_heads",
    "replace_parameters",
    "row_losses",
    "shard_heads",
    "split_backward",
    "vocabulary_rows",
]
