"""Precision modes: the dtypes in which values are stored, computed, reduced and accumulated; and stochastic rounding.

| mode       | weights | products | gradients | reduction | moments | compensation | bytes per parameter |
|------------|------|------|------|------|------|------|----|
| fp32       | fp32 | fp32 | fp32 | fp32 | fp32 |      | 16 |
| mixed      | fp32 | bf16 | fp32 | fp32 | fp32 |      | 16 |
| fp8        | fp32 | fp8, bf16 | fp32 | fp32 | fp32 |  | 16 |
| bf16-sr    | bf16, rounded stochastically | bf16 | bf16 | bf16 | bf16, rounded stochastically | | 8 |
| bf16       | bf16 | bf16 | bf16 | bf16 | bf16 |      | 8  |
| bf16-kahan | bf16 | bf16 | bf16 | bf16 | bf16 | bf16 | 10 |

Weights include the master copy, products the activations, gradients their accumulation. A checkpoint stores weights,
moments and compensation. Matrix products accumulate in fp32; norm statistics, softmax,
RoPE tables and the loss are fp32 in all modes. Within a step, mixed has a bf16 copy of the weights too (18 bytes).

    recipe's precision.mode --resolve_mode--> name of a mode --MODES--> Mode: dtypes
    mode fp8: device --check_fp8--> nothing, or LaunchError
              linear layers of a block --convert_to_fp8--> torchao's, which scale input, weight and gradient row by row,
                                                           cast to e4m3 and multiply

With fp8, everything else is as in mixed: fp32 weights, gradients and optimizer state, bf16 activations. Embedding and
head compute in bf16. torchao recommends rowwise scaling for accuracy; it is faster for wide, compiled layers only.

Stochastic rounding of fp32 to bf16 takes addressed (counter-based) random bits.

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
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import nn

from hlat.runtime.backend.table import backend_of
from hlat.runtime.errors import LaunchError
from hlat.runtime.random_keys import stream_key
from hlat.runtime.version import install_command

_FP32, _BF16 = torch.float32, torch.bfloat16


AUTO = "auto"


def resolve_mode(mode: str, fast_bf16: bool) -> str:
    """Resolve a recipe's ``precision.mode``, one of ``MODES`` or ``AUTO``, to one of ``MODES``."""
    if mode != AUTO:
        return mode
    return "mixed" if fast_bf16 else "fp32"  # fast_bf16: devices multiply bf16 faster than fp32


@dataclass(frozen=True)
class Mode:
    """Dtypes of a precision mode; matrix products accumulate in fp32."""

    weights: torch.dtype  # master weights: updated by the optimizer and stored in checkpoints
    compute: torch.dtype  # activations and matrix products (which accumulate in fp32)
    gradients: torch.dtype  # gradients of the weights, accumulated over micro-batches
    reduction: torch.dtype  # gradients while they are reduced over data-parallel ranks
    moments: torch.dtype  # moments of the optimizer
    compensation: torch.dtype | None = None  # rounding error of the weights, kept by Kahan summation; None if not kept

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes of weights, gradients, two moments and compensation per parameter, before the optimizer step."""
        dtypes = (self.weights, self.gradients, self.moments, self.moments)
        return sum(dtype.itemsize for dtype in dtypes) + (self.compensation.itemsize if self.compensation else 0)


MODES: dict[str, Mode] = {
    "fp32": Mode(_FP32, _FP32, _FP32, _FP32, _FP32),
    "mixed": Mode(_FP32, _BF16, _FP32, _FP32, _FP32),
    "fp8": Mode(_FP32, _BF16, _FP32, _FP32, _FP32),
    "bf16-sr": Mode(_BF16, _BF16, _BF16, _BF16, _BF16),
    "bf16": Mode(_BF16, _BF16, _BF16, _BF16, _BF16),
    "bf16-kahan": Mode(_BF16, _BF16, _BF16, _BF16, _BF16, _BF16),
}


_FP8_ALIGNMENT = 16  # elements; the kernels require both sides of a matrix to be multiples


def check_fp8(device: torch.device) -> None:
    """Check that fp8 can run on a device.

    Raises:
        LaunchError: the device has no fp8 products, or torchao is not installed.
    """
    advice = "Use precision.mode=mixed, or bf16-sr for half the memory."
    refusal = backend_of(device).fp8_refusal(device)
    if refusal:
        raise LaunchError(f"precision.mode=fp8: {refusal}. {advice}")
    if find_spec("torchao") is None:
        raise LaunchError(f"precision.mode=fp8: torchao is not installed: {install_command('fp8')}. {advice}")


def convert_to_fp8(module: nn.Module) -> None:
    """Replace the linear layers of a module by fp8 layers, in place; names and parameters stay the same."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: PLC0415  (an extra)

    # torchao recommends rowwise scaling for accuracy.
    config = Float8LinearConfig.from_recipe_name("rowwise")
    convert_to_float8_training(module, config=config, module_filter_fn=_fits_fp8_kernel)


