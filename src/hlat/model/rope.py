"""Rotary position embedding: the angle by which each pair of a head is turned at each position.

    theta, scaling -> frequencies (radians per position, one per pair) -> cos and sin tables, position by position

Frequencies and tables are computed in fp32 with the operations and the order of operations of Hugging Face, so that
weights trained there see the angles they were trained with: at position 100,000 an fp32 angle is off by up to 4e-3
radians, and another order of operations would be off elsewhere. They are computed on the CPU and copied, so every
device has the same bits.

Tensor suffixes: B batch, S positions, F pairs of a head.
"""

import math

import torch

from hlat.config.sections import LinearScaling, Llama3Scaling, ModelConfig, RopeConfig

_SMALLEST_TABLE = 1024  # positions; a table doubles when a longer sequence comes


def frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair: fp32, shape (head_dim / 2,), on the CPU.

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
    """Long wavelengths divided by the factor, short ones kept, those between interpolated."""
    wavelength_F = 2 * math.pi / plain_F
    longest_kept = scaling.original_max_position / scaling.high_freq_factor
    shortest_divided = scaling.original_max_position / scaling.low_freq_factor
    divided_F = torch.where(wavelength_F > shortest_divided, plain_F / scaling.factor, plain_F)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    share_F = (scaling.original_max_position / wavelength_F - scaling.low_freq_factor) / span
    between_F = (1 - share_F) * divided_F / scaling.factor + share_F * divided_F
    is_between_F = ~(wavelength_F < longest_kept) & ~(wavelength_F > shortest_divided)
    return torch.where(is_between_F, between_F, divided_F)


Spans = tuple[tuple[int, int], ...]
"""(start, stop) of runs of positions, one after another."""


class Rope:
    """The tables of one model, shared by all its layers.

    They are no buffers: they are made on first use, on the device of use. So they are right however the model came
    to be (on the meta device, by ``to_empty``), never saved, and stay fp32 when the model is cast.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._rope, self._head_dim = config.rope, config.n_head_dim
        self._tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def tables(
        self, spans: Spans, device: torch.device, positions_BS: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cos and sin of the positions ``start <= position < stop`` of each span: fp32, (positions, head_dim / 2).

        Where each token has a position of its own, int64 on that device and below the last stop: of these, (B, S,
        head_dim / 2).
        """
        known, longest = self._tables.get(device), max(stop for _, stop in spans)
        if known is None or known[0].shape[0] < longest:
            # An entry depends on its position only, so a longer table changes nothing for the positions before.
            known = self._make(max(_SMALLEST_TABLE, 1 << (longest - 1).bit_length()), device)
            self._tables[device] = known
        cos_SF, sin_SF = known
        if positions_BS is not None:
            return cos_SF[positions_BS], sin_SF[positions_BS]
        if len(spans) == 1:
            start, stop = spans[0]
            return cos_SF[start:stop], sin_SF[start:stop]
        return torch.cat([cos_SF[a:b] for a, b in spans]), torch.cat([sin_SF[a:b] for a, b in spans])

    def _make(self, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        positions_S = torch.arange(length, dtype=torch.float32, device="cpu")
        angles_SF = torch.outer(positions_S, frequencies(self._rope, self._head_dim))
        return angles_SF.cos().to(device), angles_SF.sin().to(device)
