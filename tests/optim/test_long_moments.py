"""Moments that remember for long follow gradients that become small, in every mode whose state is bf16."""

import math

import pytest
import torch
from torch import nn

from hlat.optim.adamw_bf16 import Bf16AdamW
from hlat.optim.adamw_reference import rounding_of
from tests.support.optim.parameters import plain_held

MODES = ("bf16-sr", "bf16", "bf16-kahan")
COUNT = 1 << 14
LOUD, QUIET = 100, 1500
SPACING = 2.0**-7  # of bf16, as a share of a value, at most


def gradient(step: int) -> float:
    """Of every element: 1, later 0.01; exact in bf16."""
    return 1.0 if step < LOUD else 0.0078125


def descend(mode: str, betas: tuple[float, float]) -> dict[str, torch.Tensor]:
    """The moments after a loud and a quiet phase, float64."""
    net = nn.ParameterList([torch.zeros(COUNT // 64, 64, dtype=torch.bfloat16)])
    held = plain_held(net)
    optimizer = Bf16AdamW([(held, 0.0)], lr=1e-4, betas=betas, eps=1e-8, mode=mode, seed=3)
    for step in range(LOUD + QUIET):
        held[0].parameter.grad = torch.full_like(held[0].parameter, gradient(step))
        optimizer.step()
    return {name: optimizer.state[held[0].parameter][name].double() for name in ("exp_avg", "exp_avg_sq")}


def truth(betas: tuple[float, float]) -> dict[str, torch.Tensor]:
    """The moments of torch's AdamW in float64."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    oracle = torch.optim.AdamW([weight], lr=1e-4, betas=betas)
    for step in range(LOUD + QUIET):
        weight.grad = torch.full_like(weight, gradient(step))
        oracle.step()
    return {name: oracle.state[weight][name] for name in ("exp_avg", "exp_avg_sq")}


def deviation(beta: float, power: int) -> float:
    """Upper bound of the relative standard deviation of a stochastically rounded moment.

    A step takes a moment x to y = x + (1 - beta)(g - x). Of the two neighbours of y, s apart, one is chosen at random
    without moving the mean, with a variance of f (1 - f) s^2 <= |y - x| s, since x is such a value itself. A spacing
    is at most ``SPACING`` of x + (1 - beta) g, which is not below y. So
    var' <= beta^2 var + (1 - beta) SPACING E[(g + x)(x + (1 - beta) g)].
    """
    mean, variance = 0.0, 0.0
    for step in range(LOUD + QUIET):
        g = gradient(step) ** power
        product = g * mean + mean * mean + variance + (1 - beta) * g * (g + mean)
        variance = beta * beta * variance + (1 - beta) * SPACING * product
        mean += (1 - beta) * (g - mean)
    return math.sqrt(variance) / mean


@pytest.mark.parametrize("mode", MODES)
def test_the_second_moment_falls_with_the_gradients_at_beta_0_999(mode):
    """Its mean over elements is that of AdamW in float64 but for five standard deviations of what rounding adds, and
    three roundings to fp32 of each step that is remembered. Rounded to nearest it stays at the loud phase's.
    """
    betas = (0.9, 0.999)
    exact = float(truth(betas)["exp_avg_sq"])
    found = descend(mode, betas)["exp_avg_sq"]
    slack = 5 * deviation(betas[1], 2) / math.sqrt(COUNT) + 3 * 2.0**-24 / (1 - betas[1])
    assert slack < 0.02, "the test sees a step that is wrong by a hundredth"
    assert abs(float(found.mean()) / exact - 1) <= slack


@pytest.mark.parametrize("mode", ["bf16", "bf16-kahan"])
def test_the_first_moment_falls_with_the_gradients_at_beta_0_999(mode):
    betas = (0.999, 0.95)
    exact = float(truth(betas)["exp_avg"])
    found = descend(mode, betas)["exp_avg"]
    assert abs(float(found.mean()) / exact - 1) <= 5 * deviation(betas[0], 1) / math.sqrt(COUNT) + 3 * 2.0**-24 / 1e-3


@pytest.mark.parametrize("mode", ["bf16", "bf16-kahan"])
@pytest.mark.parametrize("beta2", [0.9, 0.95, 1 - 2.0**-5])
def test_to_nearest_the_second_moment_stays_within_the_distance_that_the_documentation_gives(mode, beta2):
    """It stops where a step is half a spacing: at most 2^-8 / (1 - beta2) of itself from the square of the gradient."""
    found = descend(mode, (0.9, beta2))["exp_avg_sq"]
    square = gradient(LOUD) ** 2
    assert bool(((found - square).abs() <= 2.0**-8 / (1 - beta2) * found).all())
    assert rounding_of(mode, (0.9, beta2)) == mode


def test_the_random_bits_of_moments_are_their_own():
    """Seeds, and the modes that round all stochastically, draw other ones."""
    moments = {}
    for mode, seed in (("bf16-kahan", 0), ("bf16-kahan", 1), ("bf16-sr", 0)):
        net = nn.ParameterList([torch.zeros(64, 64, dtype=torch.bfloat16)])
        held = plain_held(net)
        optimizer = Bf16AdamW([(held, 0.0)], lr=1e-4, betas=(0.9, 0.999), eps=1e-8, mode=mode, seed=seed)
        held[0].parameter.grad = torch.full_like(held[0].parameter, 0.7)
        optimizer.step()
        moments[mode, seed] = optimizer.state[held[0].parameter]["exp_avg_sq"]
    first, *others = moments.values()
    assert first.unique().numel() == 2
    assert not any(torch.equal(first, other) for other in others)
