"""The LLaMA-family decoder: modules, initial weights, parameter layout, counts and Hugging Face import and export."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.model.activations import *
    from hlat.model.architectures import *
    from hlat.model.counts import *
    from hlat.model.decoder import *
    from hlat.model.decoding import *
    from hlat.model.document_attention import *
    from hlat.model.hf.config import *
    from hlat.model.hf.folder import *
    from hlat.model.kernels.altered_softmax import *
    from hlat.model.kernels.attention import *
    from hlat.model.kernels.library import *
    from hlat.model.kernels.matmul import *
    from hlat.model.kernels.source import *
    from hlat.model.kv_cache import *
    from hlat.model.layers import *
    from hlat.model.loss import *
    from hlat.model.parameter_layout import *
    from hlat.model.parametrization import *
    from hlat.model.spec import *

__getattr__ = lazily(
    __name__,
    {
        "activations": "ActivationBytes RankWorkload activation_bytes",
        "architectures": "architecture_of model_spec",
        "kernels.altered_softmax": "AlteredSoftmax",
        "kernels.attention": (
            "attend attention_heads attention_is_used_on attention_kernel builds_masks "
            "describe_attention deterministic_by_default head_sums_shape recipe_heads"
        ),
        "counts": (
            "attended_positions block_share count_parameters effective_window flops_per_token "
            "forward_flops_per_token hidden_share"
        ),
        "decoder": "Decoder LocalParameter allocate build collect_local_parameters initialise local replace_parameters",
        "decoding": "CompiledStep compile_step",
        "document_attention": "ATTENTION_OPERATORS DocumentMask",
        "hf.config": "SpecialIds hf_class",
        "hf.folder": "LazyTensors read_hf read_special_ids write_hf",
        "kernels.library": "are_used_on describe_kernels fuses_in_triton",
        "kernels.source": "begin_compilation",
        "kv_cache": "DeviceKVCache KVCache LayerCache",
        "layers": "DecoderBlock",
        "loss": "CrossEntropy HEAD_ROWS Head IGNORED Reduction head_loss loss_terms next_tokens row_losses",
        "kernels.matmul": "Linear computing_as_simulated product_library split_backward",
        "parameter_layout": (
            "EMBEDDING HEAD RowBlock RowLayout canonical_shapes check_canonical check_layers merge_tied "
            "parameter_layouts"
        ),
        "parametrization": "scale_lines",
        "spec": (
            "Axis GradientSum ModelShard RECOMPUTABLE axis_share element_share kv_replication shard_heads "
            "vocabulary_rows"
        ),
    },
)
