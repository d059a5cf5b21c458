"""Matrix products use the dtype of the activations; widened products are rounded once, like native ones."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from hlat.model import attend
from hlat.model.kernels import matmul as products
from hlat.runtime.backend.cpu import CpuBackend
from tests.support.model.kernel_cases import torch_attention

B = torch.bfloat16


def grads(out: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of a fixed weighting of the outputs."""
    weighting = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)
    return list(torch.autograd.grad(out, inputs, weighting))


def leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(B).requires_grad_() for shape in shapes]


@pytest.fixture(params=[False, True], ids=["native", "widened"])
def widened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Test both kinds of CPU, with and without bf16 instructions, on any machine."""
    monkeypatch.setattr(products, "_EMULATE_BF16", "cpu" if request.param else "")
    return bool(request.param)


def close(ours: torch.Tensor, exact: torch.Tensor, roundings: int = 1) -> None:
    """Assert an error within some bf16 roundings of the exact result, and cancellation by its largest entry."""
    assert ours.dtype == B
    error = (ours.double() - exact.double()).abs()
    assert (error <= roundings * 2.0**-8 * exact.double().abs() + 2.0**-14 * exact.double().abs().max()).all()


@pytest.mark.usefixtures("widened")
def test_linear_rounds_once() -> None:
    x, weight, bias = leaves((3, 5, 64), (16, 64), (16,))
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight, bias)]
    out, expected = products.linear(x, weight, bias), F.linear(*exact)
    close(out, expected)
    weighting = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(B)
    for ours, theirs in zip(
        grads(out, x, weight, bias), torch.autograd.grad(expected, exact, weighting.double()), strict=True
    ):
        close(ours, theirs)


@pytest.mark.usefixtures("widened")
def test_weights_are_cast_to_the_dtype_of_activations_and_gradients_to_that_of_weights() -> None:
    weight = torch.randn(16, 64, requires_grad=True)
    out = products.linear(torch.randn(4, 64).to(B), weight)
    assert out.dtype == B
    out.sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32


@pytest.mark.usefixtures("widened")
def test_attention_error_is_the_rounding_of_probabilities_and_result() -> None:
    """The native kernel rounds probabilities and their sums to bf16, the widened kernel neither."""
    q, k, v = leaves((2, 8, 24, 16), (2, 4, 24, 16), (2, 4, 24, 16))
    exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    expected = F.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
    out = attend(q, k, v)
    weighting = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(B)
    ours = [out, *grads(out, q, k, v)]
    theirs = [expected, *torch.autograd.grad(expected, exact, weighting.double())]
    for found, right in zip(ours, theirs, strict=True):
        assert found.dtype == B
        assert (found.double() - right).norm() <= 4 * 2.0**-9 * right.norm()


@pytest.mark.usefixtures("widened")
def test_the_last_position_attends_to_all_with_and_without_its_causal_mask() -> None:
    """Two query heads share a kv head: the mask is about positions, not about them."""
    q, k, v = leaves((2, 4, 1, 16), (2, 2, 9, 16), (2, 2, 9, 16))
    exact = [tensor.detach().double() for tensor in (q, k, v)]
    probabilities = torch.softmax(exact[0] @ exact[1].repeat_interleave(2, 1).mT / 4, -1)
    expected = probabilities @ exact[2].repeat_interleave(2, 1)
    masked = attend(q, k, v, causal_lower_right(1, 9))
    # probabilities and results are rounded: errors relative to the largest value
    assert (masked.double() - expected).abs().max() <= 2 * 2.0**-8 * exact[2].abs().max()
    assert torch.equal(masked, attend(q, k, v))
    for ours, theirs in zip(grads(masked, q, k, v), grads(attend(q, k, v), q, k, v), strict=True):
        assert torch.equal(ours, theirs)


def test_a_group_of_heads_is_never_masked_as_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch on a CPU spreads a mask of one position over the heads; kernels of GPUs align it with all heads."""
    masks = []
    kernel = F.scaled_dot_product_attention

    def record(*operands: torch.Tensor, attn_mask: torch.Tensor | None) -> torch.Tensor:
        masks.append(attn_mask)
        return kernel(*operands, attn_mask=attn_mask)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    q, k, v = leaves((2, 4, 1, 16), (2, 2, 9, 16), (2, 2, 9, 16))
    of_window = (torch.arange(9) > 3).unsqueeze(0)
    for mask in (causal_lower_right(1, 9), None, of_window):
        attend(q, k, v, mask)
    assert masks[0] is None and masks[1] is None and masks[2] is of_window


