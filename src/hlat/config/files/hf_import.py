"""Conversion of a Hugging Face config.json to the fields of the model section.

    config.json (transformers 4 or 5) -> settings that hlat does not compute -> RecipeError that lists all of them
                                      -> fields of ModelConfig

``config/sections/architectures.py`` lists the families and what differs between them. A setting that would change the
result and is not supported is refused; settings that concern only transformers are ignored.
"""

import sys
from collections.abc import Mapping
from typing import Any

from hlat.config.errors import Problem, RecipeError
from hlat.config.sections import ARCHITECTURES, MOST_LAYERS, MOST_TOKENS, WIDEST, ArchitectureEntry

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
_OPTIONAL_SIZES = {"head_dim": "head_dim", "max_position_embeddings": "max_sequence_length"}
_UNLIMITED = "attention reaches back to the first token in this family."
_UNKNOWN = ArchitectureEntry("")  # so that the other fields of an unknown family are checked too


def hf_to_model(config: Any) -> dict[str, Any]:
    """Convert the content of a config.json (any JSON value) to fields of ``ModelConfig``.

    Such a file says nothing of ``coalesce`` or of the initial weights but their standard deviation.

    Raises:
        RecipeError: lists everything missing or unsupported, by its name in config.json.
    """
    if not isinstance(config, Mapping):
        raise RecipeError([Problem("config.json", "must be a JSON object.", "", config, True)], "config.json")
    reader = _Reader(config)
    name = reader.model_type()
    family = ARCHITECTURES.get(name, _UNKNOWN)
    fields: dict[str, Any] = {ours: reader.positive(theirs) for theirs, ours in _SIZES.items()}
    fields["architecture"] = name
    fields["kv_heads"] = reader.kv_heads(family, fields["heads"])
    for theirs, ours in _OPTIONAL_SIZES.items():
        value = _given(config, theirs, family.implied.get(theirs))
        if value is not None:
            fields[ours] = reader.positive(theirs, value)
    fields["norm_eps"] = reader.number("rms_norm_eps", family.implied.get("rms_norm_eps", 1e-6))
    fields["init_std"] = reader.number("initializer_range", 0.02)
    fields["tie_embeddings"] = reader.flag("tie_word_embeddings")
    options = {"qkv_bias": False, "qk_norm": False, **family.fixed}
    if "qkv_bias" in family.free:
        options["qkv_bias"] = reader.flag("attention_bias")
    window = reader.window(family)
    if "sliding_window" in family.free:
        options["sliding_window"] = window
    fields |= options
    fields["rope"] = reader.rope()
    reader.refuse_unsupported(family)
    if reader.problems:
        raise RecipeError(reader.problems, "config.json")
    return fields


def _given(config: Mapping[str, Any], name: str, otherwise: Any) -> Any:
    """Return the value of a field, or another one if it is absent or null."""
    value = config.get(name)
    return otherwise if value is None else value


class _Reader:
    """Typed reads that collect problems; a field with a problem reads as its default."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.problems: list[Problem] = []

    def refuse(self, name: str, reason: str, remedy: str = "", value: Any = None) -> None:
        self.problems.append(Problem(name, reason, remedy, value, value is not None))

    def model_type(self) -> str:
        value = self.config.get("model_type")
        if not isinstance(value, str) or value not in ARCHITECTURES:
            self.refuse(
                "model_type", "not a family that hlat computes.", f"It reads {', '.join(ARCHITECTURES)}.", value
            )
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

    def kv_heads(self, family: ArchitectureEntry, heads: int) -> int:
        """Key and value heads. Without num_key_value_heads some families have one per query head; others differ."""
        if self.config.get("num_key_value_heads") is None and family.kv_heads_are_heads:
            return heads
        return self.positive("num_key_value_heads")

    def window(self, family: ArchitectureEntry) -> int | None:
        """Sliding window of attention, if it is shorter than the context; None if attention is not limited.

        Families that always use their window have a default for an absent one, and null for none.
        """
        always = "sliding_window" in family.free
        value = self.config.get("sliding_window", family.implied.get("sliding_window"))
        if value is None or not (always or self.config.get("use_sliding_window")):
            return None
        context = self.config.get("max_position_embeddings")
        if isinstance(value, int) and isinstance(context, int) and value >= context:
            return None
        if not always:
            self.refuse("sliding_window", _UNLIMITED, "Models of the family mistral have a window.", value)
            return None
        return self.positive("sliding_window", value)

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

    def refuse_unsupported(self, family: ArchitectureEntry) -> None:
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
        for name, reason in family.refused.items():
            if config.get(name):
                self.refuse(name, reason, value=config[name])
        if "sliding_attention" in self.layer_types() and not any(p.path == "sliding_window" for p in self.problems):
            remedy = "All layers have the same attention."
            self.refuse(
                "sliding_window", "layers with and without a window are mixed.", remedy, config.get("sliding_window")
            )
        dtype = config.get("dtype", config.get("torch_dtype"))
        if dtype is not None and str(dtype).removeprefix("torch.") not in _DTYPES:
            self.refuse("dtype", "not a dtype hlat reads.", f"It reads {', '.join(_DTYPES)}.", dtype)
