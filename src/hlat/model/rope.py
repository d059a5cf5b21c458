"""Rotary position embedding (RoPE): cos and sin of the rotation angle of each pair of a head at each position.

    theta, scaling -> frequencies (radians per position, one per pair) -> cos and sin tables, position by position

Frequencies and tables are computed in fp32 with the operations of Hugging Face, in the same order. Weights trained
there so get the angles they were trained with: at position 100,000 an fp32 angle has an error of up to 4e-3 radians,
and another order of operations would give other errors. Tables are computed on the CPU and copied, so that every device
has the same bits.

Tensor suffixes: B batch, S positions, F pairs of a head.
"""

import math

import torch

from hlat.config import LinearScaling, Llama3Scaling, ModelConfig, RopeConfig

_SMALLEST_TABLE = 1024  # positions; the table is doubled for a longer sequence


def frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Compute radians per position of each pair: fp32, shape (head_dim / 2,), on the CPU.

    Sources: Su et al. 2021 (arXiv 2104.09864) section 3.2.2; linear scaling, Chen et al. 2023 (arXiv 2306.15595);
    Llama 3.1, the reference code of meta-llama/llama-models (``apply_scaling``).
    """
    exponents_F = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").to(torch.float32) / head_dim
    plain_F = 1.0 / (rope.theta**exponents_F)
    if isinstance(rope.scaling, LinearScaling):
        return plain_F / rope.scaling.factor
    if isinstance(rope.scaling, Llama3Scaling):
        return _llama3(plain_F, rope.scaling)
    return plain_F


def _llama3(plain_F: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Scale frequencies: divide those of long wavelengths by the factor, keep short ones, interpolate in between."""
    wavelength_F = 2 * math.pi / plain_F
    longest_unscaled = scaling.original_max_position / scaling.high_freq_factor
    shortest_scaled = scaling.original_max_position / scaling.low_freq_factor
    scaled_F = torch.where(wavelength_F > shortest_scaled, plain_F / scaling.factor, plain_F)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    weight_F = (scaling.original_max_position / wavelength_F - scaling.low_freq_factor) / span
    interpolated_F = (1 - weight_F) * scaled_F / scaling.factor + weight_F * scaled_F
    is_interpolated_F = ~(wavelength_F < longest_unscaled) & ~(wavelength_F > shortest_scaled)
    return torch.where(is_interpolated_F, interpolated_F, scaled_F)


Spans = tuple[tuple[int, int], ...]
"""(start, stop) pairs of ranges of sequence positions, ascending."""


class Rope:
    """Cos and sin tables of a model, shared by all its layers.

    They are not module buffers: each device's table is created on first use there. So they are correct however the
    model was built (on the meta device, by ``to_empty``), are never saved, and stay fp32 when the model is cast.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._rope, self._head_dim = config.rope, config.n_head_dim
        self._tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def tables(
        self, spans: Spans, device: torch.device, positions_BS: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Look up cos and sin, in fp32.

        Args:
            spans: look up the positions ``start <= position < stop`` of each span.
            device: device of the tables.
            positions_BS: if given, look up these instead: int64 on ``device``, below the last stop of ``spans``.

        Returns:
            Two tensors (positions of all spans, head_dim / 2), or (B, S, head_dim / 2) for ``positions_BS``.
        """
        table, longest = self._tables.get(device), max(stop for _, stop in spans)
        if table is None or table[0].shape[0] < longest:
            # An entry depends on its position only, so a longer table has the same entries for earlier positions.
            table = self._build(max(_SMALLEST_TABLE, 1 << (longest - 1).bit_length()), device)
            self._tables[device] = table
        cos_SF, sin_SF = table
        if positions_BS is not None:
            return cos_SF[positions_BS], sin_SF[positions_BS]
        if len(spans) == 1:
            start, stop = spans[0]
            return cos_SF[start:stop], sin_SF[start:stop]
        return torch.cat([cos_SF[a:b] for a, b in spans]), torch.cat([sin_SF[a:b] for a, b in spans])

    def _build(self, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        positions_S = torch.arange(length, dtype=torch.float32, device="cpu")
        angles_SF = torch.outer(positions_S, frequencies(self._rope, self._head_dim))
        return angles_SF.cos().to(device), angles_SF.sin().to(device)
