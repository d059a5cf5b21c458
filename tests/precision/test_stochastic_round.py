"""Stochastic rounding gives a neighbouring value, without bias, and never changes representable values."""

import math

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hlat.precision import LARGEST_BF16, element_bits, step_keys, stochastic_round, stream_keys

ALL_BITS = torch.arange(1 << 16, dtype=torch.int32)  # all values of the random bits


def fp32(pattern: int) -> float:
    return float(torch.tensor(pattern, dtype=torch.int64).to(torch.int32).view(torch.float32))


def rounded(pattern: int, random16: torch.Tensor = ALL_BITS) -> torch.Tensor:
    """Round the fp32 value with these bits, for each random value; return bf16 bits."""
    values = torch.tensor(pattern, dtype=torch.int64).to(torch.int32).view(torch.float32).expand(random16.shape)
    return stochastic_round(values.contiguous(), random16).view(torch.int16).to(torch.int64) & 0xFFFF


@given(st.integers(0, (1 << 32) - 1))
@example(0x00000000)
@example(0x80000000)  # -0
@example(0x00000001)  # the smallest subnormal, far below the smallest of bf16
@example(0x807FFFFF)  # the largest subnormal, whose upper neighbour is normal
@example(0x7F7EFFFF)
@example(0x7F7F0000)  # the largest finite bf16
@example(0x7F7FFFFF)  # the largest finite fp32
@example(0xFF7F0001)
@example(0x7F800000)  # infinities
@example(0xFF800000)
@example(0x7FC00000)  # NaN: quiet, signalling, and with bits that bf16 does not have
@example(0x7F800001)
@example(0xFFFFFFFF)
@example(0x3F7FFFFF)  # its upper neighbour has another exponent
def test_the_number_of_random_values_that_round_up_makes_rounding_exactly_unbiased(pattern):
    found = rounded(pattern)
    magnitude, kept, lost = pattern & 0x7FFFFFFF, pattern >> 16, pattern & 0xFFFF
    if magnitude > 0x7F800000:
        assert bool(((found & 0x7FFF) > 0x7F80).all()), "NaN stays NaN"
    elif magnitude >= 0x7F7F0000:
        assert bool((found == kept).all()), "infinities stay, and no finite value becomes infinite"
    else:
        assert int((found == kept + 1).sum()) == lost
        assert int((found == kept).sum()) == (1 << 16) - lost


def test_the_mean_of_a_million_draws_equals_the_value_for_every_exponent():
    """Draw each value 2**20 times; the error of the mean is within five sigma.

    With probability p of the upper of two neighbours at distance d, a draw has variance p (1 - p) d^2, and the mean of
    n draws 1/n of it.
    """
    keys = step_keys(stream_keys(0, "rounding", ["weight"], torch.device("cpu")), torch.tensor([1]))
    square = torch.arange(1024, dtype=torch.int32)
    random16 = torch.cat([bits.flatten() for bits in element_bits((keys[0], keys[1]), square.unsqueeze(1), square)])
    mantissas = torch.randint(0, 1 << 23, (255,), generator=torch.Generator().manual_seed(0)).tolist()
    patterns = [(exponent & 1) << 31 | exponent << 23 | mantissas[exponent] for exponent in range(255)]
    patterns += [0x00000001, 0x80007FFF, 0x00012345, 0x807FFFFF]  # subnormals, below and above the smallest of bf16
    for number, pattern in enumerate(patterns):
        value = fp32(pattern)
        if abs(value) >= LARGEST_BF16:
            continue
        first = number % 3 << 20  # use the three streams in turn
        found = rounded(pattern, random16[first : first + (1 << 20)])
        mean = float((found << 16).to(torch.int32).view(torch.float32).double().mean())
        lower, upper = fp32(pattern & ~0xFFFF), fp32((pattern & ~0xFFFF) + 0x10000)
        fraction = (pattern & 0xFFFF) / (1 << 16)
        sigma = abs(upper - lower) * math.sqrt(fraction * (1 - fraction) / (1 << 20))
        # the sum of 2**20 doubles adds a relative error of at most 2**-52
        assert abs(mean - value) <= 5 * sigma + 2.0**-52 * abs(value), hex(pattern)


def test_zeros_infinities_and_bf16_values_keep_their_bits():
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    every = every[~every.isnan()]
    for random16 in (0, 1, 0xFFFF):
        kept = stochastic_round(every.float(), torch.full(every.shape, random16, dtype=torch.int32))
        assert torch.equal(kept.view(torch.int16), every.view(torch.int16))
