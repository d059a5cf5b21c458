"""Sums of squares beside float64: as exact for large tensors as for small ones, and in any sharding.

The bound of ``sum_of_squares``: a run of 256 squares that are added up in fp32, in any order, is off by at most 256
roundings of 2^-24 of the sum; its root and the result are rounded once each, and the root's rounding counts twice when
it is squared. What is added up in float64 adds nothing that could be seen. With one rounding to spare: 260 2^-24.
"""

import math

import pytest
import torch

from hlat.parallel.norms import clip, sum_of_squares

BOUND = 260 * 2.0**-24
DTYPES = (torch.float32, torch.bfloat16)
ZERO = torch.zeros(())


def drawn(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)


def exact(tensors: list[torch.Tensor]) -> float:
    """Of float64, a piece at a time, added up without an error."""
    return math.fsum(float(part.double().square().sum()) for one in tensors for part in one.reshape(-1).split(1 << 22))


def assert_exact(tensors: list[torch.Tensor], truth: float) -> None:
    assert abs(float(sum_of_squares(tensors, ZERO)) / truth - 1) <= BOUND


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "count",
    [1, 255, 257, 1 << 12, (1 << 12) + 1, (1 << 20) + 77, 1 << 24, pytest.param(131 << 20, marks=pytest.mark.slow)],
)
def test_a_sum_of_squares_is_as_exact_for_large_tensors_as_for_small_ones(count, dtype):
    values = drawn(count, dtype)
    assert_exact([values], exact([values]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shards", [2, 7, 64, 5000])
def test_cutting_a_tensor_moves_its_sum_by_no_more_than_the_bound(shards, dtype):
    values = drawn(1 << 22, dtype)
    pieces = [*values.tensor_split(shards), values[:0]]  # an empty shard too
    whole, cut = (float(sum_of_squares(tensors, ZERO)) for tensors in ([values], pieces))
    assert abs(cut / whole - 1) <= 2 * BOUND
    assert_exact(pieces, exact([values]))


def test_many_small_tensors_and_few_large_ones_together():
    """What a model has: norms and biases, matrices, views that are not contiguous; each element counts once."""
    tensors = [drawn(192, torch.float32) * 10.0 ** (index % 5 - 2) for index in range(700)]
    tensors += [drawn(300_000, torch.float32).view(600, 500).T, drawn(40_000, torch.float32).view(200, 200)[:, :150]]
    tensors += [torch.tensor(3.0)]
    assert_exact(tensors, exact(tensors))


def test_float64_is_added_up_in_float64():
    values = torch.randn(100_003, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = sum_of_squares([values], ZERO.double())
    assert found.dtype == torch.float64
    assert abs(float(found) / math.fsum((values * values).tolist()) - 1) <= 260 * 2.0**-53


@pytest.mark.parametrize("tensors", [[], [torch.zeros(0)]], ids=["no tensor", "no element"])
def test_of_nothing_it_is_a_new_zero(tensors):
    zero = torch.zeros(())
    found = sum_of_squares(tensors, zero)
    found += 1
    assert float(zero) == 0 and float(found) == 1


def test_infinity_and_nan_are_seen():
    for bad in (torch.inf, torch.nan):
        values = torch.ones(100_000)
        values[77_777] = bad
        assert not math.isfinite(float(sum_of_squares([values], ZERO)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_clipped_gradients_have_the_norm_that_they_are_clipped_to(dtype):
    """Each is rounded once, by half a spacing of its dtype at most (of fp32 2^-24, of bf16 2^-8); before that its norm
    is off by half the bound above, and 1e-6 in 3e3 is what torch's clipping adds below. Those within stay as they are.
    """
    gradients = [drawn(1 << 22, dtype), drawn(1 << 22, dtype).neg(), drawn(512, dtype)]
    before = [one.clone() for one in gradients]
    norm = sum_of_squares(gradients, ZERO).sqrt()
    clip(gradients, norm, 2 * float(norm))
    assert all(torch.equal(one, two) for one, two in zip(gradients, before, strict=True))
    clip(gradients, norm, 1.0)
    slack = BOUND / 2 + 1e-6 / float(norm) + torch.finfo(dtype).eps
    assert abs(math.sqrt(exact(gradients)) - 1) <= slack
