"""Fused kernels compute what the formulas in torch compute, as exactly as fp32 allows, for any shape and strides."""

import math

import pytest
import torch

from hlat.model.kernels.library import DTYPES, has_kernels
from hlat.model.pointwise import gated, rms_norm, rotate
from tests.support.model.kernel_cases import (
    CASES,
    UNITS,
    WIDTHS,
    output_and_gradients,
    same_bits,
    torch_only,
)

FP32 = 2.0**-24


def test_this_machine_has_the_kernels() -> None:
    assert all(has_kernels(torch.ones(1, dtype=dtype)) for dtype in DTYPES)
    assert not has_kernels(torch.ones(1, dtype=torch.float64)) and not has_kernels(torch.ones(1, device="meta"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "batch"), [*((width, 2) for width in WIDTHS), (520, 33)])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_float64(case, width: int, batch: int, dtype: torch.dtype) -> None:
    """Compare with the formulas in float64 of the same numbers.

    Every number is computed in fp32 and rounded once to the dtype: a relative error of one unit of it. Before that, at
    most 30 roundings in fp32 (those of an exponential and what follows; its polynomial and reduction are within 4
    units) act on numbers that are no larger than the sum of the magnitudes of its terms. Sums over a width have
    partial sums of at most 32 terms per lane, 4 steps across lanes, and one more for every 512 elements; the gradient
    of a norm's weight sums blocks of 64 rows, and the blocks, here of at most 990 rows. The terms are
    bounded by the largest number of the tensor where terms cancel (rotation, gradient of a norm), whence the norm of
    the tensor: the distance is relative to it.
    """
    function, operands = case(dtype, width, batch)
    found = output_and_gradients(function, operands)
    with torch_only():
        exact = output_and_gradients(function, [operand.double() for operand in operands])
    bound = UNITS[dtype] + (30 + 32 + 4 + width / 512 + 64 + 16) * FP32
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype == dtype
        distance = (ours.double() - theirs).norm() / theirs.norm()
        assert distance <= bound


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_number_of_threads_changes_no_bit(case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough rows for several blocks, also of those whose weight gradients are added up."""
    function, operands = case(dtype, 520, batch=33)
    results = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        results.append(output_and_gradients(function, operands))
    for others in results[1:]:
        assert all(same_bits(mine, theirs) for mine, theirs in zip(results[0], others, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("case", CASES)
def test_what_is_not_finite_spreads_as_in_torch(case, value: float, dtype: torch.dtype) -> None:
    """One element of each operand in turn; numbers that are NaN, or infinite with a sign, are the same."""
    function, operands = case(dtype, 33)
    for index in range(len(operands)):
        changed = [operand.clone() for operand in operands]
        changed[index].view(-1)[40 if changed[index].numel() > 100 else 20] = value
        found = output_and_gradients(function, changed)
        with torch_only():
            expected = output_and_gradients(function, changed)
        for ours, theirs in zip(found, expected, strict=True):
            assert not torch.isfinite(theirs).all() or torch.isfinite(ours).all()
            for kind in (torch.isnan, torch.isposinf, torch.isneginf):
                assert torch.equal(kind(ours), kind(theirs)), kind


@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (0, 0)])
def test_empty_tensors_pass(shape: tuple[int, int]) -> None:
    x = torch.ones(shape).requires_grad_()
    weight = torch.ones(shape[1]).requires_grad_()
    angles = torch.ones(shape[0], 1, 1, shape[1])
    outputs = [rms_norm(x, weight, 1e-5), gated(x, x)]
    outputs.append(rotate(torch.ones(2, shape[0], 1, 1, 2 * shape[1]).requires_grad_(), angles, angles))
    assert [out.shape for out in outputs[:2]] == [shape] * 2
    for gradient in torch.autograd.grad(sum(out.sum() for out in outputs), (x, weight)):
        assert gradient.sum() == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sigmoid_is_exact_over_the_whole_range(dtype: torch.dtype) -> None:
    """Gates from 2^-30 to 2^30 of both signs, each with the error of the exponential: 4 units, and 4 of the rest.

    Results below 2^-100 may be rounded to 0, as those of torch are where the exponential of the gate is infinite.
    """
    magnitudes = 2.0 ** torch.arange(-30, 30, 2.0**-6)
    gate = torch.cat([magnitudes, -magnitudes]).to(dtype)
    found = gated(gate, torch.ones_like(gate)).double()
    exact = gate.double() / (1 + torch.exp(-gate.double()))
    error = (found - exact).abs() - 2.0**-100
    assert bool((error <= (UNITS[dtype] + 8 * FP32) * exact.abs()).all())


def test_a_norm_of_one_long_row_adds_up_in_parts() -> None:
    """2^20 equal squares: added up one by one in 16 lanes, they would be off by thousands of units."""
    x = torch.full((1, 1 << 20), 1 + 2.0**-12)
    out = rms_norm(x, torch.ones(1 << 20), 0.0)
    assert math.isclose(float(out[0, 0]), 1.0, rel_tol=(32 + 4) * FP32)
