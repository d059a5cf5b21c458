"""Hugging Face config.json of a model: the transformers class that computes the same, and its fields.

    model section -> class of its family, fields of every family, fields of this family -> config.json

``config/sections/model.py`` lists the families; the inverse is ``hlat.config.hf_to_model``. A model of the
architecture llama with biases or norms of queries and keys is exported as Qwen2 or Qwen3. With both it is Qwen3 with
attention_bias, whose output bias is exported as zeros.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hlat.config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    ModelConfig,
    Problem,
    RecipeError,
    RopeConfig,
    architecture_entry,
    exported_family,
    written_fields,
)

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float64: "float64"}


@dataclass(frozen=True)
class HFClass:
    """A model class of transformers."""

    model_type: str
    class_name: str


# A special token id, several with the same meaning (a chat model has several end-of-text tokens), or None
TokenIds = int | list[int] | None


@dataclass(frozen=True)
class SpecialIds:
    """Special token ids of config.json or generation_config.json."""

    bos: TokenIds = None
    eos: TokenIds = None
    pad: TokenIds = None

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "SpecialIds":
        """Read them from a file's content; a value that is not a token id counts as None."""
        return cls(*(_token_ids(content.get(f"{name}_token_id")) for name in ("bos", "eos", "pad")))

    @property
    def as_json(self) -> dict[str, TokenIds]:
        """Fields of the JSON file; a token that is None has no field."""
        named = {"bos_token_id": self.bos, "eos_token_id": self.eos, "pad_token_id": self.pad}
        return {name: value for name, value in named.items() if value is not None}


def _token_ids(value: Any) -> TokenIds:
    items = value if isinstance(value, list) else [value]
    return value if items and all(type(item) is int and item >= 0 for item in items) else None


def hf_class(config: ModelConfig, family: str | None = None) -> HFClass:
    """Return the transformers class that computes the same function as the model, of a family if one is given."""
    name = family or exported_family(config.architecture, config.options)
    if not (class_name := architecture_entry(name).class_name):
        reason = "transformers has no class of this architecture, so it cannot be exported."
        raise RecipeError([Problem("model.architecture", reason, "Use hlat evaluate and hlat generate.", name, True)])
    return HFClass(name, class_name)


def config_json(
    config: ModelConfig,
    dtype: torch.dtype,
    eos_id: TokenIds,
    bos_id: TokenIds,
    pad_id: TokenIds = None,
    family: str | None = None,
) -> dict[str, Any]:
    """Build the content of config.json for weights of a dtype, as ``family`` or the model's own architecture.

    RecipeError: the model has no maximum sequence length, or config.json has no name for the dtype.
    """
    problems = []
    if config.max_sequence_length is None:
        reason = "config.json needs a maximum context length."
        problems.append(Problem("model.max_sequence_length", reason, "Set it, for instance to data.sequence_length."))
    if dtype not in DTYPE_NAMES:
        remedy = f"Use {', '.join(DTYPE_NAMES.values())}."
        problems.append(Problem("dtype", f"config.json has no name for {dtype}.", remedy))
    if problems:
        raise RecipeError(problems, "export to Hugging Face")
    target = hf_class(config, family)
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
        "pad_token_id": None,  # written, as some classes have others by default
        **SpecialIds(bos_id, eos_id, pad_id).as_json,
        "torch_dtype": DTYPE_NAMES[dtype],
        # RoPE in the fields of transformers 5 (rope_parameters) and of 4 (rope_theta, rope_scaling): both can read it.
        **_rope(config.rope, config.max_sequence_length),
    }
    return content | _layers(config, target.model_type) | written_fields(target.model_type, config.options)


def _layers(config: ModelConfig, family: str) -> dict[str, Any]:
    """Return the fields that say what differs between layers, for a family that has them."""
    entry, fields = architecture_entry(family), dict[str, Any]()
    free = entry.free
    kinds = [config.layer_kind(index) for index in range(config.layers)]
    if "layer_types" in free:
        types = [FULL_ATTENTION if kind.window is None else SLIDING_ATTENTION for kind in kinds]
        # Without a window in any layer, one that changes nothing: transformers makes the mask all the same.
        fields = {"layer_types": types, "sliding_window": config.sliding_window or config.max_sequence_length}
    if "local_rope" in free:
        ropes = {FULL_ATTENTION: config.rope, SLIDING_ATTENTION: config.local_rope or config.rope}
        fields["rope_parameters"] = {kind: _rope(rope, None)["rope_parameters"] for kind, rope in ropes.items()}
        # The notation of transformers 4
        fields |= {name: ropes[SLIDING_ATTENTION].theta for name in ("rope_local_base_freq",) if name in entry.implied}
    if "query_pre_attn_scalar" in free:
        fields["query_pre_attn_scalar"] = config.query_pre_attn_scalar or config.n_head_dim
    if "rope_layers" in free:
        fields["no_rope_layers"] = [int(kind.rope is not None) for kind in kinds]
        fields["layer_types"] = [FULL_ATTENTION] * config.layers
    return fields


def _rope(rope: RopeConfig, longest: int | None) -> dict[str, Any]:
    scaling, theta = rope.scaling, rope.theta
    fields: dict[str, Any] = {"rope_type": "default" if scaling is None else scaling.kind}
    if scaling is not None:
        named = {theirs: getattr(scaling, ours) for ours, theirs in scaling.hf_names().items()}
        fields |= {name: value for name, value in named.items() if value is not None}
    # With some scalings, this is the context before scaling.
    longest = fields.pop("max_position_embeddings", longest)
    share = {} if rope.partial_rotary_factor == 1 else {"partial_rotary_factor": rope.partial_rotary_factor}
    return {
        "max_position_embeddings": longest,
        "rope_theta": theta,
        "rope_scaling": fields if scaling is not None else None,
        "rope_parameters": {"rope_theta": theta, **fields, **share},
    }
