"""The model section: one decoder, in numbers. And the architectures by name, with what each one fixes.

    model.architecture -> ARCHITECTURES -> options of the model section, checked by a rule
    config.json        <-> ARCHITECTURES <-> fields of the model section (config/model_files.py, model/hf/config.py)

An architecture's parameters and modules are in ``hlat.model.architectures``, a file each. The table here has what
recipes and config.json files need, without torch: the options that an architecture fixes or leaves open, and its names
in Hugging Face's config.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import Any, Literal, get_args

from pydantic import model_validator

from hlat.config import own_parts
from hlat.config.sections.base import MOST_TOKENS, Length, OwnPart, Section, as_own, fixed
from hlat.config.sections.rope import SCALINGS, Scaling

ArchitectureName = Literal[
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "llama",
    "ministral",
    "mistral",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
]

OPTIONS: Mapping[str, Any] = {
    "qkv_bias": False,
    "qk_norm": False,
    "attention_sinks": False,
    "rope.partial_rotary_factor": 1.0,
    "sliding_window": None,
    "layer_types": None,
    "local_rope": None,
    "rope_layers": None,
    "query_pre_attn_scalar": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
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
        implied: values that config.json stands for if it lacks a field; of a field of each layer, a pattern.
        kv_heads_are_heads: True if a file without num_key_value_heads means one per query head; else it is required.
        activation: the field of config.json that names the activation, and the names that mean this family's.
        written: further fields of config.json: a constant, or the name of the option in braces.
        refused: fields of config.json whose value must be the one that is written, or else false, with the reason.
        scalings: kinds of RoPE scaling that transformers computes for it.
        has_fixed_norms: True if its norms cannot be multiplied, as ``optimizer.transfer`` may have to.
    """

    class_name: str
    computes_as: str = "llama"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    free: tuple[str, ...] = ()
    exported_as: Mapping[str, str] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    kv_heads_are_heads: bool = False
    activation: tuple[str, ...] = ("hidden_act", "silu", "swish")
    written: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    scalings: tuple[str, ...] = tuple(SCALINGS)
    has_fixed_norms: bool = False


_QWEN_WINDOWS = {"sliding_window": 4096, "max_window_layers": 28}  # if use_sliding_window is true
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"  # values of layer_types

_GEMMA = {
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "use_bidirectional_attention": False,
}
_NOT_GEMMA = {
    "attention_bias": "projections of Gemma have no biases here.",
    "use_bidirectional_attention": "attention never looks at later tokens here.",
}

