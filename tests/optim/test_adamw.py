"""Optimizer: learning-rate schedules follow their formulas, AdamW the published algorithm, weight decay the recipe."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hlat.config.sections.training import AdamWConfig, ScheduleConfig
from hlat.optim import build_optimizer, learning_rate
from tests.support.optim.parameters import plain_parameters


def rates(kind: str, horizon: int = 1000, warmup: int = 100, **more: float) -> list[float]:
    config = ScheduleConfig(kind=kind, warmup_steps=warmup, **more)
    return [learning_rate(config, peak=1.0, horizon=horizon, step=s) for s in range(1, horizon + 101)]


@pytest.mark.parametrize("kind", ["cosine", "cosine-clipped", "constant", "wsd"])
def test_the_rate_rises_to_the_peak_in_warm_up_and_never_rises_afterwards(kind):
    values = rates(kind)
    assert values[0] == pytest.approx(0.01, rel=1e-15) and values[99] == 1.0
    assert all(a < b for a, b in pairwise(values[:100]))
    assert all(a >= b for a, b in pairwise(values[99:]))


def test_cosine_reaches_its_minimum_at_the_horizon_and_stays_there():
    values = rates("cosine", min_ratio=0.1)
    assert values[549] == pytest.approx(0.55, rel=1e-12), "half way between peak and minimum"
    assert values[999] == pytest.approx(0.1, rel=1e-12) and values[-1] == values[999]


def test_hlat_cosine_is_clipped_at_step_398_thousand_of_half_a_million():
    """The paper's schedule reaches its minimum at about step 398 k (1.67 T tokens), not at the horizon."""
    config = ScheduleConfig(kind="cosine-clipped", warmup_steps=2000, min_ratio=0.1)
    rate = [learning_rate(config, peak=3e-4, horizon=500_000, step=s) for s in (397_990, 398_000, 429_000)]
    assert rate[0] > rate[1] == rate[2] == pytest.approx(3e-5, rel=1e-12)
    wave = 0.5 * (1 + math.cos(math.pi * (250_000 - 2000) / 498_000))
    assert learning_rate(config, peak=3e-4, horizon=500_000, step=250_000) == pytest.approx(3e-4 * wave, rel=1e-12)


def test_wsd_is_flat_then_linear():
    values = rates("wsd", decay_fraction=0.2, min_ratio=0.0)
    assert set(values[99:800]) == {1.0}
    assert values[899] == pytest.approx(0.5, rel=1e-12) and values[999] == 0.0


@given(st.sampled_from(["cosine", "cosine-clipped", "constant", "wsd"]), st.integers(0, 50), st.integers(51, 500))
def test_a_rate_lies_between_zero_and_the_peak(kind, warmup, horizon):
    config = ScheduleConfig(kind=kind, warmup_steps=warmup, min_ratio=0.1)
    values = [learning_rate(config, peak=3e-4, horizon=horizon, step=s) for s in range(1, horizon + 2)]
    assert all(0 < v <= 3e-4 * (1 + 1e-15) for v in values)
    assert all(v >= 3e-5 * (1 - 1e-12) for v in values[warmup:])


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.linear = nn.Linear(5, 3, bias=True)
        self.norm = nn.RMSNorm(3)


@pytest.mark.parametrize("decay_norms", [False, True])
def test_decay_applies_to_matrices_and_to_vectors_only_with_decay_norms(decay_norms):
    net = _Net()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    config = AdamWConfig(lr=0.1, weight_decay=0.5, decay_norms=decay_norms)
    build_optimizer(plain_parameters(net), config).step()
    for name, p in net.named_parameters():
        decayed = p.ndim >= 2 or decay_norms
        expected = before[name] * (1 - 0.1 * 0.5) if decayed else before[name]
        assert torch.equal(p, expected), name


@pytest.mark.parametrize("eps", [1e-8, 0.03])
def test_adamw_follows_the_published_formula(eps):
    """Loshchilov and Hutter 2019, algorithm 2, in float64, compared with the fused kernel in float64."""
    torch.manual_seed(0)
    net = _Net().double()
    reference = {n: p.detach().clone() for n, p in net.named_parameters()}
    m = {n: torch.zeros_like(p) for n, p in reference.items()}
    v = {n: torch.zeros_like(p) for n, p in reference.items()}
    config = AdamWConfig(lr=0.01, betas=(0.9, 0.95), eps=eps, weight_decay=0.1)
    optimizer = build_optimizer(plain_parameters(net), config)
    for step in range(1, 6):
        for name, p in net.named_parameters():
            p.grad = torch.randn_like(p)
            g, decay = p.grad, 0.1 if p.ndim >= 2 else 0.0
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.95 * v[name] + 0.05 * g * g
            direction = (m[name] / (1 - 0.9**step)) / ((v[name] / (1 - 0.95**step)).sqrt() + eps)
            reference[name] = reference[name] * (1 - 0.01 * decay) - 0.01 * direction
        optimizer.step()
    for name, p in net.named_parameters():
        # About ten operations per step, five steps, values of order 1: 50 roundings of 1.1e-16, with a margin of 20.
        torch.testing.assert_close(p.detach(), reference[name], rtol=1e-13, atol=1e-13)


def test_the_learning_rate_is_set_for_every_group():
    net = _Net()
    optimizer = build_optimizer(plain_parameters(net), AdamWConfig(lr=0.1, betas=(0.0, 0.0), weight_decay=0.5))
    assert len(optimizer.param_groups) == 2
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.set_learning_rate(0.0)
    optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())


def test_the_fused_kernel_is_used_if_the_device_has_it():
    """It takes one pass over memory instead of ten. Devices without it, such as meta, use the plain implementation."""
    here, elsewhere = _Net(), _Net().to("meta")
    assert build_optimizer(plain_parameters(here), AdamWConfig()).defaults["fused"] is True
    assert build_optimizer(plain_parameters(elsewhere), AdamWConfig()).defaults["fused"] is False