def test_widened_attention_is_the_rounded_result_of_the_fp32_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_EMULATE_BF16", "cpu")
    q, k, v = leaves((2, 8, 24, 16), (2, 4, 24, 16), (2, 4, 24, 16))
    mask = torch.ones(24, 24, dtype=torch.bool).tril()
    wide = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True, enable_gqa=True).to(B)
    with torch_attention():
        assert torch.equal(attend(q, k, v), wide)
    close(attend(q, k, v, mask), wide)


def test_the_gradient_of_a_frequent_token_is_accumulated_in_fp32() -> None:
    """4,096 times 1 + 2^-7: a bf16 sum would stop at 256."""
    weight = torch.zeros(3, 2, dtype=B, requires_grad=True)
    out = products.embed(torch.ones(64, 64, dtype=torch.int64), weight)
    out.backward(torch.full(out.shape, 1 + 2.0**-7, dtype=B))
    assert weight.grad is not None
    assert weight.grad.tolist() == [[0, 0], [4128, 4128], [0, 0]]


@pytest.mark.parametrize("emulated", ["", "cpu"])
def test_compiled_code_checks_the_list_of_device_types_with_one_guard(
    emulated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guard is evaluated at every call of a compiled block. A look-up in the table of backends would need dozens."""
    monkeypatch.setattr(products, "_EMULATE_BF16", emulated)

    def block(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if products.needs_widening(x) else x - 1

    torch._dynamo.reset()
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    assert float(compiled(torch.zeros((), dtype=B))) == (1 if emulated else -1)
    (entry,) = torch._dynamo.eval_frame._debug_get_cache_entry_list(block.__code__)
    guards = [str(guard.verbose_code_parts()) for guard in _leaf_guards(entry.guard_manager.root)]
    assert sum("_EMULATE_BF16 ==" in guard for guard in guards) == 1
    assert sum("_EMULATE_BF16" in guard.partition("  #")[0] for guard in guards) == 1


def _leaf_guards(manager: Any) -> list[Any]:
    children = [guard for child in manager.get_child_managers() for guard in _leaf_guards(child)]
    return [*manager.get_leaf_guards(), *children]


@pytest.mark.skipif(not CpuBackend("cpu").fp32_by_onednn, reason="a processor of AMD with AVX-512")
@pytest.mark.parametrize("biased", [False, True])
def test_products_by_onednn_are_those_of_float64(biased: bool) -> None:
    """Sums of n terms are off by at most n + 1 roundings of fp32 of the sum of absolute values."""
    generator = torch.Generator().manual_seed(3)
    x, weight, bias, grad = (
        torch.randn(shape, generator=generator) for shape in ((3, 7, 33), (20, 33), (20,), (3, 7, 20))
    )
    inputs = [x, weight, bias][: 2 + biased]
    leaves = [each.clone().requires_grad_() for each in inputs]
    exact, absolute = (
        [each.double().requires_grad_() for each in map(change, inputs)] for change in (torch.clone, abs)
    )
    out = products.linear(*leaves)
    assert products.uses_onednn(leaves[0]) and "OneDnn" in str(out.grad_fn)
    found = [out, *torch.autograd.grad(out, leaves, grad)]

    def of(operands: list[torch.Tensor], by: torch.Tensor) -> list[torch.Tensor]:
        plain = F.linear(*operands)
        return [plain, *torch.autograd.grad(plain, operands, by)]

    for mine, value, size in zip(found, of(exact, grad.double()), of(absolute, grad.double().abs()), strict=True):
        assert bool(((mine.double() - value).abs() <= 35 * 2.0**-24 * size).all())


@pytest.mark.skipif(not CpuBackend("cpu").fp32_by_onednn, reason="a processor of AMD with AVX-512")
def test_products_without_gradients_have_the_bits_of_those_with_gradients() -> None:
    x, weight = torch.randn(40, 80), torch.randn(30, 80, requires_grad=True)
    with torch.no_grad():
        without = products.linear(x, weight)
    assert torch.equal(without, products.linear(x, weight))


def test_a_compiler_keeps_torchs_products() -> None:
    x, weight = torch.randn(4, 8), torch.randn(3, 8)
    graphs: list[torch.fx.GraphModule] = []

    def record(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    torch.compile(products.linear, backend=record, fullgraph=True)(x, weight.requires_grad_())
    assert graphs
    assert not any("mkldnn" in str(node.target) for graph in graphs for node in graph.graph.nodes)
