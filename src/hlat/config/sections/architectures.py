"""Architectures by name: the options that each one fixes or leaves open, and its names in Hugging Face's config.json.

    model.architecture -> ARCHITECTURES -> options of the model section, checked by a rule
    config.json        <-> ARCHITECTURES <-> fields of the model section (config/files/hf_import.py, hlat.model.hf)

An architecture's parameters and modules are in ``hlat.model.architectures``, a file each. This table has what recipes
and config.json files need, without torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

ArchitectureName = Literal["llama", "mistral", "olmo2", "qwen2", "qwen3"]

OPTIONS: Mapping[str, Any] = {"qkv_bias": False, "qk_norm": False, "sliding_window": None}
"""Options of the model section that not every architecture has, with the value that means none."""


@dataclass(frozen=True)
class ArchitectureEntry:
    """An architecture, and the model class of transformers that computes the same.

    Attributes:
        class_name: model class of transformers. The model_type of config.json is the architecture's name.
        computes_as: the architecture that computes the same with the same options; a run may change between them.
        fixed: options that every model of the architecture has, with their values.
        free: options that a recipe may choose.
        exported_as: options of which each makes a model that transformers has under another name, in this order.
        implied: values that config.json stands for if it lacks a field.
        kv_heads_are_heads: True if a file without num_key_value_heads means one per query head; else it is required.
        written: further fields of config.json: a constant, or the name of the option in braces.
        refused: fields of config.json whose value must be false or absent, with the reason.
    """

    class_name: str
    computes_as: str = "llama"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    free: tuple[str, ...] = ()
    exported_as: Mapping[str, str] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    kv_heads_are_heads: bool = False
    written: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


_QWEN_WINDOWS = {"sliding_window": 4096, "max_window_layers": 28}  # if use_sliding_window is true

ARCHITECTURES: dict[str, ArchitectureEntry] = {
    "llama": ArchitectureEntry(
        "LlamaForCausalLM",
        free=("qkv_bias", "qk_norm"),
        exported_as={"qk_norm": "qwen3", "qkv_bias": "qwen2"},
        kv_heads_are_heads=True,
        written={"attention_bias": "{qkv_bias}", "mlp_bias": False},
    ),
    "mistral": ArchitectureEntry(
        "MistralForCausalLM",
        free=("sliding_window",),
        implied={"sliding_window": 4096},
        written={"sliding_window": "{sliding_window}"},
    ),
    "olmo2": ArchitectureEntry(
        "Olmo2ForCausalLM",
        computes_as="olmo2",
        implied={"rms_norm_eps": 1e-5},
        kv_heads_are_heads=True,
        written={"attention_bias": False},
        refused={"attention_bias": "projections of OLMo 2 have no biases here."},
    ),
    "qwen2": ArchitectureEntry(
        "Qwen2ForCausalLM",
        fixed={"qkv_bias": True},
        implied=_QWEN_WINDOWS,
        written={"use_sliding_window": False},
    ),
    "qwen3": ArchitectureEntry(
        "Qwen3ForCausalLM",
        fixed={"qk_norm": True},
        free=("qkv_bias",),
        implied={"head_dim": 128, **_QWEN_WINDOWS},  # the width of heads is independent of hidden_size / heads
        written={"use_sliding_window": False, "attention_bias": "{qkv_bias}"},
    ),
}
assert ARCHITECTURES.keys() == set(get_args(ArchitectureName)), "every name has its entry"


def with_fixed_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Add the options that the architecture of a model section fixes, where the section gives none."""
    name = fields.get("architecture", "llama")
    family = ARCHITECTURES.get(name) if isinstance(name, str) else None
    return {**(family.fixed if family is not None else {}), **fields}


def exported_family(architecture: str, options: Mapping[str, Any]) -> str:
    """Return the name under which transformers has a model with these options."""
    other = ARCHITECTURES[architecture].exported_as
    return next((other[name] for name in other if options[name] != OPTIONS[name]), architecture)


def written_fields(architecture: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json that only this architecture has."""
    by_reference = {f"{{{name}}}": value for name, value in options.items()}
    written = ARCHITECTURES[architecture].written
    return {
        name: by_reference.get(value, value) if isinstance(value, str) else value for name, value in written.items()
    }
