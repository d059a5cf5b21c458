"""Sums of squares are as exact for large tensors as for small ones, and for any sharding, compared with float64.

The bound of ``sum_of_squares``: an fp32 sum of 256 squares, in any order, has an error of at most 256 roundings of
2^-24 of the sum. Its root and the result are rounded once each, and the root's rounding counts twice when it is
squared. The error of sums in float64 is negligible. With one rounding of margin: 260 2^-24.
"""

import math

import pytest
import torch

from hlat.parallel.data_parallel import sum_of_squares

BOUND = 260 * 2.0**-24
DTYPES = (torch.float32, torch.bfloat16)
ZERO = torch.zeros(())


def drawn(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)


def exact(tensors: list[torch.Tensor]) -> float:
    """Sum squares in float64, in chunks, combined by the exact math.fsum."""
    return math.fsum(float(c.double().square().sum()) for tensor in tensors for c in tensor.reshape(-1).split(1 << 22))


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
def test_sharding_a_tensor_changes_its_sum_by_at_most_the_bound(shards, dtype):
    values = drawn(1 << 22, dtype)
    sharded = [*values.tensor_split(shards), values[:0]]  # an empty shard too
    unsharded_sum, sharded_sum = (float(sum_of_squares(tensors, ZERO)) for tensors in ([values], sharded))
    assert abs(sharded_sum / unsharded_sum - 1) <= 2 * BOUND
    assert_exact(sharded, exact([values]))


@pytest.mark.parametrize("shards", [2, 7, 64, 5000])
def test_sharding_a_bf16_tensor_does_not_change_its_sum(shards):
    """An fp32 number: sums in float64 differ by less than 2^-40, which is a different rounding once in 2^15 cases."""
    values = drawn(1 << 22, torch.bfloat16)
    found = sum_of_squares([*values.tensor_split(shards), values[:0]], ZERO)
    assert torch.equal(found, sum_of_squares([values], ZERO))


def test_many_small_tensors_and_few_large_ones_together():
    """Tensors as in a model: norms and biases, matrices, non-contiguous views; each element counts once."""
    tensors = [drawn(192, torch.float32) * 10.0 ** (index % 5 - 2) for index in range(700)]
    tensors += [drawn(300_000, torch.float32).view(600, 500).T, drawn(40_000, torch.float32).view(200, 200)[:, :150]]
    tensors += [torch.tensor(3.0)]
    assert_exact(tensors, exact(tensors))


def test_a_sum_of_bf16_squares_has_a_single_rounding():
    """Squares of 8 bits are exact in float64, whose sums have an error far below 2^-24, the rounding of the result."""
    for count in (1, 300, (1 << 22) + 77):
        values = drawn(count, torch.bfloat16)
        assert float(sum_of_squares([values], ZERO)) == float(torch.tensor(exact([values]), dtype=torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_does_not_change_a_bit(dtype):
    tensors = [drawn((1 << 23) + 77, dtype), drawn(513, dtype), drawn(5, dtype)]
    found = [sum_of_squares(tensors, ZERO.double()).item()]
    before = torch.get_num_threads()
    try:
        for threads in (1, 3, 7):
            torch.set_num_threads(threads)
            found.append(sum_of_squares(tensors, ZERO.double()).item())
    finally:
        torch.set_num_threads(before)
    assert len(set(found)) == 1


def test_float64_is_summed_in_float64():
    values = torch.randn(100_003, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = sum_of_squares([values], ZERO.double())
    assert found.dtype == torch.float64
    assert abs(float(found) / math.fsum((values * values).tolist()) - 1) <= 260 * 2.0**-53


@pytest.mark.parametrize("tensors", [[], [torch.zeros(0)]], ids=["no tensor", "no element"])
def test_the_sum_of_no_elements_is_a_new_zero(tensors):
    zero = torch.zeros(())
    found = sum_of_squares(tensors, zero)
    found += 1
    assert float(zero) == 0 and float(found) == 1


def test_infinity_and_nan_make_the_sum_not_finite():
    for bad in (torch.inf, torch.nan):
        values = torch.ones(100_000)
        values[77_777] = bad
        assert not math.isfinite(float(sum_of_squares([values], ZERO)))
