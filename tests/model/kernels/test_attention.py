"""Compiled attention: output and gradients are those of float64, for every range of keys, on any number of threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import causal_lower_right

from hlat.model import DocumentMask, attend, attention_kernel
from hlat.model.kernels import library
from hlat.model.kernels.attention import attend_to_ranges, attention_is_used_on, has_attention, key_ranges
from hlat.model.kernels.library import DTYPES
from hlat.runtime.backend.base import AttentionHeads
from hlat.runtime.backend.c_library import find_c_compiler
from hlat.runtime.backend.cpu import CpuBackend, fused_attention
from tests.support.model.kernel_cases import UNITS, Results, normal, same_bits, torch_attention

CPU = torch.device("cpu")
FP32 = 2.0**-24
SHAPES = (  # rows, query heads, kv heads, queries, keys, width
    (2, 4, 2, 130, 130, 64),
    (1, 3, 3, 65, 129, 24),  # queries that are the last of more keys
    (2, 2, 1, 1, 1, 8),
    (1, 2, 2, 70, 70, 256),
    (3, 8, 1, 37, 37, 33),
)

pytestmark = pytest.mark.skipif(not attention_is_used_on(CPU), reason="a CPU with AVX-512 or AVX2 and without AMX")


def operands_of(shape: tuple[int, ...], dtype: torch.dtype) -> Results:
    """Queries, keys, values and the gradient by the output, stored position by position."""
    rows, heads, groups, queries, keys, width = shape
    counts = ((heads, queries), (groups, keys), (groups, keys), (heads, queries))
    return [
        normal(rows, count, head, width, dtype=dtype, seed=seed).transpose(1, 2)
        for seed, (head, count) in enumerate(counts)
    ]


def results_of(operands: Results, first: torch.Tensor | None, spans: tuple[int, ...], window: int | None) -> Results:
    """Output and gradients by queries, keys and values."""
    leaves = [x.detach().requires_grad_() for x in operands[:3]]
    out = attend_to_ranges(*leaves, first, spans, window)
    return [out.detach(), *torch.autograd.grad(out, leaves, operands[3])]


def within(operands: Results, found: Results, ranges: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Check output and gradients against the formulas in float64.

    A probability has a relative error of p: that of its score, E + 3 roundings of fp32 of |q| |k|; 4 units and as many
    as its exponent by the exponential, twice, since the log-sum-exp has the same. It is then rounded to the dtype of
    the operands, u, as the output and the gradients are. Sums over n terms add n units of fp32 of the sum of their
    absolute values. The gradient by the scores is P (dP - D); the error of D is that of the output, times the gradient.
    Units are of first order; their products are below a hundredth of them, which is added.
    """
    q, k, v, grad = (x.double() for x in operands)
    dtype, share = operands[0].dtype, q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(share, 1) for x in (k, v))
    scale, terms = q.shape[3] ** -0.5, max(q.shape[2] * share, k.shape[2])
    keys = torch.arange(k.shape[2])
    seen = ((ranges[0][:, :, None] <= keys) & (keys <= ranges[1][:, :, None])).unsqueeze(1)
    scores = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
    chances = scores.softmax(-1)
    out = chances @ v
    products, along = grad @ v.mT, (grad * out).sum(-1, keepdim=True)
    changes = chances * (products - along)

    unit, width = UNITS[dtype], q.shape[3]
    exponents = (scores - scores.amax(-1, keepdim=True)).masked_fill(~seen, 0.0).abs()
    p = 2 * ((width + 3) * FP32 * (q.abs() @ k.abs().mT) * scale + (4 + exponents) * FP32)
    p = chances * (p.masked_fill(~seen, 0.0) + unit)
    sums = (terms + 10) * FP32
    by_out = p @ v.abs() + sums * (chances @ v.abs()) + unit * out.abs()
    of_scores = (
        p * (products - along).abs()
        + chances * (width + 10) * FP32 * (grad.abs() @ v.abs().mT + (grad * out).abs().sum(-1, keepdim=True))
        + chances * (grad.abs() * by_out).sum(-1, keepdim=True)
        + unit * changes.abs()
    )
    of_scores, wide = of_scores + sums * changes.abs(), changes.abs()
    exact = [out, changes @ k * scale, changes.mT @ q * scale, chances.mT @ grad]
    bounds = [by_out, of_scores @ k.abs() * scale, of_scores.mT @ q.abs() * scale, p.mT @ grad.abs()]
    absolute = [None, wide @ k.abs() * scale, wide.mT @ q.abs() * scale, chances.mT @ grad.abs()]
    for index, result in enumerate(found):
        value, bound, size = exact[index], bounds[index], absolute[index]
        if size is not None:
            bound = bound + sums * size
        if index >= 2:  # the query heads of a group are added up
            value, bound = (x.unflatten(1, (-1, share)).sum(2) for x in (value, bound))
        bound = 1.01 * (bound + unit * value.abs()) + 2.0**-100
        assert result.dtype == dtype
        assert bool(((result.double() - value).abs() <= bound).all()), f"result {index}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["rows", "documents", "window", "documents and window"])
