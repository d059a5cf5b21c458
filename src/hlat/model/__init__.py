"""The LLaMA-family decoder: modules, initial weights, parameter layout, counts and Hugging Face import and export."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.model.activations import RankWorkload as RankWorkload
    from hlat.model.activations import activation_bytes as activation_bytes
    from hlat.model.architectures import model_spec as model_spec
    from hlat.model.counts import attended_positions as attended_positions
    from hlat.model.counts import block_share as block_share
    from hlat.model.counts import count_parameters as count_parameters
    from hlat.model.counts import flops_per_token as flops_per_token
    from hlat.model.counts import forward_flops_per_token as forward_flops_per_token
    from hlat.model.counts import hidden_share as hidden_share
    from hlat.model.decoder import Decoder as Decoder
    from hlat.model.decoder import LocalParameter as LocalParameter
    from hlat.model.decoder import allocate as allocate
    from hlat.model.decoder import build as build
    from hlat.model.decoder import collect_local_parameters as collect_local_parameters
    from hlat.model.decoder import initialise as initialise
    from hlat.model.decoder import local as local
    from hlat.model.decoder import replace_parameters as replace_parameters
    from hlat.model.decoding import CompiledStep as CompiledStep
    from hlat.model.decoding import compile_step as compile_step
    from hlat.model.document_attention import DOCUMENT_ATTENTION as DOCUMENT_ATTENTION
    from hlat.model.document_attention import DocumentMask as DocumentMask
    from hlat.model.hf_config import SpecialIds as SpecialIds
    from hlat.model.hf_config import hf_class as hf_class
    from hlat.model.hf_folder import LazyTensors as LazyTensors
    from hlat.model.hf_folder import read_hf as read_hf
    from hlat.model.hf_folder import read_special_ids as read_special_ids
    from hlat.model.hf_folder import write_hf as write_hf
    from hlat.model.kernels.attention import ATTENTION as ATTENTION
    from hlat.model.kernels.attention import head_sums_shape as head_sums_shape
    from hlat.model.kernels.operations import are_used_on as are_used_on
    from hlat.model.kernels.operations import attention_is_used_on as attention_is_used_on
    from hlat.model.kernels.operations import builds_masks as builds_masks
    from hlat.model.kernels.operations import describe_attention as describe_attention
    from hlat.model.kernels.operations import describe_kernels as describe_kernels
    from hlat.model.kernels.operations import fuses_in_triton as fuses_in_triton
    from hlat.model.kernels.source import begin_compilation as begin_compilation
    from hlat.model.kv_cache import DeviceKVCache as DeviceKVCache
    from hlat.model.kv_cache import KVCache as KVCache
    from hlat.model.kv_cache import LayerCache as LayerCache
    from hlat.model.layers import DecoderBlock as DecoderBlock
    from hlat.model.loss import HEAD_ROWS as HEAD_ROWS
    from hlat.model.loss import IGNORED as IGNORED
    from hlat.model.loss import CrossEntropy as CrossEntropy
    from hlat.model.loss import Head as Head
    from hlat.model.loss import Reduction as Reduction
    from hlat.model.loss import head_loss as head_loss
    from hlat.model.loss import next_tokens as next_tokens
    from hlat.model.loss import row_losses as row_losses
    from hlat.model.matmul import Linear as Linear
    from hlat.model.matmul import attend as attend
    from hlat.model.matmul import attention_heads as attention_heads
    from hlat.model.matmul import attention_kernel as attention_kernel
    from hlat.model.matmul import computing_as_simulated as computing_as_simulated
    from hlat.model.matmul import deterministic_by_default as deterministic_by_default
    from hlat.model.matmul import product_library as product_library
    from hlat.model.matmul import recipe_heads as recipe_heads
    from hlat.model.matmul import split_backward as split_backward
    from hlat.model.parameter_layout import EMBEDDING as EMBEDDING
    from hlat.model.parameter_layout import HEAD as HEAD
    from hlat.model.parameter_layout import RowBlock as RowBlock
    from hlat.model.parameter_layout import RowLayout as RowLayout
    from hlat.model.parameter_layout import canonical_shapes as canonical_shapes
    from hlat.model.parameter_layout import check_canonical as check_canonical
    from hlat.model.parameter_layout import check_layers as check_layers
    from hlat.model.parameter_layout import merge_tied as merge_tied
    from hlat.model.parameter_layout import parameter_layouts as parameter_layouts
    from hlat.model.spec import RECOMPUTABLE as RECOMPUTABLE
    from hlat.model.spec import Axis as Axis
    from hlat.model.spec import GradientSum as GradientSum
    from hlat.model.spec import ModelShard as ModelShard
    from hlat.model.spec import axis_share as axis_share
    from hlat.model.spec import element_share as element_share
    from hlat.model.spec import kv_replication as kv_replication
    from hlat.model.spec import shard_heads as shard_heads
    from hlat.model.spec import vocabulary_rows as vocabulary_rows

__getattr__ = lazily(
    __name__,
    {
        "activations": "RankWorkload activation_bytes",
        "architectures": "model_spec",
        "counts": (
            "attended_positions block_share count_parameters flops_per_token forward_flops_per_token hidden_share"
        ),
        "decoder": "Decoder LocalParameter allocate build collect_local_parameters initialise local replace_parameters",
        "decoding": "CompiledStep compile_step",
        "document_attention": "DOCUMENT_ATTENTION DocumentMask",
        "hf_config": "SpecialIds hf_class",
        "hf_folder": "LazyTensors read_hf read_special_ids write_hf",
        "kernels.attention": "ATTENTION head_sums_shape",
        "kernels.operations": (
            "are_used_on attention_is_used_on builds_masks describe_attention describe_kernels fuses_in_triton"
        ),
        "kernels.source": "begin_compilation",
        "kv_cache": "DeviceKVCache KVCache LayerCache",
        "layers": "DecoderBlock",
        "loss": "CrossEntropy HEAD_ROWS Head IGNORED Reduction head_loss next_tokens row_losses",
        "matmul": (
            "Linear attend attention_heads attention_kernel computing_as_simulated deterministic_by_default "
            "product_library recipe_heads split_backward"
        ),
        "parameter_layout": (
            "EMBEDDING HEAD RowBlock RowLayout canonical_shapes check_canonical check_layers merge_tied "
            "parameter_layouts"
        ),
        "spec": (
            "Axis GradientSum ModelShard RECOMPUTABLE axis_share element_share kv_replication shard_heads "
            "vocabulary_rows"
        ),
    },
)
