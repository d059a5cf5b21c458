"""One step of AdamW over bf16 weights, in plain torch: the definition that the kernels equal bit for bit.

    w, g, m, v, (c), scalars, keys --update--> w, m, v, (c) in place

With every value widened to fp32, every operation rounded to fp32 by itself (IEEE 754, nothing fused or reordered), and
the scalars of ``SCALARS`` computed in float64 and rounded to fp32 once:

    m <- m + (g - m) * (1 - beta1)
    v <- v * beta2 + (g * g) * (1 - beta2)
    u  = w * (lr * decay) + (m / (sqrt(v) * (1 / sqrt(1 - beta2^t)) + eps)) * (lr / (1 - beta1^t))
    w <- w - u

This is AdamW (Loshchilov and Hutter 2019, algorithm 2; ``torch.optim.AdamW``). The moments enter u before they are
rounded. How w, m and v are written is the rounding, of which each mode has one for short moments and one for long:

    bf16-sr     all stochastically rounded, each with 16 bits of its own
    bf16        all rounded to nearest even
    bf16-kahan  to nearest, and what w loses is kept in c (Zamirai et al. 2020, "Revisiting bfloat16 training"):
                y = c - u;  w' = bf16(w + y);  c <- bf16(y - (w' - w));  w <- w'
    bf16-long, bf16-kahan-long    w as in bf16 and bf16-kahan, m and v stochastically rounded

To nearest, a moment whose step is less than half a spacing stays where it is. A step is 1 - beta of its distance to
the gradient (to its square), half a spacing 2^-9 to 2^-8 of the moment: it stays at a distance of up to
2^-8 / (1 - beta) of itself. At beta = 0.95 that is 8 % of v, 4 % of its root; above beta = 1 - 2^-8 there are values
from which v never falls, above 1 - 2^-9 it falls from none. A moment is long where that share is above 1/8.
Stochastically rounded it is right on average for every beta.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from hlat.optim.element_addresses import ElementAddresses
from hlat.precision import element_bits, stochastic_round

SCALARS = ("decay", "step_size", "one_minus_beta1", "beta2", "one_minus_beta2", "inverse_bias2", "eps")
"""The numbers of a step, in the order in which the kernels take them; decay is lr times weight decay."""

ROUNDINGS = ("bf16-sr", "bf16", "bf16-kahan", "bf16-long", "bf16-kahan-long")
"""Rounding schemes of a step: stochastic, to nearest, compensated (Kahan)."""

_LONGEST_TO_NEAREST = 1 - 2.0**-5
_CHUNK = 1 << 15  # elements at a time: temporaries stay in cache, and torch starts no threads for as few


@dataclass(frozen=True)
class Operands:
    """What a step reads and writes of one parameter; matrices are (L, length), contiguous.

    Attributes:
        weight, exp_avg, exp_avg_sq: bf16, updated in place.
        compensation: bf16, updated in place; None but in the mode bf16-kahan.
        gradient: bf16 or fp32.
        scalars: fp32, as many as ``SCALARS``.
        lines: where the elements are.
    """

    weight: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    compensation: torch.Tensor | None
    scalars: torch.Tensor
    lines: ElementAddresses

    def part(self, start: int, stop: int) -> "Operands":
        """Some of the lines, as views."""
        return replace(
            self,
            weight=self.weight[start:stop],
            gradient=self.gradient[start:stop],
            exp_avg=self.exp_avg[start:stop],
            exp_avg_sq=self.exp_avg_sq[start:stop],
            compensation=None if self.compensation is None else self.compensation[start:stop],
            lines=self.lines.part(start, stop),
        )


Kernel = Callable[[Sequence[Operands], torch.Tensor, str], None]
"""Steps parameters: their operands, int32 keys (2, N) of the canonical tensors in this step, one of ``ROUNDINGS``."""


def rounding_of(mode: str, betas: tuple[float, float]) -> str:
    """The rounding of a precision mode: moments that remember for long are never rounded to nearest."""
    if mode == "bf16-sr" or max(betas) <= _LONGEST_TO_NEAREST:
        return mode
    return f"{mode}-long"


def update(parameters: Sequence[Operands], keys_2N: torch.Tensor, rounding: str) -> None:
    """Step parameters, some lines at a time."""
    for one in parameters:
        lines = max(1, _CHUNK // one.lines.length)
        for start in range(0, one.lines.count, lines):
            update_lines(one.part(start, start + lines), keys_2N, rounding)


def update_lines(one: Operands, keys_2N: torch.Tensor, rounding: str) -> None:
    """Step some lines; fp32 temporaries of their size exist meanwhile."""
    decay, step_size, one_minus_beta1, beta2, one_minus_beta2, inverse_bias2, eps = one.scalars.unbind()
    weight, gradient = one.weight.float(), one.gradient.float()
    exp_avg, exp_avg_sq = one.exp_avg.float(), one.exp_avg_sq.float()
    exp_avg = exp_avg + (gradient - exp_avg) * one_minus_beta1
    exp_avg_sq = exp_avg_sq * beta2 + (gradient * gradient) * one_minus_beta2
    denominator = square_root(exp_avg_sq) * inverse_bias2 + eps
    change = weight * decay + (exp_avg / denominator) * step_size
    if rounding in ("bf16", "bf16-kahan"):
        one.exp_avg.copy_(exp_avg.to(torch.bfloat16))
        one.exp_avg_sq.copy_(exp_avg_sq.to(torch.bfloat16))
    else:
        bits = _bits(one.lines, keys_2N)
        one.exp_avg.copy_(stochastic_round(exp_avg, bits[1]))
        one.exp_avg_sq.copy_(stochastic_round(exp_avg_sq, bits[2]))
    if rounding == "bf16-sr":
        one.weight.copy_(stochastic_round(weight - change, bits[0]))
        return
    if one.compensation is None:
        one.weight.copy_((weight - change).to(torch.bfloat16))
        return
    change = one.compensation.float() - change
    rounded = (weight + change).to(torch.bfloat16)
    one.compensation.copy_((change - (rounded.float() - weight)).to(torch.bfloat16))
    one.weight.copy_(rounded)


def square_root(values: torch.Tensor) -> torch.Tensor:
    """Of fp32, correctly rounded, as IEEE 754 has it.

    ``torch.sqrt`` of fp32 is off by a last bit for every sixth value where MKL computes it. Its float64 is close enough
    to the exact root for the fp32 nearest to it: no root of 24 bits is nearer than 2^-50 to the middle of two others.
    """
    return values.double().sqrt().float()


def _bits(lines: ElementAddresses, keys_2N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The random bits of the elements of some lines, (L, length) each."""
    first, second = keys_2N.index_select(1, lines.names_L).unsqueeze(2)
    places = torch.arange(lines.length, dtype=torch.int32, device=keys_2N.device)
    return element_bits((first, second), lines.rows_L.unsqueeze(1), lines.columns_L.unsqueeze(1) + places)
