"""Hand-written backward passes are the derivatives of their forward passes, and dtypes are as documented."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from hlat.model.pointwise import CLAMPED_SWIGLU, GELU_TANH, gated, gated_fused, rms_norm, rotate


def leaf(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def test_rms_norm_matches_torch_and_its_numerical_derivative() -> None:
    x, weight = leaf(2, 3, 8), leaf(8)
    torch.testing.assert_close(rms_norm(x, weight, 1e-3), F.rms_norm(x, (8,), weight, 1e-3), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda a, w: rms_norm(a, w, 1e-3), (x, weight))


def test_rotate_is_a_rotation_and_matches_its_numerical_derivative() -> None:
    angle = torch.randn(5, 1, 4)
    cos, sin = angle.cos(), angle.sin()
    x = leaf(2, 5, 3, 8)
    rotated = rotate(x, cos, sin)
    # cos and sin are fp32, so cos^2 + sin^2 = 1 up to 2 roundings of 2^-24 each
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1), rtol=4 * 2.0**-24, atol=0)
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.complex(cos.double(), sin.double())
    torch.testing.assert_close(rotated, torch.cat([pairs.real, pairs.imag], -1), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda a: rotate(a, cos.double(), sin.double()), (x,))
    wider = leaf(2, 5, 3, 14)
    found = rotate(wider, cos, sin)
    assert torch.equal(found, torch.cat((rotate(wider[..., :8], cos, sin), wider[..., 8:]), dim=-1))
    assert torch.autograd.gradcheck(lambda a: rotate(a, cos.double(), sin.double()), (wider,))


def test_gelu_and_an_offset_of_the_norms_weight_match_torch() -> None:
    gate_up, weight = leaf(3, 2, 5), leaf(5)
    gate, up = gate_up.unbind(-2)
    expected = F.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(gated_fused(gate_up, activation=GELU_TANH), expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: gated_fused(x, activation=GELU_TANH), (gate_up,))
    assert torch.autograd.gradcheck(lambda a, b: gated(a, b, activation=GELU_TANH), (leaf(2, 5), leaf(2, 5)))
    expected = F.rms_norm(gate, (5,), 1 + weight, 1e-5)
    torch.testing.assert_close(rms_norm(gate, weight, 1e-5, 1.0), expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5, 1.0), (leaf(2, 3, 5), weight))


def test_clamped_swiglu_is_that_of_transformers() -> None:
    gate_up = (leaf(40, 2, 5).detach() * 6).requires_grad_()
    gate, up = gate_up.detach().unbind(-2)
    assert min((gate > 7).sum(), (up > 7).sum(), (up < -7).sum()) > 3
    config = SimpleNamespace(
        intermediate_size=5, num_local_experts=1, hidden_size=2, swiglu_alpha=1.702, swiglu_limit=7.0
    )
    experts = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss").GptOssExperts(config)
    expected = experts._apply_gate(torch.stack((gate, up), dim=-1).flatten(-2))
    for found in (gated_fused(gate_up, activation=CLAMPED_SWIGLU), gated(gate, up, activation=CLAMPED_SWIGLU)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: gated_fused(x, activation=CLAMPED_SWIGLU), (gate_up,))


def test_swiglu_matches_torch_and_its_numerical_derivative() -> None:
    gate_up = leaf(2, 3, 2, 5)
    gate, up = gate_up.unbind(-2)
    torch.testing.assert_close(gated_fused(gate_up), F.silu(gate) * up, rtol=1e-12, atol=1e-12)
    assert torch.equal(gated_fused(gate_up), gated(gate, up))
    assert torch.autograd.gradcheck(gated_fused, (gate_up,))
    assert torch.autograd.gradcheck(gated, (leaf(2, 5), leaf(3, 5)[:2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_operation_returns_the_dtype_of_its_input(dtype: torch.dtype) -> None:
    x, weight = leaf(2, 4, 8).detach().to(dtype).requires_grad_(), leaf(8).detach().to(dtype).requires_grad_()
    angle = torch.randn(4, 4)
    outputs = [rms_norm(x, weight, 1e-5), rotate(x, angle.cos(), angle.sin()), gated(x, x)]
    assert [out.dtype for out in outputs] == [dtype] * 3
    sum(out.float().sum() for out in outputs).backward()
    assert x.grad.dtype == dtype


def test_norm_statistics_of_bf16_are_fp32() -> None:
    """The sum of 2,048 squares of 1 + 2^-7: in bf16 it would stop at 256."""
    x = torch.full((1, 2048), 1 + 2.0**-7, dtype=torch.bfloat16)
    out = rms_norm(x, torch.ones(2048), 1e-5)
    assert torch.equal(out, torch.ones_like(out))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_norm_follows_the_dtype_of_its_input(dtype: torch.dtype) -> None:
    assert rms_norm(torch.randn(2, 8, dtype=dtype), torch.ones(8), 1e-5).dtype == dtype
