"""The LLaMA-family decoder: modules, initial weights, parameter layout, counts and Hugging Face import and export."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.model.architectures import model_spec as model_spec
    from hlat.model.builder import allocate as allocate
    from hlat.model.builder import build as build
    from hlat.model.builder import replace_parameters as replace_parameters
    from hlat.model.decoder import Decoder as Decoder
    from hlat.model.decoding.step import CompiledStep as CompiledStep
    from hlat.model.decoding.step import compile_step as compile_step
    from hlat.model.derived.activations import RankWorkload as RankWorkload
    from hlat.model.derived.activations import activation_bytes as activation_bytes
    from hlat.model.derived.axes import axis_share as axis_share
    from hlat.model.derived.axes import element_share as element_share
    from hlat.model.derived.counts import attended_positions as attended_positions
    from hlat.model.derived.counts import block_share as block_share
    from hlat.model.derived.counts import count_parameters as count_parameters
    from hlat.model.derived.counts import flops_per_token as flops_per_token
    from hlat.model.derived.counts import forward_flops_per_token as forward_flops_per_token
    from hlat.model.derived.counts import hidden_share as hidden_share
    from hlat.model.derived.parameter_layout import RowBlock as RowBlock
    from hlat.model.derived.parameter_layout import RowLayout as RowLayout
    from hlat.model.derived.parameter_layout import parameter_layouts as parameter_layouts
    from hlat.model.document_mask import DocumentMask as DocumentMask
    from hlat.model.hf.config import SpecialIds as SpecialIds
    from hlat.model.hf.config import hf_class as hf_class
    from hlat.model.hf.names import EMBEDDING as EMBEDDING
    from hlat.model.hf.names import HEAD as HEAD
    from hlat.model.hf.names import canonical_shapes as canonical_shapes
    from hlat.model.hf.names import check_canonical as check_canonical
    from hlat.model.hf.names import check_layers as check_layers
    from hlat.model.hf.names import merge_tied as merge_tied
    from hlat.model.hf.read import LazyTensors as LazyTensors
    from hlat.model.hf.read import read_hf as read_hf
    from hlat.model.hf.read import read_special_ids as read_special_ids
    from hlat.model.hf.write import write_hf as write_hf
    from hlat.model.init import initialise as initialise
    from hlat.model.kernels.attention import ATTENTION as ATTENTION
    from hlat.model.kernels.attention import head_sums_shape as head_sums_shape
    from hlat.model.kernels.choice import are_used_on as are_used_on
    from hlat.model.kernels.choice import attention_is_used_on as attention_is_used_on
    from hlat.model.kernels.choice import builds_masks as builds_masks
    from hlat.model.kernels.choice import describe_attention as describe_attention
    from hlat.model.kernels.choice import describe_kernels as describe_kernels
    from hlat.model.kernels.choice import fuses_in_triton as fuses_in_triton
    from hlat.model.kernels.source import begin_compilation as begin_compilation
    from hlat.model.kv_cache import DeviceKVCache as DeviceKVCache
    from hlat.model.kv_cache import KVCache as KVCache
    from hlat.model.kv_cache import LayerCache as LayerCache
    from hlat.model.layers import DecoderBlock as DecoderBlock
    from hlat.model.local_parameters import LocalParameter as LocalParameter
    from hlat.model.local_parameters import collect_local_parameters as collect_local_parameters
    from hlat.model.local_parameters import local as local
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
    from hlat.model.model_shard import ModelShard as ModelShard
    from hlat.model.model_shard import kv_replication as kv_replication
    from hlat.model.model_shard import shard_heads as shard_heads
    from hlat.model.model_shard import vocabulary_rows as vocabulary_rows
    from hlat.model.spec import RECOMPUTABLE as RECOMPUTABLE
    from hlat.model.spec import Axis as Axis
    from hlat.model.spec import GradientSum as GradientSum
    from hlat.model.varlen_attention import DOCUMENT_ATTENTION as DOCUMENT_ATTENTION

__getattr__ = lazily(
    __name__,
    {
        "architectures": "model_spec",
        "builder": "allocate build replace_parameters",
        "decoder": "Decoder",
        "decoding.step": "CompiledStep compile_step",
        "derived.activations": "RankWorkload activation_bytes",
        "derived.axes": "axis_share element_share",
        "derived.counts": (
            "attended_positions block_share count_parameters flops_per_token forward_flops_per_token hidden_share"
        ),
        "derived.parameter_layout": "RowBlock RowLayout parameter_layouts",
        "document_mask": "DocumentMask",
        "hf.config": "SpecialIds hf_class",
        "hf.names": "EMBEDDING HEAD canonical_shapes check_canonical check_layers merge_tied",
        "hf.read": "LazyTensors read_hf read_special_ids",
        "hf.write": "write_hf",
        "init": "initialise",
        "kernels.attention": "ATTENTION head_sums_shape",
        "kernels.choice": (
            "are_used_on attention_is_used_on builds_masks describe_attention describe_kernels fuses_in_triton"
        ),
        "kernels.source": "begin_compilation",
        "kv_cache": "DeviceKVCache KVCache LayerCache",
        "layers": "DecoderBlock",
        "local_parameters": "LocalParameter collect_local_parameters local",
        "loss": "CrossEntropy HEAD_ROWS Head IGNORED Reduction head_loss next_tokens row_losses",
        "matmul": (
            "Linear attend attention_heads attention_kernel computing_as_simulated deterministic_by_default "
            "product_library recipe_heads split_backward"
        ),
        "model_shard": "ModelShard kv_replication shard_heads vocabulary_rows",
        "spec": "Axis GradientSum RECOMPUTABLE",
        "varlen_attention": "DOCUMENT_ATTENTION",
    },
)
