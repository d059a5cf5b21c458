"""Triton kernels without a GPU: compiled to machine code for several, and run in Triton's interpreter."""

import gc
import importlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="pip install -e '.[kernels]'")

import torch
from triton.runtime import JITFunction

from hlat.model.kernels import operations_triton
from hlat.optim import adamw_triton
from hlat.optim.adamw_reference import ROUNDINGS
from tests.optim.test_kernels import GRADIENTS, KEYS, operands
from tests.support.optim.compiled import compiling

ROOT = Path(__file__).resolve().parents[2]
# A block for a short line; blocks of the usual size, for a length that 16 does not divide and for one that it does,
# which Triton specialises.
LENGTHS = (1, 1500, 4096)
# Triton specialises pointers that are multiples of 16 bytes; a shard may begin anywhere.
ALIGNED = [(rounding, gradient, length, 0) for rounding in ROUNDINGS for gradient in GRADIENTS for length in LENGTHS]
CASES = [*ALIGNED, *((rounding, gradient, 4096, 1) for rounding in ROUNDINGS for gradient in GRADIENTS)]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """An empty cache: kernels that an earlier run has compiled would prove nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def shifted(given, elements: int):
    """The same operands, each a number of elements after the start of its memory."""

    def shift(values):
        return torch.cat((values.new_zeros(elements), values.flatten()))[elements:].view_as(values)

    tensors = {name: getattr(given, name) for name in ("weight", "gradient", "exp_avg", "exp_avg_sq", "compensation")}
    return replace(given, **{name: shift(tensor) for name, tensor in tensors.items() if tensor is not None})


def launched(capability: int | str, cases=CASES):
    """Compiled kernels of some cases, for a GPU of a compute capability, or an architecture of AMD."""
    with compiling(capability) as kernels:
        for rounding, gradient, length, shift in cases:
            adamw_triton.update([shifted(operands(rounding, gradient, 3, length, seed=1), shift)], KEYS, rounding)
    assert len({id(kernel) for kernel in kernels}) == len(kernels) == len(cases), "a kernel of its own for each case"
    return kernels


def test_the_kernels_that_are_tested_are_all_there_are():
    """Every module that names Triton is imported; a kernel is a compiled function that no other one calls."""
    for file in (ROOT / "src").rglob("*.py"):
        if re.search(r"^\s*(?:import|from) triton\b", file.read_text(encoding="utf-8"), re.MULTILINE):
            importlib.import_module(".".join(file.relative_to(ROOT / "src").with_suffix("").parts))
    ours = [found for found in gc.get_objects() if type(found) is JITFunction and found.module.startswith("hlat")]
    names = {each.fn.__name__ for each in ours}
    called = {name for name in names for each in ours if re.search(rf"(?<!def )\b{name}\(", each.src)}
    operators = {"_norm", "_norm_backward", "_rotate", "_swiglu", "_swiglu_backward"}  # tests/model/kernels/test_triton
    operators |= {"_loss_sums", "_loss_gradient", "_first_equal"}
    assert names - called == {"_step"} | operators
    assert {each.module for each in ours} == {adamw_triton.__name__, operations_triton.__name__}


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


@pytest.mark.parametrize(
    ("architecture", "cases"),
    [
        ("gfx942", CASES[:1]),
        pytest.param("gfx942", CASES, marks=pytest.mark.slow),
        pytest.param("gfx90a", CASES, marks=pytest.mark.slow),
    ],
    ids=["gfx942-one", "gfx942", "gfx90a"],
)
def test_every_kernel_becomes_machine_code_for_amd_without_fused_products(architecture, cases):
    """Only divisions and roots have them there, as their exact sequences of instructions do."""
    for case, kernel in zip(cases, launched(architecture, cases), strict=True):
        assert architecture in kernel.asm["amdgcn"] and len(kernel.asm["hsaco"]) > 1000, case
        assert '"denormal-fp-math-f32"="ieee"' in kernel.asm["llir"], case
        inexact = re.findall(r"llvm\.fma|llvm\.fmuladd|\b(?:contract|fast|arcp|afn|reassoc)\b", kernel.asm["llir"])
        # Triton 3.6 writes out exact roots, five uses for each and one declaration; later ones leave them to LLVM.
        assert set(inexact) <= {"llvm.fma"} and len(inexact) % 5 == bool(inexact), (case, len(inexact))


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
