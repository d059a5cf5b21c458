"""The compiled kernel equals the plain one bit for bit, for any operands."""

import logging
import math
import mmap
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hlat.optim import adamw
from hlat.optim import cpu_kernels as native
from hlat.optim.adamw import kernel_for
from hlat.optim.adamw_reference import ROUNDINGS, ElementAddresses, Operands, update, update_lines

GRADIENTS = (torch.bfloat16, torch.float32)
KEYS = torch.randint(-(1 << 31), 1 << 31, (2, 3), generator=torch.Generator().manual_seed(0)).to(torch.int32)
CPU = torch.device("cpu")
WRITTEN = ("weight", "exp_avg", "exp_avg_sq", "compensation")


def operands(rounding: str, gradient: torch.dtype, lines: int, length: int, seed: int) -> Operands:
    """Operands with arbitrary bits: every exponent, and one in a hundred each of zeros, subnormals, infinities, NaN."""
    generator = torch.Generator().manual_seed(seed)

    def words(dtype: torch.dtype, as_dtype: torch.dtype) -> torch.Tensor:
        bound = 1 << (8 * dtype.itemsize - 1)
        bits = torch.randint(-bound, bound, (lines, length), generator=generator).to(dtype).view(as_dtype)
        special = torch.tensor(
            [0.0, -0.0, 1e-40, -1e-40, 3.3895314e38, torch.inf, -torch.inf, torch.nan], dtype=as_dtype
        )
        chosen = torch.randint(0, 100, (lines, length), generator=generator)
        return torch.where(chosen < 8, special[chosen % 8], bits)

    def stored() -> torch.Tensor:
        return words(torch.int16, torch.bfloat16)

    table = torch.randint(0, 1 << 31, (2, lines), generator=generator).to(torch.int32)
    return Operands(
        weight=stored(),
        gradient=stored() if gradient == torch.bfloat16 else words(torch.int32, torch.float32),
        exp_avg=stored(),
        exp_avg_sq=stored().abs(),
        compensation=stored() if "kahan" in rounding else None,
        scalars=torch.tensor([3e-5, 1.1e-3, 0.1, 0.95, 0.05, 3.3, 1e-8, 0.37]),
        addresses=ElementAddresses(length, *table, torch.randint(0, 3, (lines,), generator=generator).to(torch.int32)),
    )


def state(written: Operands) -> list[torch.Tensor]:
    """Bits of the tensors that a step writes; all NaN count as the same."""
    tensors = [written.weight, written.exp_avg, written.exp_avg_sq]
    tensors += [] if written.compensation is None else [written.compensation]
    return [torch.where(tensor.isnan(), 0x7FC0, tensor.view(torch.int16).int()) for tensor in tensors]


def assert_same(left: Operands, right: Operands) -> None:
    for mine, theirs in zip(state(left), state(right), strict=True):
        assert torch.equal(mine, theirs)


@settings(max_examples=60)
@given(
    st.sampled_from(ROUNDINGS),
    st.sampled_from(GRADIENTS),
    st.integers(0, 40),
    st.integers(1, 130),
    st.integers(0, 1 << 30),
)
@example("bf16-sr", torch.bfloat16, 700, 120, 0)  # more lines than a chunk of the plain kernel
@example("bf16-sr", torch.float32, 2, 70_000, 0)  # a line longer than a chunk
def test_the_compiled_kernel_equals_the_plain_one_over_several_steps(rounding, gradient, lines, length, seed):
    kernel = kernel_for(CPU)
    assert kernel is not update, "this machine has a compiler"
    plain, compiled = (operands(rounding, gradient, lines, length, seed) for _ in range(2))
    for step in range(3):
        update([plain], KEYS + step, rounding)
        kernel([compiled], KEYS + step, rounding)
        assert_same(plain, compiled)


