"""Conversion of a Hugging Face config.json to the fields of the model section.

    config.json (transformers 4 or 5) -> settings that hlat does not compute -> RecipeError that lists all of them
                                      -> fields of ModelConfig

Supported families: llama, mistral without a sliding window, qwen2 and qwen3. A setting that would change the result and
is not supported is refused; settings that concern only transformers are ignored.
"""

import sys
from collections.abc import Mapping
from typing import Any

from hlat.config.errors import Problem, RecipeError
from hlat.config.sections import MOST_LAYERS, MOST_TOKENS, WIDEST

_DTYPES = ("float32", "float16", "bfloat16", "float64")
_MOST = {
    "vocab_size": MOST_TOKENS,
    "num_hidden_layers": MOST_LAYERS,
    "max_position_embeddings": MOST_TOKENS,
    "original_max_position_embeddings": MOST_TOKENS,
}
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
}
_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


def hf_to_model(config: Any) -> dict[str, Any]:
    """Convert the content of a config.json (any JSON value) to fields of ``ModelConfig``.

    Such a file says nothing of ``coalesce`` or of the initial weights but their standard deviation.

    Raises:
        RecipeError: lists everything missing or unsupported, by its name in config.json.
    """
    if not isinstance(config, Mapping):
        raise RecipeError([Problem("config.json", "must be a JSON object.", "", config, True)], "config.json")
    reader = _Reader(config)
    model_type = reader.model_type()
    fields: dict[str, Any] = {ours: reader.positive(theirs) for theirs, ours in _SIZES.items()}
    fields["kv_heads"] = reader.kv_heads(model_type, fields["heads"])
    if config.get("head_dim") is not None:
        fields["head_dim"] = reader.positive("head_dim")
    elif model_type == "qwen3":
        fields["head_dim"] = 128  # the default of that family, independent of hidden_size / heads
    if config.get("max_position_embeddings") is not None:
        fields["max_sequence_length"] = reader.positive("max_position_embeddings")
    fields["norm_eps"] = reader.number("rms_norm_eps", 1e-6)
    fields["init_std"] = reader.number("initializer_range", 0.02)
    fields["tie_embeddings"] = reader.flag("tie_word_embeddings")
    fields["qkv_bias"] = model_type == "qwen2" or (model_type != "mistral" and reader.flag("attention_bias"))
    fields["qk_norm"] = model_type == "qwen3"
    fields["rope"] = reader.rope()
    reader.refuse_unsupported(model_type)
    if reader.problems:
        raise RecipeError(reader.problems, "config.json")
    return fields


