"""Sums of squares of bf16 tensors: the compiled function equals the plain one bit for bit, and both the exact sum."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hlat.optim import cpu_kernels as native
from hlat.optim import square_sums
from hlat.optim.cpu_kernels import RUN, plain_square_sums


def words(count: int, seed: int) -> torch.Tensor:
    """Any bits: every exponent, subnormals, infinities, NaN."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 15), 1 << 15, (count,), generator=generator).to(torch.int16).view(torch.bfloat16)


def assert_same(tensors: list[torch.Tensor]) -> None:
    assert native._library() is not None, "this machine has a compiler"
    ours, plain = square_sums(tensors), plain_square_sums([tensor.reshape(-1) for tensor in tensors])
    assert torch.equal(ours.nan_to_num(nan=-1.0, posinf=-2.0), plain.nan_to_num(nan=-1.0, posinf=-2.0))


@settings(max_examples=60)
@given(st.lists(st.integers(0, 2000), max_size=6), st.integers(0, 1 << 30))
def test_the_compiled_function_equals_the_plain_one(counts, seed):
    assert_same([words(count, seed + number) for number, count in enumerate(counts)])


@pytest.mark.parametrize("threads", [1, 3])
def test_the_number_of_threads_does_not_change_a_bit(threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert_same([words(300_000, 1).view(600, 500).T, words(5, 2), words(70_001, 3)])


def test_tensors_of_any_strides_are_summed():
    values = words(3000, 6)
    assert_same([values[::2], values.view(60, 50)[:, 3], values[7:8].expand(400), values[1:], values[:0]])


def test_elements_past_the_end_count_as_zeros():
    assert square_sums([torch.zeros(5, dtype=torch.bfloat16)]).tolist() == [0.0]


def test_each_run_is_the_exact_sum_of_its_squares():
    """256 squares of 16 bits; float64 adds them with an error of 256 roundings of 2^-53 at most."""
    values = torch.randn(3 * RUN + 40, generator=torch.Generator().manual_seed(4)).bfloat16()
    exact = [math.fsum((part.double() ** 2).tolist()) for part in values.split(RUN)]
    for found in (square_sums([values]), plain_square_sums([values])):
        torch.testing.assert_close(found, torch.tensor(exact, dtype=torch.float64), rtol=RUN * 2.0**-53, atol=0)


def test_without_a_compiler_the_plain_sums_are_computed(monkeypatch):
    values = words(1000, 5)
    monkeypatch.setattr(native, "_library", lambda: None)
    assert torch.equal(square_sums([values]).nan_to_num(), plain_square_sums([values]).nan_to_num())