def test_output_and_gradients_are_those_of_float64(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rows, queries, keys = shape[0], shape[3], shape[4]
    operands, spans = operands_of(shape, dtype), (keys - queries, keys)
    offsets = torch.arange(*spans).expand(rows, -1)
    first = offsets // 20 * 20 if "documents" in kind else None
    window = 11 if "window" in kind else None
    begin = torch.zeros_like(offsets) if first is None else first
    ranges = begin if window is None else begin.maximum(offsets - window + 1), offsets
    within(operands, results_of(operands, first, spans, window), ranges)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_of_two_chunks_attend_to_all_keys_before_them(dtype: torch.dtype) -> None:
    """As under context parallelism: a block of queries has some of each chunk."""
    operands = operands_of((2, 4, 2, 80, 160, 16), dtype)
    spans = (20, 60, 100, 140)
    offsets = torch.cat((torch.arange(20, 60), torch.arange(100, 140))).expand(2, -1)
    within(operands, results_of(operands, None, spans, None), (torch.zeros_like(offsets), offsets))
    assert all(
        torch.equal(x.long(), y) for x, y in zip(key_ranges(None, spans, 0, 2), (offsets * 0, offsets), strict=True)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    operands, results = operands_of((2, 4, 2, 300, 300, 32), dtype), []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        results.append(results_of(operands, None, (0, 300), None))
    for other in results[1:]:
        assert all(same_bits(mine, theirs) for mine, theirs in zip(other, results[0], strict=True))


def test_operands_may_have_any_strides() -> None:
    """Slices of one tensor, heads stored one after the other, a last dimension with gaps: the same bits."""
    operands = operands_of((2, 4, 2, 70, 70, 16), torch.bfloat16)
    expected = results_of(operands, None, (0, 70), None)
    fused = torch.cat([x.transpose(1, 2) for x in operands[:3]], dim=2)
    slices = [x.transpose(1, 2) for x in fused.split((4, 2, 2), dim=2)]
    gaps = [torch.stack((x, x), dim=-1)[..., 0] for x in operands]
    for others in ([*slices, operands[3]], [x.contiguous() for x in operands], gaps):
        found = results_of(others, None, (0, 70), None)
        assert all(same_bits(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_the_model_uses_it_for_rows_prefixes_documents_and_windows() -> None:
    """Against torch's kernel, in fp32; heads that it does not compute are left to torch."""
    q, k, v, _ = operands_of((2, 4, 2, 48, 96, 16), torch.float32)
    positions = torch.arange(48).repeat(1, 2)[:, :96].expand(2, -1)
    whole = DocumentMask.from_positions(positions, [(0, 96)])
    limited = DocumentMask.from_positions(positions, [(0, 96)], 7)
    long_q = torch.cat((q, q), dim=2)
    calls = [
        lambda: attend(long_q, k, v),
        lambda: attend(q, k, v, causal_lower_right(48, 96)),
        lambda: whole.attend(long_q, k, v),
        lambda: limited.attend(long_q, k, v),
    ]
    for call in calls:
        mine = call()
        with torch_attention():
            theirs = call()
        assert not torch.equal(mine, theirs), "two kernels round differently"
        torch.testing.assert_close(mine, theirs, rtol=0, atol=4 * (96 + 16) * FP32 * float(v.abs().max()) * 16)
    wide = [torch.ones(1, 1, 3, 257) for _ in range(3)]
    assert attend(*wide).shape == (1, 1, 3, 257) and not has_attention("cpu", torch.float32, 257)
    assert attend(*(x.double() for x in wide)).dtype == torch.float64


def test_the_name_says_what_computes_and_for_which_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    built = library.library()
    assert built is not None
    plain, limited = (AttentionHeads(torch.bfloat16, 64, grouped=True, limited=value) for value in (False, True))
    name = attention_kernel(plain, True, CPU).name
    assert name == f"fused C kernel ({built.build})"
    assert attention_kernel(limited, True, CPU).name == f"{name} within documents"
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert not fused_attention(), "torch's kernel uses the tiles of AMX"
    monkeypatch.setattr(CpuBackend, "fused_attention", False)
    assert attention_kernel(AttentionHeads(torch.float32, 64, grouped=True), True, CPU).name == "flash_attention"


@pytest.mark.parametrize("flag", ["-mno-avx512bf16", "-mno-avx512f"])
def test_without_bf16_instructions_operands_are_widened(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code for a processor that has none keeps the bounds: it rounds less often. AVX2's vectors are shorter too."""
    if flag[5:].replace("512bf", "512_bf") not in Path("/proc/cpuinfo").read_text(encoding="ascii").split():
        pytest.skip("this processor has no such instructions")
    library.library.cache_clear()
    monkeypatch.setenv("CC", f"{find_c_compiler()} {flag}")
    try:
        operands = operands_of((2, 4, 2, 130, 130, 24), torch.bfloat16)
        offsets = torch.arange(130).expand(2, -1)
        within(operands, results_of(operands, None, (0, 130), None), (torch.zeros_like(offsets), offsets))
    finally:
        library.library.cache_clear()


def test_results_of_fake_tensors_are_those_of_real_ones() -> None:
    """Shapes, dtypes and strides: a rehearsal counts them."""
    operands = operands_of((2, 4, 2, 70, 70, 24), torch.bfloat16)
    real = results_of(operands, None, (0, 70), None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in operands]
        fake = results_of(fakes, None, (0, 70), None)
    assert [(x.shape, x.dtype, x.stride()) for x in fake] == [(x.shape, x.dtype, x.stride()) for x in real]


def test_compiled_code_calls_the_operator() -> None:
    """In one graph, with its backward pass, and the bits of the eager call."""
    operands = operands_of((1, 2, 1, 40, 40, 16), torch.float32)
    leaves = [x.detach().requires_grad_() for x in operands[:3]]
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    out = compiled(*leaves)
    found = [out.detach(), *torch.autograd.grad(out, leaves, operands[3])]
    expected = results_of(operands, None, (0, 40), None)
    assert all(same_bits(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_operands_of_two_dtypes_are_refused() -> None:
    q, k, v, _ = operands_of((1, 2, 1, 4, 4, 8), torch.float32)
    with pytest.raises(TypeError, match=r"k is torch.bfloat16, and torch.float32 is needed"):
        attend_to_ranges(q, k.bfloat16(), v, None, (0, 4))


def test_threads_need_no_more_stack_than_those_of_torch() -> None:
    """256 KiB, which torch's attention needs too; the widest heads, forward and backward, on two threads."""
    code = """
import torch
from hlat.model.kernels.attention import attend_to_ranges
torch.set_num_threads(2)
for dtype in (torch.bfloat16, torch.float32):
    q, k, v = (torch.ones(1, 4, 130, 256, dtype=dtype, requires_grad=True) for _ in range(3))
    attend_to_ranges(q, k, v, None, (0, 130)).sum().backward()
print("done")
"""
    command = ["sh", "-c", 'ulimit -s 256 && exec "$@"', "sh", sys.executable, "-c", code]
    done = subprocess.run(
        command, env=os.environ | {"OMP_STACKSIZE": "256k"}, capture_output=True, text=True, check=False
    )
    assert done.stdout == "done\n", (done.returncode, done.stderr)
