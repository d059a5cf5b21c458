"""Models in files: the config.json of Hugging Face, and folders of weights, as fields of the model section.

    config.json (transformers 4 or 5) -> settings that hlat does not compute -> RecipeError that lists all of them
                                      -> fields of ModelConfig
    checkpoint of hlat (meta.json) or Hugging Face folder (config.json) -> ModelFolder: the numbers, and the tokenizer

``ARCHITECTURES`` (``config/sections/model.py``) lists the families and what differs between them. A setting that would
change the result and is not supported is refused; settings that concern only transformers are ignored.

No weights are read. The folder of a run is refused, since its newest checkpoint is another one tomorrow, and the same
recipe would then describe another start.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from hlat.config.errors import Problem, RecipeError, size_problem
from hlat.config.sections.base import MOST_TOKENS
from hlat.config.sections.model import (
    ARCHITECTURES,
    FULL_ATTENTION,
    HF_NAMES,
    MOST_LAYERS,
    SLIDING_ATTENTION,
    WIDEST,
    ArchitectureEntry,
)
from hlat.config.sections.rope import SCALINGS, RopeScaling
from hlat.runtime.storage.local_files import read_small_file
from hlat.runtime.terminal import plural


def read_config_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a config.json, or in its folder's; ValueError ends a sentence that says why not."""
    try:
        content = json.loads(read_small_file(path / "config.json" if path.is_dir() else path))
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno} is not JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    if (too_large := size_problem(content)) is not None:
        raise ValueError(too_large.rstrip("."))
    return content


_DTYPES = ("float32", "float16", "bfloat16", "float64")
_MOST_BY_SETTING = {
    "vocab_size": MOST_TOKENS,
    "num_hidden_layers": MOST_LAYERS,
    "max_position_embeddings": MOST_TOKENS,
    "original_max_position_embeddings": MOST_TOKENS,
}
_SIZES = {
    name: HF_NAMES.get(name, name)
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}
_OPTIONAL_SIZES = {name: HF_NAMES.get(name, name) for name in ("head_dim", "max_position_embeddings")}
_ATTENTION_KINDS = {
    "attention": FULL_ATTENTION,
    FULL_ATTENTION: FULL_ATTENTION,
    SLIDING_ATTENTION: SLIDING_ATTENTION,
}  # attention is the name in older files
# Beside the fields of a scaling; finetuned is a note in files of YaRN's authors
_ROPE_SETTINGS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"})
_UNKNOWN_ARCHITECTURE = ArchitectureEntry("")  # so that the other fields of an unknown family are checked too


def hf_to_model(config: Any) -> dict[str, Any]:
    """Convert the content of a config.json (any JSON value) to fields of ``ModelConfig``.

    Raises:
        RecipeError: lists everything missing or unsupported, by its name in config.json.
    """
    if not isinstance(config, Mapping):
        raise RecipeError([Problem("config.json", "must be a JSON object.", "", config, True)], "config.json")
    reader = _Reader(config)
    family = reader.family
    fields: dict[str, Any] = {ours: reader.positive(theirs) for theirs, ours in _SIZES.items()}
    fields["architecture"] = str(config.get("model_type"))
    fields["kv_heads"] = reader.kv_heads(fields["heads"])
    for theirs, ours in _OPTIONAL_SIZES.items():
        value = _given(config, theirs, family.implied.get(theirs))
        if value is not None:
            fields[ours] = reader.positive(theirs, value)
    fields |= reader.ropes()
    scaling = fields.get("rope", {}).get("scaling")
    if scaling is not None and (context := SCALINGS[scaling["kind"]].stretched(scaling)) is not None:
        fields["max_sequence_length"] = context
    # The defaults are those of transformers' configurations.
    fields["norm_eps"] = reader.number("rms_norm_eps", family.implied.get("rms_norm_eps", 1e-6))
    fields["init_std"] = reader.number("initializer_range", 0.02)
    fields["tie_embeddings"] = reader.flag(
        "tie_word_embeddings", otherwise=family.implied.get("tie_word_embeddings", False)
    )
    options = {"qkv_bias": False, "qk_norm": False, **family.fixed}
    if "qkv_bias" in family.free:
        options["qkv_bias"] = reader.flag("attention_bias")
    options |= reader.layers(fields["layers"], fields.get("max_sequence_length"))
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if name in family.free:
            absent = config.get(name, family.implied[name]) is None
            options[name] = None if absent else reader.number(name, family.implied[name])
    if "query_pre_attn_scalar" in family.free:
        scalar = reader.positive("query_pre_attn_scalar")
        options["query_pre_attn_scalar"] = None if scalar == fields.get("head_dim") else scalar
    if fields.get("local_rope") is not None and options.get("sliding_window") is None:
        fields["local_rope"] = None  # of no layer
    fields |= options
    reader.refuse_unsupported()
    if reader.problems:
        raise RecipeError(reader.problems, "config.json")
    return fields