class _Reader:
    """Typed reads that collect problems; a field with a problem reads as its default."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.problems: list[Problem] = []

    def refuse(self, name: str, reason: str, remedy: str = "", value: Any = None) -> None:
        self.problems.append(Problem(name, reason, remedy, value, value is not None))

    def model_type(self) -> str:
        value = self.config.get("model_type")
        if value not in _MODEL_TYPES:
            self.refuse("model_type", "not a family that hlat computes.", f"It reads {', '.join(_MODEL_TYPES)}.", value)
        return str(value)

    def positive(self, name: str, value: Any = None) -> int:
        value = self.config.get(name) if value is None else value
        if value is None:
            self.refuse(name, "is required.")
        elif isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            self.refuse(name, "must be a positive whole number.", value=value)
        elif value > (most := _MOST.get(name, WIDEST)):
            self.refuse(name, f"is more than {most:,}, the most that hlat reads.", value=value)
        else:
            return value
        return 1

    def number(self, name: str, default: float | None, source: Mapping[str, Any] | None = None) -> float:
        value = (self.config if source is None else source).get(name)
        value = default if value is None else value
        if value is None:
            self.refuse(name, "is required here.")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            self.refuse(name, "must be a positive number.", value=value)
        else:
            return float(value)
        return 1.0

    def flag(self, name: str) -> bool:
        value = self.config.get(name)
        if value is not None and not isinstance(value, bool):
            self.refuse(name, "must be true or false.", value=value)
        return value is True

    def kv_heads(self, model_type: str, heads: int) -> int:
        """Default of num_key_value_heads if the file has none: in llama the number of heads; other families differ."""
        if self.config.get("num_key_value_heads") is None and model_type == "llama":
            return heads
        return self.positive("num_key_value_heads")

    def rope(self) -> dict[str, Any]:
        """Theta and scaling, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (4)."""
        place = "rope_parameters" if self.config.get("rope_parameters") is not None else "rope_scaling"
        words = self.config.get(place)
        words = {} if words is None else words
        if not isinstance(words, Mapping):
            self.refuse(place, "must be a mapping.", value=words)
            return {}
        theta = self.number("rope_theta", self.number("rope_theta", 10000.0), words)
        kind = words.get("rope_type", words.get("type", "default"))
        if words.get("partial_rotary_factor", 1.0) != 1.0:
            self.refuse(f"{place}.partial_rotary_factor", "hlat rotates whole heads.")
        scaling: dict[str, Any] | None = None
        if kind == "linear":
            scaling = {"kind": kind, "factor": self.number("factor", None, words)}
        elif kind == "llama3":
            scaling = {"kind": kind}
            for name in ("factor", "low_freq_factor", "high_freq_factor"):
                scaling[name] = self.number(name, None, words)
            name = "original_max_position_embeddings"
            scaling["original_max_position"] = self.positive(name, words.get(name))
        elif kind != "default":
            remedy = "It knows default, linear and llama3."
            self.refuse(f"{place}.rope_type", "a RoPE scaling that hlat does not compute.", remedy, kind)
        return {"theta": theta, "scaling": scaling}

    def layer_types(self) -> list[Any]:
        """Kind of attention of each layer; empty if the file does not say."""
        value = self.config.get("layer_types")
        kinds = [] if value is None else value
        if not isinstance(kinds, list):
            self.refuse("layer_types", "must be a list.", value=value)
            return []
        unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
        if unknown:
            reason = "a kind of attention that hlat does not compute."
            self.refuse("layer_types", reason, "It computes full_attention.", unknown[0])
        return kinds

    def refuse_unsupported(self, model_type: str) -> None:
        """Refuse settings that change the result and that hlat does not compute."""
        config = self.config
        act = config.get("hidden_act", "silu")
        if act not in ("silu", "swish"):
            self.refuse("hidden_act", "the feed-forward layer is SwiGLU.", "Only silu is computed.", act)
        if config.get("mlp_bias"):
            self.refuse("mlp_bias", "feed-forward layers have no biases here.", value=True)
        if config.get("attention_dropout"):
            reason = "attention is trained without dropout."
            self.refuse("attention_dropout", reason, "Set it to 0 if that is meant.", config["attention_dropout"])
        if config.get("quantization_config") is not None:
            remedy = "Save the model in bfloat16 or float32 with transformers first."
            self.refuse("quantization_config", "quantized weights cannot be trained.", remedy)
        if "sliding_attention" in self.layer_types() or self._has_window(model_type):
            window = config.get("sliding_window")
            self.refuse("sliding_window", "attention reaches back to the first token here.", value=window)
        dtype = config.get("dtype", config.get("torch_dtype"))
        if dtype is not None and str(dtype).removeprefix("torch.") not in _DTYPES:
            self.refuse("dtype", "not a dtype hlat reads.", f"It reads {', '.join(_DTYPES)}.", dtype)

    def _has_window(self, model_type: str) -> bool:
        """True if attention is limited to a window shorter than the context; mistral always uses its window."""
        window, context = self.config.get("sliding_window"), self.config.get("max_position_embeddings")
        used = model_type == "mistral" or self.config.get("use_sliding_window")
        if not used or window is None:
            return False
        return not (isinstance(window, int) and isinstance(context, int) and window >= context)
