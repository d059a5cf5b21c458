"""Triton kernels without a GPU: compiled to machine code for several, and run in Triton's interpreter."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="pip install -e '.[kernels]'")

from hlat.optim import adamw_triton
from hlat.optim.adamw_reference import ROUNDINGS
from tests.optim.test_kernels import GRADIENTS, KEYS, operands
from tests.support.optim.compiled import compiling

ROOT = Path(__file__).resolve().parents[2]
# A block for a short line; blocks of the usual size, for a length that 16 does not divide and for one that it does,
# which Triton specialises.
LENGTHS = (1, 1500, 4096)
CASES = [(rounding, gradient, length) for rounding in ROUNDINGS for gradient in GRADIENTS for length in LENGTHS]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """An empty cache: kernels that an earlier run has compiled would prove nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def launched(capability: int):
    """Compiled kernels of all cases, for a GPU of a compute capability."""
    with compiling(capability) as kernels:
        for rounding, gradient, length in CASES:
            adamw_triton.update([operands(rounding, gradient, 3, length, seed=1)], KEYS, rounding)
    assert len({id(kernel) for kernel in kernels}) == len(kernels) == len(CASES), "a kernel of its own for each case"
    return kernels


def test_the_kernels_that_are_tested_are_all_there_are():
    found = [file for file in (ROOT / "src").rglob("*.py") if "@triton.jit" in file.read_text(encoding="utf-8")]
    assert found == [Path(adamw_triton.__file__)]


@pytest.mark.parametrize(("capability", "target"), [(80, "sm_80"), (90, "sm_90a"), (100, "sm_100a")])
def test_every_kernel_becomes_machine_code_with_exact_arithmetic(capability, target):
    """The plain kernel rounds after each product and each sum, divides and takes roots as IEEE 754 says.

    So the PTX has no fused products (fma), no flushing of subnormals (ftz) and no approximate division or root. Each
    of the elements of a thread is divided and has a root.
    """
    for case, kernel in zip(CASES, launched(capability), strict=True):
        ptx = kernel.asm["ptx"]
        assert f".target {target}" in ptx and len(kernel.asm["cubin"]) > 1000, case
        counts = Counter(re.findall(r"^\s+(?:@\S+ )?([a-z0-9_.]+)\s", ptx, re.MULTILINE))
        inexact = [name for name in counts if "f32" in name and re.search(r"fma|ftz|approx|mad", name)]
        assert inexact == [], case
        assert counts["div.rn.f32"] == counts["sqrt.rn.f32"] > 0, case


def test_offsets_into_tensors_have_64_bits():
    """A tensor may have more than 2^31 elements: its rows times its columns, computed in 32 bits, would wrap around."""
    long = [(case, kernel) for case, kernel in zip(CASES, launched(90), strict=True) if case[2] > 1]
    for case, kernel in long:
        blocks = re.findall(r"tt\.addptr .* : tensor<(\d+)x!tt\.ptr<\w+>>, tensor<\d+xi(\d+)>", kernel.asm["ttir"])
        widths = {int(width) for _, width in blocks}
        tensors = 5 if "kahan" in case[0] else 4
        assert len(blocks) >= tensors and widths == {64}, case


def test_the_interpreter_gives_the_bits_of_the_plain_kernel():
    """For operands with any bits: every exponent, zeros, subnormals, infinities and NaN."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.optim.interpreted"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(ROUNDINGS) * len(GRADIENTS) * 6
    assert [result["case"] for result in results if any(result["different"])] == []
