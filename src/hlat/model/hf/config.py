"""A model as a Hugging Face config.json: which architecture says exactly this, and in which words.

    no bias, no q/k norm -> LlamaForCausalLM
    q/k/v bias           -> Qwen2ForCausalLM
    q/k norm             -> Qwen3ForCausalLM
    both                 -> Qwen3ForCausalLM with attention_bias, whose output bias we write as zeros

The inverse is ``hlat.config.files.hf_to_model``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hlat.config import Problem, RecipeError
from hlat.config.sections import Llama3Scaling, ModelConfig

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float64: "float64"}


@dataclass(frozen=True)
class Architecture:
    """A model class of transformers."""

    model_type: str
    class_name: str
    zero_output_bias: bool = False  # whether it wants an o_proj.bias that our models do not have


TokenIds = int | list[int] | None
"""One special token, several that mean the same (a chat model has several ends of text), or none."""


@dataclass(frozen=True)
class SpecialIds:
    """The special tokens that config.json or generation_config.json names."""

    bos: TokenIds = None
    eos: TokenIds = None
    pad: TokenIds = None

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "SpecialIds":
        """Those that a file names; anything that is no token id is left out."""
        return cls(*(_token_ids(content.get(f"{name}_token_id")) for name in ("bos", "eos", "pad")))

    @property
    def as_json(self) -> dict[str, TokenIds]:
        """As the files name them; those that there are."""
        named = {"bos_token_id": self.bos, "eos_token_id": self.eos, "pad_token_id": self.pad}
        return {name: value for name, value in named.items() if value is not None}


def _token_ids(value: Any) -> TokenIds:
    given = value if isinstance(value, list) else [value]
    return value if given and all(type(item) is int and item >= 0 for item in given) else None


def architecture(config: ModelConfig) -> Architecture:
    """The class that computes exactly what our model does."""
    if config.qk_norm:
        return Architecture("qwen3", "Qwen3ForCausalLM", zero_output_bias=config.qkv_bias)
    if config.qkv_bias:
        return Architecture("qwen2", "Qwen2ForCausalLM")
    return Architecture("llama", "LlamaForCausalLM")


def config_json(
    config: ModelConfig, dtype: torch.dtype, eos_id: TokenIds, bos_id: TokenIds, pad_id: TokenIds = None
) -> dict[str, Any]:
    """The content of config.json.

    RoPE is given in the words of transformers 5 (``rope_parameters``) and of 4 (``rope_theta``, ``rope_scaling``), so
    that both read it.

    Raises:
        RecipeError: the model has no maximum sequence length, or a dtype without a name.
    """
    problems = []
    if config.max_sequence_length is None:
        reason = "config.json has to claim a longest context."
        problems.append(Problem("model.max_sequence_length", reason, "Set it, for instance to data.sequence_length."))
    if dtype not in DTYPE_NAMES:
        remedy = f"Use {', '.join(DTYPE_NAMES.values())}."
        problems.append(Problem("dtype", f"{dtype} cannot be named in config.json.", remedy))
    if problems:
        raise RecipeError(problems, "export to Hugging Face")
    target = architecture(config)
    content: dict[str, Any] = {
        "architectures": [target.class_name],
        "model_type": target.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.n_head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_sequence_length,
        "initializer_range": config.init_std,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        **SpecialIds(bos_id, eos_id, pad_id).as_json,
        "torch_dtype": DTYPE_NAMES[dtype],
        **_rope(config),
    }
    if target.model_type == "llama":
        content |= {"attention_bias": False, "mlp_bias": False}
    else:
        content["use_sliding_window"] = False
    if target.model_type == "qwen3":
        content["attention_bias"] = config.qkv_bias
    return content


def _rope(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope.scaling
    if scaling is None:
        words: dict[str, Any] = {"rope_type": "default"}
    elif isinstance(scaling, Llama3Scaling):
        words = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    else:
        words = {"rope_type": "linear", "factor": scaling.factor}
    theta = config.rope.theta
    return {
        "rope_theta": theta,
        "rope_scaling": words if scaling is not None else None,
        "rope_parameters": {"rope_theta": theta, **words},
    }
