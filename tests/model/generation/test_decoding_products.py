"""Products of few rows: those of float64 within the error of their sums, for any shape."""

import pytest
import torch

from hlat.model.decoding import decoding_library
from tests.support.model.kernel_cases import UNITS, normal

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(decoding_library(CPU, torch.float32, 64) is None, reason="no AVX2, or no C compiler")


@pytest.mark.parametrize("dtype", UNITS, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("outs", "width"), [(1, 1), (15, 31), (16, 32), (37, 72), (211, 64), (64, 1037)])
def test_a_product_of_few_rows_is_the_product(outs: int, width: int, rows: int, dtype: torch.dtype) -> None:
    """The error of a sum of K terms in fp32 is K units of 2^-24 of their magnitudes (Higham 2002, section 3.1).

    The instruction that multiplies pairs of bf16 numbers takes subnormal numbers for 0, hence 2^-120 for each term.
    """
    x, weight = normal(rows, width, dtype=dtype), normal(outs, width, dtype=dtype, seed=1)
    library = decoding_library(CPU, dtype, 64)
    assert library is not None
    found = library.multiply(x, weight)
    exact, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    of_sum = width * (2.0**-24 * size + 2.0**-120)
    assert found.dtype == dtype and found.shape == (rows, outs)
    assert bool(((found.double() - exact).abs() <= of_sum + UNITS[dtype] * (exact.abs() + of_sum)).all())
