"""The model section: one decoder, in numbers."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hlat.config.sections.architectures import OPTIONS, ArchitectureName, with_fixed_options
from hlat.config.sections.base import Section, fixed
from hlat.config.sections.quantities import Length

MOST_LAYERS = 10_000
"""Ten times the deepest Transformer that was published (DeepNet, Wang et al. 2022: 1,000 layers)."""
WIDEST = 2**24
"""Of a dimension: a square matrix of that many rows has 2^48 elements, 1 PB in fp32."""
MOST_TOKENS = 2**31 - 1
"""Of a vocabulary and of a context: token ids and positions are 32-bit numbers on every device."""


class LinearScaling(Section):
    """Position interpolation (Chen et al. 2023): every RoPE frequency is divided by ``factor``."""

    kind: Literal["linear"]
    """Name of the scaling rule."""
    factor: float = fixed(gt=0)
    """By how much positions are compressed."""


class Llama3Scaling(Section):
    """The frequency-dependent RoPE scaling of Llama 3.1."""

    kind: Literal["llama3"]
    """Name of the scaling rule."""
    factor: float = fixed(8.0, gt=0)
    """By how much the low frequencies are divided."""
    low_freq_factor: float = fixed(1.0, gt=0)
    """Wavelengths above original_max_position / low_freq_factor are scaled in full."""
    high_freq_factor: float = fixed(4.0, gt=0)
    """Wavelengths below original_max_position / high_freq_factor are left alone."""
    original_max_position: Length = fixed(8192, gt=0, le=MOST_TOKENS)
    """The context length of the model before scaling, in tokens."""


Scaling = Annotated[LinearScaling | Llama3Scaling, Field(discriminator="kind")]


class RopeConfig(Section):
    """Rotary position embedding."""

    theta: float = fixed(10000.0, gt=0)
    """Base of the geometric series of frequencies."""
    scaling: Scaling | None = fixed(None)
    """Scaling of the frequencies for longer contexts; null for none."""


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
    sliding_window: Length | None = fixed(None, gt=0, le=MOST_TOKENS)
    """Number of tokens that a token attends to, itself included (Mistral); null means all before it."""
    coalesce: bool = True
    """Fuse q, k, v into one matrix and gate, up into another; weights convert both ways, equal up to rounding."""
    init_std: float = fixed(0.02, gt=0)
    """Standard deviation of the initial weights."""
    init_scaled_outputs: bool = fixed(True)
    """Initialise attention and feed-forward output projections at init_std / sqrt(2 * layers)."""

    @model_validator(mode="before")
    @classmethod
    def _options_of_architecture(cls, values: Any) -> Any:
        """Set the options that the architecture fixes, such as the biases of Qwen2."""
        return with_fixed_options(values) if isinstance(values, dict) else values

    @property
    def options(self) -> dict[str, Any]:
        """Values of the options that not every architecture has."""
        return {name: getattr(self, name) for name in OPTIONS}

    def window(self, sequence_length: int) -> int | None:
        """Return the sliding window if it is shorter than a sequence, so that it changes something; else None."""
        window = self.sliding_window
        return window if window is not None and window < sequence_length else None

    @property
    def n_kv_heads(self) -> int:
        """Key and value heads, with the default resolved."""
        return self.kv_heads or self.heads

    @property
    def n_head_dim(self) -> int:
        """Width of a head, with the default resolved."""
        return self.head_dim or self.hidden_size // self.heads
