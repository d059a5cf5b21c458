"""Rotary positions: the frequencies of pairs, scaled or not, and tables of cos and sin.

    theta, scaling, rotated width, length --frequencies--> radians per position of each pair, factor of cos and sin
                                          --Rope, positions--> cos and sin, for ``pointwise.rotate``

Frequencies and tables are computed in fp32 with the operations of Hugging Face, in the same order. Weights trained
there so get the angles they were trained with: at position 100,000 an fp32 angle has an error of up to 4e-3 radians,
and another order of operations would give other errors. Tables are computed on the CPU and copied, so that every device
has the same bits.

A new kind of scaling is a section in ``hlat/config/sections/rope.py`` and an entry of ``_SCALED``.

Tensor suffixes: B batch, S positions, F = half the rotated width of a head.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hlat.config import DynamicScaling, LinearScaling, Llama3Scaling, RopeConfig, YarnScaling
from hlat.model.document_attention import Spans

# Cos and sin of the positions of this call, (S, F) each, or (B, S, F) if the rows have different documents
RopeTables = tuple[torch.Tensor, torch.Tensor]

_SMALLEST_TABLE = 1024  # positions; the table is doubled for a longer sequence


def frequencies(rope: RopeConfig, width: int, length: int) -> tuple[torch.Tensor, float]:
    """Compute radians per position of each pair, fp32 (width / 2,) on the CPU, and the factor of cos and sin.

    Only scalings with a ``constant_up_to`` depend on ``length``, the number of positions of the sequence. Sources: Su
    et al. 2021 (arXiv 2104.09864) section 3.2.2; of scalings, at their functions.
    """
    if rope.scaling is None:
        return _plain(rope.theta, width), 1.0
    return _SCALED[rope.scaling.kind](rope.theta, width, rope.scaling, length)


def _powers(theta: float | torch.Tensor, width: int) -> torch.Tensor:
    exponents_F = torch.arange(0, width, 2, dtype=torch.int64, device="cpu").to(torch.float32) / width
    powers_F: torch.Tensor = theta**exponents_F
    return powers_F


def _plain(theta: float | torch.Tensor, width: int) -> torch.Tensor:
    return 1.0 / _powers(theta, width)


def _linear(theta: float, width: int, scaling: LinearScaling, length: int) -> tuple[torch.Tensor, float]:
    """Chen et al. 2023 (arXiv 2306.15595)."""
    return _plain(theta, width) / scaling.factor, 1.0


def _dynamic(theta: float, width: int, scaling: DynamicScaling, length: int) -> tuple[torch.Tensor, float]:
    """NTK-aware interpolation by the length of the sequence (Peng et al. 2023, arXiv 2309.00071, appendix B.1)."""
    original = scaling.original_max_position
    # Transformers knows a longer length as a tensor, and so computes with it in fp32.
    reach = torch.tensor(length, device="cpu") if length > original else original
    growth = (scaling.factor * reach / original) - (scaling.factor - 1)
    return _plain(theta * growth ** (width / (width - 2)), width), 1.0


def _yarn(theta: float, width: int, scaling: YarnScaling, length: int) -> tuple[torch.Tensor, float]:
    """Peng et al. 2023 (arXiv 2309.00071), sections 3.2 to 3.4, as in transformers with its rounding of limits."""
    powers_F = _powers(theta, width)
    low, high = (_pair_turning(turns, theta, width, scaling) for turns in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # or the ramp would divide by zero
    ramp_F = ((torch.arange(width // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    kept_F = 1 - ramp_F
    return 1.0 / (scaling.factor * powers_F) * (1 - kept_F) + 1.0 / powers_F * kept_F, _yarn_temperature(scaling)


def _pair_turning(turns: float, theta: float, width: int, scaling: YarnScaling) -> float:
    """Index of the pair that turns so often within the original context, as a real number."""
    return (width * math.log(scaling.original_max_position / (turns * 2 * math.pi))) / (2 * math.log(theta))


def _yarn_temperature(scaling: YarnScaling) -> float:
    """Factor of cos and sin: its square, in attention scores, is the inverse temperature of equation 21."""

    def mscale(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale is not None and scaling.mscale_all_dim is not None:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1)


def _llama3(theta: float, width: int, scaling: Llama3Scaling, length: int) -> tuple[torch.Tensor, float]:
    """Divide frequencies of long wavelengths by the factor, keep those of short ones, interpolate in between.

    Source: the reference code of meta-llama/llama-models (``apply_scaling``).
    """
    plain_F = _plain(theta, width)
    wavelength_F = 2 * math.pi / plain_F
    longest_unscaled = scaling.original_max_position / scaling.high_freq_factor
    shortest_scaled = scaling.original_max_position / scaling.low_freq_factor
    scaled_F = torch.where(wavelength_F > shortest_scaled, plain_F / scaling.factor, plain_F)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    weight_F = (scaling.original_max_position / wavelength_F - scaling.low_freq_factor) / span
    interpolated_F = (1 - weight_F) * scaled_F / scaling.factor + weight_F * scaled_F
    is_interpolated_F = ~(wavelength_F < longest_unscaled) & ~(wavelength_F > shortest_scaled)
    return torch.where(is_interpolated_F, interpolated_F, scaled_F), 1.0


_SCALED: dict[str, Callable[[float, int, Any, int], tuple[torch.Tensor, float]]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
}


class _Table(NamedTuple):
    """Cos and sin of the first positions, on a device."""

    length: int  # of the sequences that the frequencies are for; 0 if they are the same for all
    cos_SF: torch.Tensor
    sin_SF: torch.Tensor


class Rope:
    """Cos and sin tables, shared by all layers with the same rotation."""

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        self._rope, self._width = rope, rope.width(head_dim)
        # Length of all sequences, for scalings that depend on it. None for that of the call, as in generation: its last
        # position and those before it.
        self.length: int | None = None
        # No module buffers: each device's table is created on first use there. So tables are correct however the model
        # was built (on the meta device, by to_empty), are never saved, and stay fp32 when the model is cast.
        self._tables: dict[torch.device, _Table] = {}

    def depends_on_length(self, length: int) -> bool:
        """True if sequences of this length and shorter ones have different frequencies."""
        constant = self._rope.constant_up_to
        return constant is not None and length > constant

    def tables(self, spans: Spans, device: torch.device, positions_BS: torch.Tensor | None = None) -> RopeTables:
        """Look up cos and sin in fp32: two tensors (positions of all spans, F).

        ``positions_BS`` (int64 on the device, below the last stop of ``spans``) gives (B, S, F) instead.
        """
        table, longest = self._tables.get(device), max(stop for _, stop in spans)
        length = self.length or longest
        length = length if self.depends_on_length(length) else 0
        if table is None or table.length != length or table.cos_SF.shape[0] < longest:
            # For one length, an entry depends on its position only: a longer table begins with the shorter one.
            table = self._build(length, max(_SMALLEST_TABLE, 1 << (longest - 1).bit_length()), device)
            self._tables[device] = table
        _, cos_SF, sin_SF = table
        if positions_BS is not None:
            return cos_SF[positions_BS], sin_SF[positions_BS]
        if len(spans) == 1:
            start, stop = spans[0]
            return cos_SF[start:stop], sin_SF[start:stop]
        return torch.cat([cos_SF[a:b] for a, b in spans]), torch.cat([sin_SF[a:b] for a, b in spans])

    def _build(self, length: int, rows: int, device: torch.device) -> _Table:
        # On the CPU, so that every device has the same bits.
        positions_S = torch.arange(rows, dtype=torch.float32, device="cpu")
        radians_F, factor = frequencies(self._rope, self._width, length)
        angles_SF = torch.outer(positions_S, radians_F)
        return _Table(length, (angles_SF.cos() * factor).to(device), (angles_SF.sin() * factor).to(device))
