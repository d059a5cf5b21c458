"""Clipping by the optimizer gives the bits of torch's ``clip_grads_with_norm_``, within the update or before it."""

from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hlat.config.sections.training import AdamWConfig
from hlat.optim import Optimizer, build_optimizer
from hlat.runtime.backend.cpu import CpuBackend
from tests.support.optim.parameters import plain_parameters

MODES = ("bf16-sr", "bf16", "bf16-kahan", "mixed", "fp32")


class _Net(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        shapes = ((31, 17), (23,), (300, 301))
        self.weights = nn.ParameterList(torch.randn(shape).to(dtype) for shape in shapes)


def built(mode: str) -> tuple[_Net, Optimizer]:
    torch.manual_seed(0)
    net = _Net(torch.bfloat16 if mode.startswith("bf16") else torch.float32)
    return net, build_optimizer(plain_parameters(net), AdamWConfig(lr=0.01), mode, seed=1)


def draw_gradients(net: _Net, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Draw gradients; return their norm."""
    generator = torch.Generator().manual_seed(seed)
    for weight in net.parameters():
        weight.grad_dtype = dtype
        weight.grad = torch.randn(weight.shape, generator=generator).to(dtype)
    return torch.nn.utils.get_total_norm([weight.grad.float() for weight in net.parameters()])


def bits(net: _Net, optimizer: Optimizer) -> list[torch.Tensor]:
    return [*net.parameters(), *(value for state in optimizer.state.values() for value in state.values())]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wide", [False, True], ids=["gradients as weights", "fp32 gradients"])
def test_a_clipped_step_has_the_bits_of_torchs_clipping_before_the_step(mode, wide):
    """Three steps: scaled down, within the limit, and without clipping, which no earlier scale may reach."""
    (ours, our_optimizer), (plain, plain_optimizer) = built(mode), built(mode)
    dtype = torch.float32 if wide else next(ours.parameters()).dtype
    for step, limit in enumerate((0.7, 1e6, None)):
        norm = draw_gradients(ours, dtype, step)
        draw_gradients(plain, dtype, step)
        if limit is not None:
            our_optimizer.clip_gradients(norm, limit)
            torch.nn.utils.clip_grads_with_norm_(plain.parameters(), limit, norm)
        our_optimizer.step()
        plain_optimizer.step()
        for mine, theirs in zip(bits(ours, our_optimizer), bits(plain, plain_optimizer), strict=True):
            assert torch.equal(mine, theirs)


def test_a_scale_is_forgotten_by_a_step_without_gradients():
    (net, optimizer), (plain, plain_optimizer) = built("bf16-sr"), built("bf16-sr")
    optimizer.clip_gradients(torch.tensor(10.0), 1.0)
    optimizer.step()
    for each, stepping in ((net, optimizer), (plain, plain_optimizer)):
        draw_gradients(each, torch.bfloat16, 0)
        stepping.step()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_an_update_that_clips_does_not_write_gradients(mode):
    net, optimizer = built(mode)
    norm = draw_gradients(net, next(net.parameters()).dtype, 0)
    before = [weight.grad.clone() for weight in net.parameters()]
    optimizer.clip_gradients(norm, 1.0)
    optimizer.step()
    kept = [torch.equal(weight.grad, saved) for weight, saved in zip(net.parameters(), before, strict=True)]
    assert kept == [mode.startswith("bf16")] * len(before)


class _Operators(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_the_fused_update_scales_the_gradients_where_the_device_says_so():
    """The kernel divides by the rounded reciprocal of the scale: two roundings, where a product has one.

    It leaves the scaled gradients behind. With these the update has the bits of one without clipping, and the next
    step is not scaled.
    """
    (ours, our_optimizer), (plain, plain_optimizer) = built("mixed"), built("mixed")
    for step, limit in enumerate((1e6, 0.7, None)):
        norm = draw_gradients(ours, torch.float32, step)
        exact = [
            weight.grad.double() * min(1.0, limit / (float(norm) + 1e-6) if limit else 1.0) for weight in ours.weights
        ]
        with patch.object(CpuBackend, "scales_in_adamw", True), _Operators() as operators:
            if limit is not None:
                our_optimizer.clip_gradients(norm, limit)
            our_optimizer.step()
        assert "_foreach_mul_" not in operators.names and "_fused_adamw_" in operators.names
        for mine, theirs, wanted in zip(ours.weights, plain.weights, exact, strict=True):
            # the scale has three roundings of its own: sum, quotient, reciprocal
            assert bool(((mine.grad - wanted).abs() <= 4 * 2.0**-24 * wanted.abs()).all())
            theirs.grad = mine.grad.clone()
        plain_optimizer.step()
        assert all(
            torch.equal(mine, theirs)
            for mine, theirs in zip(bits(ours, our_optimizer), bits(plain, plain_optimizer), strict=True)
        )