def test_the_number_of_threads_does_not_change_a_bit(monkeypatch):
    """Three threads; parameters have fewer than three lines, or a number that three does not divide."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    shapes = ((1, 90_000), (2, 513), (0, 5), (701, 129))
    plain, threaded = ([operands("bf16-sr", torch.bfloat16, *shape, seed=7) for shape in shapes] for _ in range(2))
    update(plain, KEYS, "bf16-sr")
    kernel_for(CPU)(threaded, KEYS, "bf16-sr")
    for mine, theirs in zip(plain, threaded, strict=True):
        assert_same(mine, theirs)


def test_threads_do_not_write_beyond_the_end_of_a_tensor(monkeypatch):
    """Every tensor is the beginning of a longer original, whose remaining elements must keep their bits."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    original, behind = operands("bf16-kahan", torch.bfloat16, 701, 129, seed=7), 500
    names = ("weight", "gradient", "exp_avg", "exp_avg_sq", "compensation")
    longer = {
        name: torch.cat([getattr(original, name), torch.ones(behind, 129, dtype=torch.bfloat16)]) for name in names
    }
    tables = [
        torch.cat([table, table.new_zeros(behind)])[:701]
        for table in (original.addresses.rows_L, original.addresses.columns_L, original.addresses.names_L)
    ]
    within = {name: tensor[:701] for name, tensor in longer.items()}
    kernel_for(CPU)([replace(original, **within, addresses=ElementAddresses(129, *tables))], KEYS, "bf16-kahan")
    update([original], KEYS, "bf16-kahan")
    assert_same(original, replace(original, **within))
    assert all(bool((tensor[701:] == 1).all()) for tensor in longer.values())


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("false", "false failed"), ("no-such-compiler", "no-such-compiler")],
    ids=["fails", "absent"],
)
def test_without_a_working_compiler_the_plain_kernel_runs_and_the_reason_is_logged(
    monkeypatch, caplog, compiler, reason
):
    monkeypatch.setenv("CC", compiler)
    native._library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert kernel_for(CPU) is update
        assert reason in caplog.text
    finally:
        native._library.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_the_plain_kernel_keeps_its_bits_under_torch_compile(rounding):
    """Compiling the plain kernel is exact: inductor neither contracts products nor flushes subnormals.

    It has to emulate casts: otherwise it removes casts to bf16 and back, whose error bf16-kahan keeps.
    """

    def step(*tensors: torch.Tensor | None) -> None:
        weight, gradient, exp_avg, exp_avg_sq, compensation, scalars, rows, columns, names, keys = tensors
        lines = ElementAddresses(weight.shape[1], rows, columns, names)
        update_lines(Operands(weight, gradient, exp_avg, exp_avg_sq, compensation, scalars, lines), keys, rounding)

    compiled = torch.compile(step, dynamic=True, fullgraph=True, options={"emulate_precision_casts": True})
    for shape in ((40, 129), (33, 64)):
        plain, other = (operands(rounding, torch.bfloat16, *shape, seed=3) for _ in range(2))
        update([plain], KEYS, rounding)
        tensors = (other.weight, other.gradient, other.exp_avg, other.exp_avg_sq, other.compensation, other.scalars)
        compiled(*tensors, other.addresses.rows_L, other.addresses.columns_L, other.addresses.names_L, KEYS)
        assert_same(plain, other)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_lines_past_two_to_the_31_elements_are_updated_in_place(rounding, gradient):
    """The last lines of a tensor whose offsets need 64 bits. Memory that nobody touches takes no room."""
    lines, length, some = (1 << 19) + 2, 4096, 2
    last = operands(rounding, gradient, some, length, seed=2)
    tables = (last.addresses.rows_L, last.addresses.columns_L, last.addresses.names_L)
    long = {"scalars": last.scalars}
    for name in ("weight", "gradient", "exp_avg", "exp_avg_sq", "compensation"):
        values = getattr(last, name)
        long[name] = None if values is None else _long(values, lines, length)
    whole = Operands(**long, addresses=ElementAddresses(length, *(_long(table, lines) for table in tables)))

    library = native._library()
    function = getattr(library, f"{native._FUNCTIONS[rounding]}_{native._GRADIENTS[gradient]}")
    native._call_lines([(function, lines, native._arguments(whole, KEYS))], lines // some - 1, lines // some)
    update([last], KEYS, rounding)
    assert_same(
        last, replace(whole, **{name: long[name] if long[name] is None else long[name][-some:] for name in WRITTEN})
    )


def _long(last: torch.Tensor, *shape: int) -> torch.Tensor:
    """Tensor of a shape whose last lines have values."""
    memory = mmap.mmap(-1, math.prod(shape) * last.itemsize)
    long = torch.frombuffer(memory, dtype=last.dtype).view(shape)
    long[-len(last) :] = last
    return long


@pytest.mark.parametrize("has_compiler", [True, False])
def test_a_device_whose_compiler_is_missing_updates_uncompiled_and_says_what_it_needs(
    monkeypatch, caplog, has_compiler
):
    compiler = SimpleNamespace(is_available=lambda: has_compiler, package="a C compiler")
    monkeypatch.setattr(adamw, "backend_of", lambda device: SimpleNamespace(compiler=compiler))
    monkeypatch.setitem(sys.modules, "hlat.optim.adamw_triton", SimpleNamespace(update=update_lines))
    assert adamw._triton_kernel(CPU) is (update_lines if has_compiler else None)
    assert ("need a C compiler" in caplog.text) != has_compiler
