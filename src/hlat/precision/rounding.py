"""Stochastic rounding of fp32 to bf16, with random bits that are addressed.

    (seed, purpose, canonical name) --stream_key-->      64-bit key of a tensor
    (key of a tensor, step)         --Threefry-->        key of a tensor in a step
    (that key, column, row)         --Threefry-->        64 bits of an element: 16 for each value that it stores
    (fp32 value, 16 bits)           --stochastic_round--> bf16

An element is addressed by where it is in its canonical tensor, its global index written as two words (row, column), so
that no sum of them overflows; a vector is one row. Neither sharding nor fusing changes that, hence neither the bits.

The generator is Threefry-2x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): additions,
rotations and exclusive ors of 32-bit words, which vectorize everywhere, where Philox needs products of 64 bits. In a
fused AdamW step on one AVX2 core (``benchmarks/optimizer_step.py --generators``) 13 rounds of it add 0.9 ns to an
element, 20 rounds 1.5 ns, Philox-2x32-10 4.5 ns. The 13 rounds are the fewest with no known statistical flaw according
to its authors (Random123, threefry.h; the table of the paper has the 2x64 variant, Crush-resistant with 13 rounds too);
20 is their default with a margin, which the noise of a rounding does not need.

Words are int32 tensors: torch has few operations on uint32. Sums wrap; a right shift copies the sign and needs a mask.
"""

from collections.abc import Sequence

import torch

from hlat.runtime.randomness import stream_key

ROUNDS = 13
LARGEST_BF16 = 3.3895313892515355e38  # 0x7F7F, the largest finite value

_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = 0x1BD11BDA  # of the key schedule
_LOW = 0xFFFF
_HIGH = -0x10000
_QUIET_NAN = 0x7FC00000

Words = tuple[torch.Tensor, torch.Tensor]
"""Two int32 tensors of one shape, or of shapes that broadcast."""


def threefry(key: Words, counter: Words, rounds: int = ROUNDS) -> Words:
    """Threefry-2x32: 64 random bits of a 64-bit key and a 64-bit counter.

    Args:
        key, counter: int32 words, whose shapes broadcast to that of the result.
        rounds: 13 here; 20 is what the published test vectors are of.
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
    """The keys of some tensors: int32 of shape (2, N), the low words first."""
    keys = [stream_key(seed, purpose, name) for name in names]
    words = [[key & 0xFFFFFFFF for key in keys], [key >> 32 for key in keys]]
    return torch.tensor(words, dtype=torch.int64).to(torch.int32).reshape(2, len(keys)).to(device)


def step_keys(keys_2N: torch.Tensor, steps_N: torch.Tensor) -> torch.Tensor:
    """The keys of tensors in a step, int32 of shape (2, N).

    Args:
        keys_2N: what ``stream_keys`` returned.
        steps_N: the step of each tensor; any dtype. A tensor, so that no device is waited for.
    """
    counter = steps_N.to(torch.int32)
    return torch.stack(threefry((keys_2N[0], keys_2N[1]), (counter, torch.zeros_like(counter))))


def element_bits(
    key: Words, row: torch.Tensor, column: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three times 16 independent random bits for each element, int32 in [0, 65536).

    Args:
        key: of the element's canonical tensor in this step.
        row, column: the element's place in its canonical tensor, int32. All shapes broadcast.
    """
    first, second = threefry(key, (column, row))
    return first & _LOW, (first >> 16) & _LOW, second & _LOW


def stochastic_round(values: torch.Tensor, random16: torch.Tensor) -> torch.Tensor:
    """Round fp32 to one of the two neighbouring bf16 values, to each with a probability that leaves the mean in place.

    Sixteen random bits are added to the sixteen that bf16 does not have, and these are cut off: with x between the
    neighbours a and b, b comes out for exactly (x - a) / (b - a) of all 2**16 random values. What bf16 represents never
    changes: zeros keep their sign, infinities and NaN stay. Subnormals are rounded like other values. Beyond the
    largest finite bf16 a finite value becomes that one, never infinite.

    Args:
        values: fp32.
        random16: int32 in [0, 65536), of the same shape.

    Returns:
        bf16 of the same shape.
    """
    raised = values.view(torch.int32) + torch.where(values.abs() < LARGEST_BF16, random16, 0)
    rounded = torch.where(values == values, raised & _HIGH, _QUIET_NAN)  # noqa: PLR0124  (what cannot be cut off NaN)
    return rounded.view(torch.float32).to(torch.bfloat16)