def _given(config: Mapping[str, Any], name: str, otherwise: Any) -> Any:
    value = config.get(name)
    return otherwise if value is None else value


def _pattern(values: Sequence[Any]) -> list[Any]:
    """Return the shortest pattern that gives the values if it is repeated."""
    count = len(values)
    shortest = next(length for length in range(1, count + 1) if values[length:] == values[: count - length])
    return list(values[:shortest])


class _Reader:
    """Typed reads that collect problems; a field with a problem reads as its default."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.problems: list[Problem] = []
        self.family = self._family()

    def refuse(self, name: str, reason: str, remedy: str = "", value: Any = None) -> None:
        problem = Problem(name, reason, remedy, value, value is not None)
        if problem not in self.problems:  # a field may be read twice
            self.problems.append(problem)

    def _family(self) -> ArchitectureEntry:
        value = self.config.get("model_type")
        if isinstance(value, str) and value in ARCHITECTURES:
            return ARCHITECTURES[value]
        remedy = f"It reads {', '.join(ARCHITECTURES)}."
        self.refuse("model_type", "not a family that hlat computes.", remedy, value)
        return _UNKNOWN_ARCHITECTURE

    def positive(self, name: str, value: Any = None) -> int:
        value = _given(self.config, name, self.family.implied.get(name)) if value is None else value
        if value is None:
            self.refuse(name, "is required.")
        elif isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            self.refuse(name, "must be a positive whole number.", value=value)
        elif value > (most := _MOST_BY_SETTING.get(name, WIDEST)):
            self.refuse(name, f"is more than {most:,}, the most that hlat reads.", value=value)
        else:
            return value
        return 1

    def number(self, name: str, default: float | None, source: Mapping[str, Any] | None = None) -> float:
        # An absent number has a default. Null is none: transformers refuses it, and other programs differ.
        value = (self.config if source is None else source).get(name, default)
        if value is None:
            self.refuse(name, "is required here.")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            self.refuse(name, "must be a positive number.", value=value)
        else:
            return float(value)
        return 1.0

    def flag(self, name: str, source: Mapping[str, Any] | None = None, *, otherwise: bool = False) -> bool:
        value = (self.config if source is None else source).get(name, otherwise)
        if value is not None and not isinstance(value, bool):
            self.refuse(name, "must be true or false.", value=value)
        return value is True

    def kv_heads(self, heads: int) -> int:
        name = "num_key_value_heads"
        # Null means one per query head; without the field, families differ.
        if self.config.get(name) is None and (self.family.kv_heads_are_heads or name in self.config):
            return heads
        return self.positive(name)

    def layers(self, layers: int, context: int | None) -> dict[str, Any]:
        """Read the options that say which layers have a window, and which have rotary positions."""
        (window, kinds), free = self.window(layers, context), self.family.free
        options: dict[str, Any] = {"sliding_window": window} if "sliding_window" in free else {}
        if "layer_types" in free:
            mixed = window is not None and FULL_ATTENTION in kinds
            options["layer_types"] = _pattern(kinds) if mixed else None
        if "rope_layers" in free:
            rotated = self.rope_layers(layers)
            options["rope_layers"] = None if all(rotated) else _pattern(rotated)
        return options

    def rope_layers(self, layers: int) -> list[bool]:
        """Read which layers have rotary positions, those with a 1 in no_rope_layers."""
        value = self.config.get("no_rope_layers")
        if value is None:
            interval = self.positive("no_rope_layer_interval")
            return [(index + 1) % interval != 0 for index in range(layers)]
        if not isinstance(value, list) or len(value) < layers or any(each not in (0, 1) for each in value):
            self.refuse("no_rope_layers", f"must be a list of {plural(layers, 'number')}, 0 or 1.", value=value)
            return [True] * layers
        return [each == 1 for each in value[:layers]]

    def window(self, layers: int, context: int | None) -> tuple[int | None, list[str]]:
        """Sliding window of attention, None if it changes nothing; and the kind of attention of each layer."""
        family = self.family
        # Families that always use their window have a default for an absent one, and null for none.
        always = "sliding_window" in family.free
        kinds = self.layer_types(layers)
        value = self.config.get("sliding_window", family.implied.get("sliding_window"))
        if value is None or not (always or self.config.get("use_sliding_window")):
            if SLIDING_ATTENTION in kinds:
                self.refuse(
                    "layer_types",
                    f"{SLIDING_ATTENTION} without a sliding_window that is in use.",
                    value=SLIDING_ATTENTION,
                )
            return None, kinds
        if not kinds and "layer_types" in family.implied:
            kinds = list(islice(cycle(family.implied["layer_types"]), layers))
        if not kinds and "sliding_window_pattern" in family.implied:
            every = self.positive("sliding_window_pattern")
            kinds = [SLIDING_ATTENTION if index % every else FULL_ATTENTION for index in range(1, layers + 1)]
        # A window as long as the context changes nothing, unless layers with a window have a RoPE of their own.
        may_drop = "local_rope" not in family.free
        if may_drop and isinstance(value, int) and context is not None and value >= context:
            return None, kinds
        first = 0 if always else _given(self.config, "max_window_layers", family.implied.get("max_window_layers", 0))
        if not kinds and isinstance(first, int):
            full = min(max(first, 0), layers)
            kinds = [FULL_ATTENTION] * full + [SLIDING_ATTENTION] * (layers - full)
        if kinds and SLIDING_ATTENTION not in kinds:
            return None, kinds
        if FULL_ATTENTION in kinds and "layer_types" not in family.free:
            reason = "layers with and without a window are mixed."
            self.refuse("sliding_window", reason, "All layers have the same attention here.", value)
        elif not always:
            self.refuse("sliding_window", "models of this family have no window here.", value=value)
        return self.positive("sliding_window", value), kinds

    def ropes(self) -> dict[str, Any]:
        """RoPE of the model, and of its layers with a sliding window if that is another one."""
        family = self.family
        implied, base = family.implied.get("rope_theta", 10000.0), "rope_local_base_freq"
        config = {"rope_theta": implied, **self.config}
        if "local_rope" not in family.free:
            if self.config.get("rope_parameters") is None and self.config.get("rope_scaling") is None:
                config["rope_parameters"] = family.implied.get("rope_parameters")
            return {"rope": self.rope(config)}
        found = self.config.get("rope_parameters")
        if found is None:
            # Without another field transformers 4 reads one theta for all, 5 the default for layers with a window.
            if base not in family.implied and config["rope_theta"] != implied:
                remedy = f"Write rope_parameters, with {FULL_ATTENTION} and {SLIDING_ATTENTION}."
                self.refuse("rope_theta", "is ambiguous for layers with a window.", remedy, config["rope_theta"])
            found = {}
        elif not isinstance(found, Mapping) or not found.keys() <= {FULL_ATTENTION, SLIDING_ATTENTION}:
            self.refuse("rope_parameters", f"must have {FULL_ATTENTION} and {SLIDING_ATTENTION}.", value=found)
            return {}
        rope = self.rope({**config, "rope_parameters": found.get(FULL_ATTENTION)})
        theta = _given(self.config, base, family.implied.get(base, implied))
        local = self.rope({"rope_theta": theta, "rope_parameters": found.get(SLIDING_ATTENTION)})
        return {"rope": rope, "local_rope": None if local == rope else local}

    def rope(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Theta, scaling and the rotated share of a head, as transformers reads them."""
        new, old = config.get("rope_parameters"), config.get("rope_scaling")
        # rope_parameters (transformers 5) are replaced as a whole by rope_scaling (4) where that is given, too.
        place, words = ("rope_parameters", new) if old in (None, {}) else ("rope_scaling", old)
        words = {} if words is None else words
        if not isinstance(words, Mapping):
            self.refuse(place, "must be a mapping.", value=words)
            return {}
        if any(isinstance(value, Mapping) for value in words.values()):
            self.refuse(place, "has RoPE settings for each kind of layer.", "All layers have the same here.")
        is_null = config.get("rope_theta", 0) is None and words.get("rope_theta") is not None  # words has it
        theta = self.number("rope_theta", None if is_null else self.number("rope_theta", 10000.0, config), words)
        if words is not new and isinstance(new, Mapping) and new.get("rope_theta", theta) != theta:
            reason = f"replaces rope_parameters, whose rope_theta is {new['rope_theta']} and not {theta}."
            self.refuse(place, reason, "Write one of the two, with the rope_theta that is meant.")
        rope: dict[str, Any] = {"theta": theta}
        share = words.get("partial_rotary_factor", _given(config, "partial_rotary_factor", 1.0))
        if "rope.partial_rotary_factor" in self.family.free:
            rope["partial_rotary_factor"] = self.number("partial_rotary_factor", None, {"partial_rotary_factor": share})
            if rope["partial_rotary_factor"] > 1:
                self.refuse("partial_rotary_factor", "must not be more than 1.", value=share)
        elif share != 1.0:
            self.refuse("partial_rotary_factor", "whole heads are rotated in this family.", value=share)
        # A factor without a type says that a scaling is meant, but not which.
        kind = words.get("rope_type", words.get("type", None if "factor" in words else "default"))
        section = SCALINGS[kind] if isinstance(kind, str) and kind in self.family.scalings else None
        if section is None and kind != "default":
            remedy = f"It knows {', '.join(('default', *self.family.scalings))}."
            self.refuse(f"{place}.rope_type", "a RoPE scaling that hlat does not compute.", remedy, kind)
            return rope
        known = _ROPE_SETTINGS | (set() if section is None else set(section.hf_names().values()))
        for name, value in words.items():
            if name not in known and value is not None and not isinstance(value, Mapping):
                self.refuse(f"{place}.{name}", f"hlat does not know it with rope_type {kind}.", value=value)
        return rope | {"scaling": None if section is None else {"kind": kind} | self.scaling(section, words, config)}

    def scaling(
        self, section: type[RopeScaling], words: Mapping[str, Any], config: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Fields of a scaling from those of rope_parameters or rope_scaling."""
        fields: dict[str, Any] = {}
        for ours, theirs in section.hf_names().items():
            if ours == "original_max_position":  # transformers prefers the one beside the mapping
                value = _given(config, theirs, words.get(theirs))
                fields |= {} if value is None else {ours: self.positive(theirs, value)}
            elif section.model_fields[ours].annotation is bool and theirs in words:  # null is false to transformers
                fields[ours] = self.flag(theirs, words)
            elif words.get(theirs) is not None:
                fields[ours] = self.number(theirs, None, words)
        longest = self.config.get("max_position_embeddings")
        fields = section.inferred(fields, longest if type(longest) is int and longest <= MOST_TOKENS else None) | fields
        for ours, theirs in section.hf_names().items():
            if ours not in fields and ours not in section.optional_in_hf:
                self.refuse(theirs, "is required here.")
        return fields

    def layer_types(self, layers: int) -> list[str]:
        value = self.config.get("layer_types")
        if value is None:
            return []
        if not isinstance(value, list) or len(value) != layers:
            self.refuse("layer_types", f"must be a list of {plural(layers, 'layer')}.", value=value)
            return []
        unknown = [kind for kind in value if not isinstance(kind, str) or kind not in _ATTENTION_KINDS]
        if unknown:
            reason = "a kind of attention that hlat does not compute."
            self.refuse("layer_types", reason, "It computes full_attention.", unknown[0])
            return []
        return [_ATTENTION_KINDS[kind] for kind in value]

    def refuse_unsupported(self) -> None:
        config, family = self.config, self.family
        field, *names = family.activation
        if (act := config.get(field, names[0])) not in names:
            self.refuse(field, "another activation of the feed-forward layer.", f"Only {names[0]} is computed.", act)
        if config.get("mlp_bias"):
            self.refuse("mlp_bias", "feed-forward layers have no biases here.", value=True)
        if config.get("attention_dropout"):
            reason = "attention is trained without dropout."
            self.refuse("attention_dropout", reason, "Set it to 0 if that is meant.", config["attention_dropout"])
        if config.get("quantization_config") is not None:
            remedy = "Save the model in bfloat16 or float32 with transformers first."
            self.refuse("quantization_config", "quantized weights cannot be trained.", remedy)
        for name, reason in family.refused.items():
            value = config.get(name, family.implied.get(name))
            if (value or False) != family.written.get(name, False):
                self.refuse(name, reason, value=value)
        if not config.get("is_causal", True):
            self.refuse("is_causal", "attention never looks at later tokens here.", value=config["is_causal"])
        if config.get("transformers_weights") is not None:
            remedy = "Rename that file to model.safetensors, and remove the field."
            self.refuse(
                "transformers_weights", "names another file of weights.", remedy, config["transformers_weights"]
            )
        dtype = config.get("dtype", config.get("torch_dtype"))
        if dtype is not None and str(dtype).removeprefix("torch.") not in _DTYPES:
            self.refuse("dtype", "not a dtype hlat reads.", f"It reads {', '.join(_DTYPES)}.", dtype)


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
_LARGEST_META = 1 << 26  # bytes of a meta.json, which may hold the last metrics of a run
_CHOSEN_ELSEWHERE = ("preset", "hf_config")  # how the run that saved the checkpoint had found its numbers


class ModelFolder(NamedTuple):
    """Fields of the model section that a folder of weights stands for, and its tokenizer."""

    fields: dict[str, Any]
    tokenizer: str | None  # folder of its tokenizer, as ``data.tokenizer.path`` takes it; None if it has none


def read_model_folder(folder: Path) -> ModelFolder:
    """Read the model of a checkpoint of hlat, or of a Hugging Face folder.

    Raises:
        ValueError: it is neither, or unreadable; says why as the end of a sentence, with what would work.
        RecipeError: hlat does not support the model of the config.json; lists every reason.
    """
    if (folder / "meta.json").is_file():
        return ModelFolder(_saved_model(folder), _with_tokenizer(folder / "tokenizer"))
    if (folder / "config.json").is_file():
        return ModelFolder(hf_to_model(read_config_json(folder)), _with_tokenizer(folder))
    if not folder.is_dir():
        raise ValueError("there is no such folder")
    saved = sorted(file.parent for file in (*folder.glob("*/meta.json"), *folder.glob("checkpoints/*/meta.json")))
    if saved:
        # The newest checkpoint is another one tomorrow, and the same recipe would then describe another start.
        raise ValueError(f"it has several checkpoints, and their number changes; name one, such as {saved[-1]}")
    raise ValueError("it has neither meta.json, as checkpoints of hlat do, nor config.json, as Hugging Face models do")


def _saved_model(folder: Path) -> dict[str, Any]:
    try:
        meta = json.loads(read_small_file(folder / "meta.json", _LARGEST_META))
    except OSError as error:
        raise ValueError(f"meta.json: {error.strerror or error}") from error
    except (ValueError, RecursionError):
        raise ValueError("its meta.json is damaged; hlat checkpoint verify says more") from None
    recipe = meta.get("recipe") if isinstance(meta, dict) else None
    recipe = recipe if isinstance(recipe, dict) else {}
    model = (meta.get("model") if isinstance(meta, dict) else None) or recipe.get("model")
    if not isinstance(model, dict):
        raise ValueError("its meta.json describes no model")
    fields = {name: value for name, value in model.items() if name not in _CHOSEN_ELSEWHERE}
    data = recipe.get("data")
    if fields.get("max_sequence_length") is None and isinstance(data, dict) and "sequence_length" in data:
        fields["max_sequence_length"] = data["sequence_length"]
    return fields


def _with_tokenizer(folder: Path) -> str | None:
    return str(folder) if any((folder / name).is_file() for name in _TOKENIZER_FILES) else None