ARCHITECTURES: dict[str, ArchitectureEntry] = {
    "gemma2": ArchitectureEntry(
        "Gemma2ForCausalLM",
        computes_as="gemma2",
        has_fixed_norms=True,
        free=(
            "sliding_window",
            "layer_types",
            "query_pre_attn_scalar",
            "attn_logit_softcapping",
            "final_logit_softcapping",
        ),
        implied={
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "layer_types": (SLIDING_ATTENTION, FULL_ATTENTION),
            "tie_word_embeddings": True,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        written={
            **_GEMMA,
            "attn_logit_softcapping": "{attn_logit_softcapping}",
            "final_logit_softcapping": "{final_logit_softcapping}",
        },
        refused=_NOT_GEMMA,
    ),
    "gemma3_text": ArchitectureEntry(
        "Gemma3ForCausalLM",
        computes_as="gemma3_text",
        has_fixed_norms=True,
        fixed={"qk_norm": True},
        free=("sliding_window", "layer_types", "local_rope", "query_pre_attn_scalar"),
        implied={
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
        },
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        written=_GEMMA,
        refused={
            **_NOT_GEMMA,
            "final_logit_softcapping": "logits are not capped here.",
            "attn_logit_softcapping": "scores of attention are not capped here.",
        },
    ),
    "gpt_oss": ArchitectureEntry(
        "GptOssForCausalLM",
        computes_as="gpt_oss",
        fixed={"qkv_bias": True, "attention_sinks": True},
        free=("sliding_window", "layer_types"),
        implied={
            "rms_norm_eps": 1e-5,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "sliding_window": 128,
            "layer_types": (SLIDING_ATTENTION, FULL_ATTENTION),
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "attention_bias": True,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        # One expert, which the router cannot but choose with a weight of 1, is a dense layer.
        written={
            "attention_bias": True,
            "num_local_experts": 1,
            "num_experts_per_tok": 1,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        refused={
            "attention_bias": "projections of gpt-oss always have biases here.",
            "num_local_experts": "feed-forward layers are dense here: they have one expert.",
            "num_experts_per_tok": "feed-forward layers are dense here: they have one expert.",
            "swiglu_alpha": "gpt-oss has 1.702 here.",
            "swiglu_limit": "gpt-oss has 7 here.",
        },
    ),
    "llama": ArchitectureEntry(
        "LlamaForCausalLM",
        free=("qkv_bias", "qk_norm"),
        exported_as={"qk_norm": "qwen3", "qkv_bias": "qwen2"},
        kv_heads_are_heads=True,
        written={"attention_bias": "{qkv_bias}", "mlp_bias": False},
    ),
    "ministral": ArchitectureEntry(
        "MinistralForCausalLM",
        free=("sliding_window", "layer_types"),
        implied={"sliding_window": 4096, "layer_types": (SLIDING_ATTENTION,)},
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
    "olmo3": ArchitectureEntry(
        "Olmo3ForCausalLM",
        computes_as="olmo2",
        free=("sliding_window", "layer_types", "local_rope"),
        implied={
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "sliding_window": 4096,
            "layer_types": (SLIDING_ATTENTION, SLIDING_ATTENTION, SLIDING_ATTENTION, FULL_ATTENTION),
        },
        kv_heads_are_heads=True,
        written={"attention_bias": False},
        refused={"attention_bias": "projections of OLMo 3 have no biases here."},
    ),
    "phi3": ArchitectureEntry(
        "Phi3ForCausalLM",
        free=("sliding_window", "rope.partial_rotary_factor"),
        implied={"rms_norm_eps": 1e-5},
        kv_heads_are_heads=True,
        written={
            "sliding_window": "{sliding_window}",
            "partial_rotary_factor": "{rope.partial_rotary_factor}",
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
        },
        refused=dict.fromkeys(("resid_pdrop", "embd_pdrop"), "models are trained without dropout."),
        scalings=(),  # it takes YaRN for LongRoPE
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
    "smollm3": ArchitectureEntry(
        "SmolLM3ForCausalLM",
        free=("rope_layers",),
        implied={"rope_theta": 2000000.0, "tie_word_embeddings": True, "no_rope_layer_interval": 4},
        written={"use_sliding_window": False, "attention_bias": False, "mlp_bias": False},
        refused={"attention_bias": "projections of SmolLM3 have no biases here."},
    ),
}
assert ARCHITECTURES.keys() == set(get_args(ArchitectureName)), "every name has its entry"


def architecture_entry(name: str) -> ArchitectureEntry:
    """Return the entry of an architecture; one of the user's own computes as itself, and transformers has no class."""
    return ARCHITECTURES.get(name) or ArchitectureEntry("", computes_as=name, free=tuple(OPTIONS))


def with_fixed_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Add the options that the architecture of a model section fixes, where the section gives none."""
    name = fields.get("architecture", "llama")
    family = ARCHITECTURES.get(name) if isinstance(name, str) else None
    return {**(family.fixed if family is not None else {}), **fields}


def exported_family(architecture: str, options: Mapping[str, Any]) -> str:
    """Return the name under which transformers has a model with these options."""
    other = architecture_entry(architecture).exported_as
    return next((other[name] for name in other if options[name] != OPTIONS[name]), architecture)


def written_fields(architecture: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json that only this architecture has."""
    by_reference = {f"{{{name}}}": value for name, value in options.items()}
    written = architecture_entry(architecture).written
    return {
        name: by_reference.get(value, value) if isinstance(value, str) else value for name, value in written.items()
    }


HF_NAMES = {
    "model_type": "architecture",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "max_position_embeddings": "max_sequence_length",
    "rms_norm_eps": "norm_eps",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tie_embeddings",
    "rope_theta": "rope.theta",
}
"""Names in Hugging Face's config.json that a model section takes too, and the fields they stand for.

The other sizes, such as hidden_size, have the same name.
"""

MOST_LAYERS = 10_000
"""Ten times the deepest Transformer that was published (DeepNet, Wang et al. 2022: 1,000 layers)."""
WIDEST = 2**24
"""Of a dimension: a square matrix of that many rows has 2^48 elements, 1 PB in fp32."""


class RopeConfig(Section):
    """Rotary position embedding."""

    theta: float = fixed(10000.0, gt=0)
    """Base of the geometric series of frequencies."""
    scaling: Scaling | None = fixed(None)
    """Scaling of the frequencies for longer contexts; null for none."""
    partial_rotary_factor: float = fixed(1.0, gt=0, le=1)
    """Share of each head that is rotated, its first elements (Phi-4-mini); the others have no position."""

    @property
    def constant_up_to(self) -> int | None:
        """Length up to which sequences of every length have the same frequencies; None for no limit."""
        return None if self.scaling is None else self.scaling.constant_up_to

    def width(self, head_dim: int) -> int:
        """Return how many elements of a head are rotated."""
        return int(head_dim * self.partial_rotary_factor)


@dataclass(frozen=True)
class LayerKind:
    """Window and rotation of a layer: what may differ between the layers of a model."""

    window: int | None  # tokens that a token attends to, itself included; None for all before it
    rope: RopeConfig | None  # None for no rotation


LayerType = Literal["full_attention", "sliding_attention"]


class ModelConfig(Section):
    """The decoder. Give the numbers, or a preset or a Hugging Face config.json and what differs from it."""

    preset: str | None = None
    """Name of a built-in model whose numbers are taken where this section gives none."""
    hf_config: str | None = None
    """Path of a Hugging Face config.json (or its folder), or the id of a model of the Hub, whose numbers are taken
    where this section gives none."""
    architecture: ArchitectureName = fixed("llama")
    """Architecture: order and kind of norms, biases and attention; docs/architectures.md lists them."""
    vocab_size: Length = fixed(gt=0, le=MOST_TOKENS)
    """Rows of the embedding: at least the tokenizer's vocabulary."""
    layers: int = fixed(gt=0, le=MOST_LAYERS)
    """Number of decoder blocks."""
    hidden_size: int = fixed(gt=0, le=WIDEST)
    """Width of the residual stream."""
    intermediate_size: int = fixed(gt=0, le=WIDEST)
    """Width of the SwiGLU feed-forward layer."""
    heads: int = fixed(gt=0, le=WIDEST)
    """Number of query heads."""
    kv_heads: int | None = fixed(None, gt=0, le=WIDEST)
    """Number of key and value heads; null means as many as query heads (MHA), 1 is MQA, in between GQA."""
    head_dim: int | None = fixed(None, gt=0, le=WIDEST)
    """Width of a head; null means hidden_size / heads."""
    max_sequence_length: Length | None = fixed(None, gt=0, le=MOST_TOKENS)
    """Longest context the exported model claims, in tokens; null means data.sequence_length."""
    norm_eps: float = fixed(1e-5, gt=0)
    """Added to the mean square in RMSNorm."""
    rope: RopeConfig = RopeConfig()
    """Rotary position embedding."""
    tie_embeddings: bool = fixed(False)
    """Use the embedding matrix as the output head."""
    qkv_bias: bool = fixed(False)
    """Give the query, key and value projections a bias (Qwen2)."""
    qk_norm: bool = fixed(False)
    """Apply an RMSNorm over the head dimension to queries and keys before RoPE (Qwen3)."""
    attention_sinks: bool = fixed(False)
    """Give each query head a learned score beside those of the keys, without a value (gpt-oss)."""
    sliding_window: Length | None = fixed(None, gt=0, le=MOST_TOKENS)
    """Number of tokens that a token attends to, itself included (Mistral); null means all before it."""
    layer_types: tuple[LayerType, ...] | None = fixed(None, min_length=1)
    """Which layers have the sliding window (OLMo 3): a pattern, repeated over the layers; null means all of them."""
    local_rope: RopeConfig | None = fixed(None)
    """Rotary position embedding of the layers with a sliding window; null means that of the others."""
    rope_layers: tuple[bool, ...] | None = fixed(None, min_length=1)
    """Which layers have rotary positions (SmolLM3): a pattern, repeated over the layers; null means all of them."""
    query_pre_attn_scalar: int | None = fixed(None, gt=0, le=WIDEST)
    """Scores of attention are divided by its square root (Gemma); null means the width of a head."""
    attn_logit_softcapping: float | None = fixed(None, gt=0)
    """Scores of attention are capped to this size, by a tanh (Gemma 2); null for no cap."""
    final_logit_softcapping: float | None = fixed(None, gt=0)
    """Logits are capped to this size, by a tanh (Gemma 2); null for no cap."""
    coalesce: bool = True
    """Fuse q, k, v into one matrix and gate, up into another; weights convert both ways, equal up to rounding."""
    init_std: float = fixed(0.02, gt=0)
    """Standard deviation of the initial weights."""
    init_scaled_outputs: bool = fixed(True)
    """Initialise attention and feed-forward output projections at init_std / sqrt(2 * layers)."""

    @model_validator(mode="wrap")
    @classmethod
    def _may_be_own(cls, values: Any, validate: Any) -> Any:
        return as_own(cls, OwnModelConfig, own_parts.ARCHITECTURES, "architecture", values) or validate(values)

    @model_validator(mode="before")
    @classmethod
    def _options_of_architecture(cls, values: Any) -> Any:
        return with_fixed_options(values) if isinstance(values, dict) else values

    @property
    def options(self) -> dict[str, Any]:
        """Values of the options that not every architecture has."""
        return {name: attrgetter(name)(self) for name in OPTIONS}

    @property
    def alters_softmax(self) -> bool:
        """True if attention is not softmax of scores alone, which few kernels compute."""
        return self.attention_sinks or self.attn_logit_softcapping is not None

    def layer_kind(self, index: int) -> LayerKind:
        """Return the window and the rotation of a layer, by its index in the complete model."""
        is_local = (
            self.sliding_window is not None
            and _of_layer(self.layer_types, index, SLIDING_ATTENTION) == SLIDING_ATTENTION
        )
        rope = self.local_rope if is_local and self.local_rope is not None else self.rope
        window = self.sliding_window if is_local else None
        return LayerKind(window, rope if _of_layer(self.rope_layers, index, True) else None)

    def windows(self, sequence_length: int) -> tuple[int | None, ...]:
        """Return the window of each layer; None if it is not shorter than a sequence, so that it changes nothing."""
        return _windows(self.sliding_window, self.layer_types, self.layers, sequence_length)

    def window(self, sequence_length: int) -> int | None:
        """Return the sliding window if it changes something in a layer; else None."""
        return next((window for window in self.windows(sequence_length) if window is not None), None)

    @property
    def n_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def n_head_dim(self) -> int:
        return self.head_dim or self.hidden_size // self.heads


@lru_cache  # the planner asks for every layout
def _windows(window: int | None, types: tuple[str, ...] | None, layers: int, length: int) -> tuple[int | None, ...]:
    if window is None or window >= length:
        return (None,) * layers
    kinds = (_of_layer(types, index, SLIDING_ATTENTION) for index in range(layers))
    return tuple(window if kind == SLIDING_ATTENTION else None for kind in kinds)


def _of_layer(pattern: tuple[Any, ...] | None, index: int, otherwise: Any) -> Any:
    return otherwise if pattern is None else pattern[index % len(pattern)]


class OwnModelConfig(ModelConfig, OwnPart):
    """A model of an architecture of the user's own, with its options: package.module:Name."""

    architecture: str = fixed()  # type: ignore[assignment]
    """Name of the ``hlat.model.architectures.base.Architecture``."""
