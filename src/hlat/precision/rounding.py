"""Stochastic rounding of fp32 to bf16, with addressed (counter-based) random bits.

    (seed, purpose, canonical name) --stream_key-->      64-bit key of a tensor
    (key of a tensor, step)         --Threefry-->        key of a tensor in a step
    (that key, column, row)         --Threefry-->        64 bits of an element: 16 for each stored value
    (that key, row), column         --line_bits-->       16 bits of an element, where it needs no more
    (fp32 value, 16 bits)           --stochastic_round--> bf16

The address of an element is its position in the canonical tensor, as two words (row, column), so that a global index
cannot overflow; a vector is a single row. Sharding and fusing do not change the address, hence not the bits.

The generator is Threefry-2x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): additions,
rotations and exclusive ors of 32-bit words, which vectorize on every device, while Philox needs 64-bit products. In a
fused AdamW update on one AVX2 core (``benchmarks/optimizer_step.py --generators``), 13 rounds add 0.9 ns per element,
20 rounds 1.5 ns, Philox-2x32-10 4.5 ns. According to the authors, 13 is the smallest number of rounds without a known
statistical flaw (Random123, threefry.h; the table of the paper has the 2x64 variant, Crush-resistant with 13 rounds
too). Their default of 20 has a safety margin, which stochastic rounding does not need.

Words are int32 tensors, since torch has few operations for uint32. Sums wrap around; a right shift copies the sign bit
and needs a mask.
"""

from collections.abc import Sequence

import torch

from hlat.runtime.random_keys import stream_key

ROUNDS = 13
LARGEST_BF16 = 3.3895313892515355e38  # 0x7F7F, the largest finite value

_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = 0x1BD11BDA  # constant of the key schedule
_LOW = 0xFFFF
_HIGH = -0x10000
_QUIET_NAN = 0x7FC00000
_NO_COLUMN = -1  # as a word the largest number: no element has it
_GOLDEN = 0x9E3779B9 - (1 << 32)  # 2**32 times the golden ratio, less 1; odd, as a signed word

Words = tuple[torch.Tensor, torch.Tensor]
"""Two int32 tensors whose shapes are the same or broadcast."""


def threefry(key: Words, counter: Words, rounds: int = ROUNDS) -> Words:
    """Compute Threefry-2x32: 64 random bits from a 64-bit key and a 64-bit counter.

    Args:
        key: int32 words.
        counter: int32 words; the shapes of key and counter broadcast to that of the result.
        rounds: number of rounds; the published test vectors have 20.
    """
    schedule = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    first, second = counter[0] + key[0], counter[1] + key[1]
    for index in range(rounds):
        first = first + second
        second = _rotate(second, _ROTATIONS[index % 8]) ^ first
        if index % 4 == 3:
            injection = index // 4 + 1
            first = first + schedule[injection % 3]
            second = second + (schedule[(injection + 1) % 3] + injection)
    return first, second


def _rotate(word: torch.Tensor, count: int) -> torch.Tensor:
    return (word << count) | ((word >> (32 - count)) & ((1 << count) - 1))


def stream_keys(seed: int, purpose: str, names: Sequence[str], device: torch.device) -> torch.Tensor:
    """Return the keys of tensors by canonical name: int32 of shape (2, N), low words first."""
    keys = [stream_key(seed, purpose, name) for name in names]
    words = [[key & 0xFFFFFFFF for key in keys], [key >> 32 for key in keys]]
    return torch.tensor(words, dtype=torch.int64).to(torch.int32).reshape(2, len(keys)).to(device)


def step_keys(keys_2N: torch.Tensor, steps_N: torch.Tensor) -> torch.Tensor:
    """Derive the keys of tensors in a step: int32 of shape (2, N).

    Args:
        keys_2N: keys from ``stream_keys``.
        steps_N: step of each tensor, any dtype. A tensor, so that the host does not wait for the device.
    """
    counter = steps_N.to(torch.int32)
    return torch.stack(threefry((keys_2N[0], keys_2N[1]), (counter, torch.zeros_like(counter))))


def element_bits(
    key: Words, row: torch.Tensor, column: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three times 16 independent random bits for each element, int32 in [0, 65536).

    Args:
        key: key of the element's canonical tensor in this step.
        row: row of the element in its canonical tensor, int32.
        column: column of the element, int32. All shapes broadcast.
    """
    first, second = threefry(key, (column, row))
    return first & _LOW, (first >> 16) & _LOW, second & _LOW


def line_bits(key: Words, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Return 16 random bits for each element, int32 in [0, 65536), for less work than ``element_bits``.

    A row draws one word in each step, to which each column adds a multiple of the golden ratio. So the bits of an
    element are uniform and independent from step to step, which makes its sum of rounded values right on average. Those
    of a row in one step are not independent of each other, but evenly spread.

    Args:
        key: as for ``element_bits``.
        row: likewise.
        column: likewise.
    """
    word, _ = threefry(key, (torch.full_like(row, _NO_COLUMN), row))
    return ((word + column * _GOLDEN) >> 16) & _LOW


def stochastic_round(values: torch.Tensor, random16: torch.Tensor) -> torch.Tensor:
    """Round fp32 stochastically to one of the two neighbouring bf16 values, so that the mean is preserved.

    Random 16 bits are added to the 16 bits that bf16 does not have, and these are truncated: for x between the
    neighbours a and b, the result is b for exactly (x - a) / (b - a) of all 2**16 random values. Values that bf16
    represents never change: zeros keep their sign, infinities and NaN stay. Subnormals are rounded like other values.
    Finite values beyond the largest finite bf16 value become that value, never infinite.

    Args:
        values: fp32.
        random16: int32 in [0, 65536), the same shape.

    Returns:
        bf16 of the same shape.
    """
    raised = values.view(torch.int32) + torch.where(values.abs() < LARGEST_BF16, random16, 0)
    rounded = torch.where(values == values, raised & _HIGH, _QUIET_NAN)  # noqa: PLR0124  (True except for NaN)
    return rounded.view(torch.float32).to(torch.bfloat16)