def _fits_fp8_kernel(module: nn.Module, name: str) -> bool:
    # The kernels refuse other layers, which stay as they are.
    return isinstance(module, nn.Linear) and not any(side % _FP8_ALIGNMENT for side in module.weight.shape)


ROUNDS = 13  # the published test vectors have 20
LARGEST_BF16 = 3.3895313892515355e38  # 0x7F7F, the largest finite value

_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)  # of Threefry-2x32 (Salmon et al. 2011)
_PARITY = 0x1BD11BDA  # constant of the key schedule
_LOW = 0xFFFF
_HIGH = -0x10000
_QUIET_NAN = 0x7FC00000  # its upper half is not zero, so that NaN stays NaN when the lower half is cut off
_NO_COLUMN = -1  # as a word the largest number: no element has it
_GOLDEN = 0x9E3779B9 - (1 << 32)  # 2**32 times the golden ratio, less 1; odd, as a signed word

Words = tuple[torch.Tensor, torch.Tensor]  # two int32 tensors whose shapes are the same or broadcast


def threefry(key: Words, counter: Words, rounds: int = ROUNDS) -> Words:
    """Compute Threefry-2x32: 64 random bits from int32 words of key and counter, whose shapes broadcast."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    # Sums of int32 tensors wrap around, as the generator needs.
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
    # A right shift of int32 copies the sign bit: the mask removes the copies.
    return (word << count) | ((word >> (32 - count)) & ((1 << count) - 1))


def stream_keys(seed: int, purpose: str, names: Sequence[str], device: torch.device) -> torch.Tensor:
    """Return the keys of tensors by canonical name: int32 of shape (2, N), low words first."""
    keys = [stream_key(seed, purpose, name) for name in names]
    words = [[key & 0xFFFFFFFF for key in keys], [key >> 32 for key in keys]]
    return torch.tensor(words, dtype=torch.int64).to(torch.int32).reshape(2, len(keys)).to(device)


def step_keys(keys_2N: torch.Tensor, steps_N: torch.Tensor) -> torch.Tensor:
    """Derive the keys (2, N) of tensors in their steps (N,) of any dtype: int32 of shape (2, N)."""
    # Steps are a tensor, so that the host does not wait for the device.
    counter = steps_N.to(torch.int32)
    return torch.stack(threefry((keys_2N[0], keys_2N[1]), (counter, torch.zeros_like(counter))))


def element_bits(
    key: Words, row: torch.Tensor, column: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three times 16 independent random bits per element, int32 in [0, 65536); shapes broadcast."""
    first, second = threefry(key, (column, row))
    return first & _LOW, (first >> 16) & _LOW, second & _LOW


def line_bits(key: Words, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Return 16 random bits per element, int32 in [0, 65536), for less work than ``element_bits``."""
    # A row draws one word in each step, to which a column adds a multiple of the golden ratio. So an element's bits are
    # uniform and independent from step to step, which makes its sum of rounded values right on average. Those of a row
    # in one step are not independent, but evenly spread.
    word, _ = threefry(key, (torch.full_like(row, _NO_COLUMN), row))
    return ((word + column * _GOLDEN) >> 16) & _LOW


def stochastic_round(values: torch.Tensor, random16: torch.Tensor) -> torch.Tensor:
    """Round fp32 to a neighbouring bf16 by random int32 in [0, 65536), so that the mean is preserved."""
    # Random bits are added to the 16 that bf16 lacks, and these are cut off: for x between neighbours a and b, exactly
    # (x - a) / (b - a) of the 2**16 values give b. What bf16 represents never changes: signed zeros, infinities, NaN.
    # Values beyond the largest finite bf16 become that value, never infinite. Subnormals are rounded like all others.
    raised = values.view(torch.int32) + torch.where(values.abs() < LARGEST_BF16, random16, 0)
    rounded = torch.where(values == values, raised & _HIGH, _QUIET_NAN)  # noqa: PLR0124  (True except for NaN)
    return rounded.view(torch.float32).to(torch.bfloat16)
