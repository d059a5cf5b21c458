"""Scalings of RoPE for contexts longer than the one that a model was trained with: a class for each kind.

    model.rope.scaling: {kind: ...} --Scaling--> one of the classes --kind--> its formula, in hlat/model/rope.py
    config.json, rope_parameters    <----------> its fields, under their names in transformers

A new kind is a class here, a member of ``Scaling``, and an entry of the table of formulas.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import Field

from hlat.config.sections.base import MOST_TOKENS, Length, Section, fixed


class Objection(NamedTuple):
    """Problem of a field of a scaling, and what would work."""

    field: str
    reason: str
    remedy: str


class RopeScaling(Section):
    """Base of the scalings of all kinds."""

    original_hf_name: ClassVar[str] = "original_max_position_embeddings"
    """Name of ``original_max_position`` in config.json."""
    optional_in_hf: ClassVar[frozenset[str]] = frozenset()
    """Fields that config.json may lack; transformers has the same default."""

    @classmethod
    def hf_names(cls) -> dict[str, str]:
        """Names of the fields in config.json."""
        renamed = {"original_max_position": cls.original_hf_name}
        return {name: renamed.get(name, name) for name in cls.model_fields if name != "kind"}

    @classmethod
    def inferred(cls, given: dict[str, Any], longest: int | None) -> dict[str, Any]:
        """Return fields that transformers infers from others and from max_position_embeddings, where none is given."""
        return {}

    @classmethod
    def stretched(cls, given: dict[str, Any]) -> int | None:
        """Return the model's context if max_position_embeddings is the one before scaling, else None."""
        return None

    @property
    def constant_up_to(self) -> int | None:
        """Length up to which sequences of every length have the same frequencies; None for no limit."""
        return None

    def objections(self, theta: float, head_dim: int) -> Iterator[Objection]:
        """List values that do not fit together."""
        yield from ()


class LinearScaling(RopeScaling):
    """Position interpolation (Chen et al. 2023): every RoPE frequency is divided by ``factor``."""

    kind: Literal["linear"]
    """Name of the scaling rule."""
    factor: float = fixed(gt=0)
    """By how much positions are compressed."""


class DynamicScaling(RopeScaling):
    """Dynamic NTK scaling: theta grows with the length of a sequence that is longer than the original context."""

    original_hf_name = "max_position_embeddings"

    kind: Literal["dynamic"]
    """Name of the scaling rule."""
    factor: float = fixed(gt=0)
    """By how much contexts may become longer; a larger one makes theta grow faster."""
    original_max_position: Length = fixed(gt=0, le=MOST_TOKENS)
    """Longest sequence that is not scaled, in tokens: the context that the model was trained with."""

    @classmethod
    def stretched(cls, given: dict[str, Any]) -> int | None:
        original: int = given.get("original_max_position", 1)
        return max(original, int(min(given.get("factor", 1.0) * original, MOST_TOKENS)))

    @property
    def constant_up_to(self) -> int | None:
        return self.original_max_position

    def objections(self, theta: float, head_dim: int) -> Iterator[Objection]:
        if head_dim == 2:
            reason = "its formula divides by the width of a head less 2, and heads are 2 wide."
            yield Objection("kind", reason, "Use linear or yarn, or wider heads.")


class YarnScaling(RopeScaling):
    """YaRN (Peng et al. 2023): low frequencies are divided by ``factor``, high ones kept; attention gets sharper."""

    optional_in_hf = frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"})

    kind: Literal["yarn"]
    """Name of the scaling rule."""
    factor: float = fixed(gt=0)
    """By how much the low frequencies are divided."""
    original_max_position: Length = fixed(gt=0, le=MOST_TOKENS)
    """The context length of the model before scaling, in tokens."""
    attention_factor: float | None = fixed(None, gt=0)
    """Factor of cos and sin, whose square multiplies attention scores; null infers it from factor and mscale."""
    beta_fast: float = fixed(32.0, gt=0)
    """Frequencies that turn at least so often within the original context are kept."""
    beta_slow: float = fixed(1.0, gt=0)
    """Frequencies that turn at most so often within the original context are divided by factor."""
    mscale: float | None = fixed(None, gt=0)
    """With mscale_all_dim, the inferred factor is (0.1 mscale ln factor + 1) / (0.1 mscale_all_dim ln factor + 1), as
    DeepSeek has it; without both it is 0.1 ln factor + 1."""
    mscale_all_dim: float | None = fixed(None, gt=0)
    """See mscale."""
    truncate: bool = fixed(True)
    """Round the limits between kept and divided frequencies to whole pairs; gpt-oss does not."""

    @classmethod
    def inferred(cls, given: dict[str, Any], longest: int | None) -> dict[str, Any]:
        original = given.get("original_max_position")
        return {"factor": longest / original} if longest is not None and original is not None else {}

    def objections(self, theta: float, head_dim: int) -> Iterator[Objection]:
        if self.beta_fast < self.beta_slow:
            yield Objection("beta_fast", f"must not lie below beta_slow {self.beta_slow}.", "YaRN uses 32 and 1.")
        if theta <= 1:
            yield Objection("kind", f"YaRN needs a theta above 1, and it is {theta}.", "Use linear, or another theta.")


class Llama3Scaling(RopeScaling):
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

    def objections(self, theta: float, head_dim: int) -> Iterator[Objection]:
        if self.low_freq_factor >= self.high_freq_factor:
            reason = f"must lie above low_freq_factor {self.low_freq_factor}."
            yield Objection("high_freq_factor", reason, "Llama 3.1 uses 1 and 4.")


_Any = LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling
Scaling = Annotated[_Any, Field(discriminator="kind")]
SCALINGS: dict[str, type[RopeScaling]] = {
    get_args(section.model_fields["kind"].annotation)[0]: section for section in get_args(_Any)
}
"""The scalings by kind, which is the rope_type of config.json."""
