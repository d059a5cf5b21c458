"""Moments with large betas follow gradients that become small, in every mode with bf16 state."""

import math

import pytest
import torch
from torch import nn

from hlat.optim.adamw import Bf16AdamW
from hlat.optim.adamw_reference import rounding_of
from tests.support.optim.parameters import plain_parameters

MODES = ("bf16-sr", "bf16", "bf16-kahan")
KAHAN = pytest.param("bf16-kahan", marks=pytest.mark.slow)  # moments are rounded as in bf16
COUNT = 1 << 14
OPTIONS = {"lr": 1e-4, "eps": 1e-8, "weight_decay": 0.0}
FIRST, SECOND = 100, 1500
SPACING = 2.0**-7  # maximum spacing of bf16, relative to a value


def gradient(step: int) -> float:
    """Gradient of every element: 1, later about 0.01; exact in bf16."""
    return 1.0 if step < FIRST else 0.0078125


def descend(mode: str, betas: tuple[float, float]) -> dict[str, torch.Tensor]:
    """Compute the moments after a phase of large and one of small gradients, as float64."""
    net = nn.ParameterList([torch.zeros(COUNT // 64, 64, dtype=torch.bfloat16)])
    parameters = plain_parameters(net)
    optimizer = Bf16AdamW([(parameters, OPTIONS)], betas=betas, mode=mode, seed=3)
    for step in range(FIRST + SECOND):
        parameters[0].parameter.grad = torch.full_like(parameters[0].parameter, gradient(step))
        optimizer.step()
    return {name: optimizer.state[parameters[0].parameter][name].double() for name in ("exp_avg", "exp_avg_sq")}


def truth(betas: tuple[float, float]) -> dict[str, torch.Tensor]:
    """Compute the moments of torch's AdamW in float64."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    oracle = torch.optim.AdamW([weight], lr=1e-4, betas=betas)
    for step in range(FIRST + SECOND):
        weight.grad = torch.full_like(weight, gradient(step))
        oracle.step()
    return {name: oracle.state[weight][name] for name in ("exp_avg", "exp_avg_sq")}


def deviation(beta: float, power: int) -> float:
    """Upper bound of the relative standard deviation of a stochastically rounded moment.

    A step changes a moment x to y = x + (1 - beta)(g - x). One of the two neighbours of y, s apart, is chosen at random
    with mean y and variance f (1 - f) s^2 <= |y - x| s, since x itself is representable. A spacing is at most
    ``SPACING`` times x + (1 - beta) g, which is not below y. So
    var' <= beta^2 var + (1 - beta) SPACING E[(g + x)(x + (1 - beta) g)].
    """
    mean, variance = 0.0, 0.0
    for step in range(FIRST + SECOND):
        g = gradient(step) ** power
        product = g * mean + mean * mean + variance + (1 - beta) * g * (g + mean)
        variance = beta * beta * variance + (1 - beta) * SPACING * product
        mean += (1 - beta) * (g - mean)
    return math.sqrt(variance) / mean


@pytest.mark.parametrize("mode", MODES)
def test_the_second_moment_decreases_with_the_gradients_at_beta_0_999(mode):
    """Its mean over elements equals that of AdamW in float64, up to rounding.

    The bound is five standard deviations of the rounding noise, and three roundings to fp32 of each step that the
    moment remembers. Rounded to nearest, it would stay at the value of the first phase.
    """
    betas = (0.9, 0.999)
    exact = float(truth(betas)["exp_avg_sq"])
    found = descend(mode, betas)["exp_avg_sq"]
    slack = 5 * deviation(betas[1], 2) / math.sqrt(COUNT) + 3 * 2.0**-24 / (1 - betas[1])
    assert slack < 0.02, "the test would detect an error of two hundredths"
    assert abs(float(found.mean()) / exact - 1) <= slack


@pytest.mark.parametrize("mode", ["bf16", KAHAN])
def test_the_first_moment_decreases_with_the_gradients_at_beta_0_999(mode):
    betas = (0.999, 0.95)
    exact = float(truth(betas)["exp_avg"])
    found = descend(mode, betas)["exp_avg"]
    assert abs(float(found.mean()) / exact - 1) <= 5 * deviation(betas[0], 1) / math.sqrt(COUNT) + 3 * 2.0**-24 / 1e-3


@pytest.mark.parametrize("mode", ["bf16", KAHAN])
@pytest.mark.parametrize("beta2", [0.9, 0.95, 1 - 2.0**-5])
def test_rounded_to_nearest_the_second_moment_has_at_most_the_documented_error(mode, beta2):
    """It stops changing when a step is half a spacing: its relative error is then at most 2^-8 / (1 - beta2)."""
    found = descend(mode, (0.9, beta2))["exp_avg_sq"]
    square = gradient(FIRST) ** 2
    assert bool(((found - square).abs() <= 2.0**-8 / (1 - beta2) * found).all())
    assert rounding_of(mode, (0.9, beta2)) == mode


def test_moments_have_their_own_random_bits():
    """Other seeds, and bf16-sr, draw other bits."""
    moments = {}
    for mode, seed in (("bf16-kahan", 0), ("bf16-kahan", 1), ("bf16-sr", 0)):
        net = nn.ParameterList([torch.zeros(64, 64, dtype=torch.bfloat16)])
        parameters = plain_parameters(net)
        optimizer = Bf16AdamW([(parameters, OPTIONS)], betas=(0.9, 0.999), mode=mode, seed=seed)
        parameters[0].parameter.grad = torch.full_like(parameters[0].parameter, 0.7)
        optimizer.step()
        moments[mode, seed] = optimizer.state[parameters[0].parameter]["exp_avg_sq"]
    first, *others = moments.values()
    assert first.unique().numel() == 2
    assert not any(torch.equal(first, other) for other in others)
