"""AdamW over bf16 weights: the published formula, no stalling, and the same bits in any share of a model."""

import functools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hlat.config.sections import ModelConfig, OptimizerConfig
from hlat.model import LocalParameter, ModelShard, local
from hlat.optim import build_optimizer, set_learning_rate, state_tensors
from hlat.optim.adamw_bf16 import Bf16AdamW
from hlat.optim.element_addresses import address_elements
from tests.support.optim.parameters import (
    Tensors,
    canonical,
    config_of,
    fill_gradients,
    fill_weights,
    plain_held,
    share,
)

MODES = ("bf16-sr", "bf16", "bf16-kahan")
MOMENTS = ("exp_avg", "exp_avg_sq")


class _Net(nn.Module):
    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(shape).bfloat16() for shape in shapes)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gradient", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("eps", [1e-8, 0.03])
def test_each_step_is_that_of_torch_in_float64_but_for_the_rounding(mode, gradient, eps):
    """Each step is repeated by torch.optim.AdamW in float64 from the same state.

    A value is stored with an error of half a bf16 spacing to nearest, of a whole one stochastically: 2^-8 and 2^-7 of
    it. With compensation the error is half a spacing of the compensation, itself half a spacing: 2^-16; and decay sees
    the stored weight, which is off by 2^-8. The arithmetic before it has some ten roundings to fp32, of 2^-24 of
    the numbers that are added: 16 of them are allowed for.
    """
    torch.manual_seed(0)
    net = _Net((31, 17), (23,), (1, 5))
    held = plain_held(net)
    betas, decay = (0.9, 0.95), 0.1
    config = OptimizerConfig(lr=1.0, betas=betas, eps=eps, weight_decay=decay, decay_norms=True)
    optimizer = build_optimizer(held, config, mode, seed=1)
    spacing = {"bf16-sr": 2.0**-7, "bf16": 2.0**-8, "bf16-kahan": 2.0**-8}[mode]
    for step in range(1, 6):
        rate = 0.01 / step
        before = {name: [t.double() for t in tensors] for name, tensors in state_tensors(optimizer, held).items()}
        weights = [one.tensor.double() for one in held]
        if mode == "bf16-kahan":
            weights = [weight + lost for weight, lost in zip(weights, before["compensation"], strict=True)]
        for one in held:
            one.parameter.grad_dtype = gradient
            one.parameter.grad = (10.0 ** (-3 * torch.rand(())) * torch.randn(one.tensor.shape)).to(gradient)
        set_learning_rate(optimizer, rate)
        optimizer.step()
        for index, one in enumerate(held):
            exact = nn.Parameter(weights[index].clone())
            exact.grad = one.gradient.double()
            oracle = torch.optim.AdamW([exact], lr=rate, betas=betas, eps=eps, weight_decay=decay)
            oracle.state[exact] = {name: before[name][index].clone() for name in MOMENTS}
            oracle.state[exact]["step"] = torch.tensor(float(step - 1))
            oracle.step()
            after = {name: tensors[index].double() for name, tensors in state_tensors(optimizer, held).items()}
            m, v = (oracle.state[exact][name] for name in MOMENTS)
            added = before["exp_avg"][index].abs() + exact.grad.abs()
            fp32 = 16 * 2.0**-24
            assert bool(((after["exp_avg"] - m).abs() <= spacing * m.abs() + fp32 * added).all())
            assert bool(((after["exp_avg_sq"] - v).abs() <= (spacing + fp32) * v).all())
            direction = added / (1 - betas[0] ** step) / ((v / (1 - betas[1] ** step)).sqrt() + eps)
            slack = fp32 * (weights[index].abs() + rate * direction)
            stored = one.tensor.double() + after.get("compensation", 0.0)
            rounding = spacing * exact.detach().abs()
            if mode == "bf16-kahan":
                rounding = 2.0**-8 * (rounding + rate * decay * weights[index].abs())
            assert bool(((stored - exact.detach()).abs() <= rounding * (1 + 2.0**-7) + slack).all())


def _descend(mode: str, rate: float, steps: int, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights of 1 under a constant gradient of 1, without memory (both betas 0): an update is the rate exactly."""
    net = _Net((count // 256, 256))
    (held,) = plain_held(net)
    optimizer = Bf16AdamW([([held], 0.0)], lr=rate, betas=(0.0, 0.0), eps=1e-12, mode=mode, seed=0)
    with torch.no_grad():
        held.tensor.fill_(1.0)
    for _ in range(steps):
        held.parameter.grad = torch.ones_like(held.parameter)
        optimizer.step()
    return held.tensor.double(), optimizer.state[held.parameter].get("compensation")


def test_updates_below_half_a_spacing_stall_to_nearest_but_neither_stochastically_nor_with_compensation():
    """Below 1 the spacing d is 2^-8; updates are 2^-12, of which 16 make a spacing and 8 a half.

    Stochastically a weight moves by d with probability p = 1/16 in a step. Over 2^16 weights and 16 steps the mean
    moves by 16 updates, with a standard deviation of sqrt(16 p (1 - p) / 2^16) d. With compensation the sum of weight
    and compensation is exact: it never has more than the 8 bits between 2^-12 and a spacing.
    """
    rate, steps, count = 2.0**-12, 16, 1 << 16
    stalled, _ = _descend("bf16", rate, steps, 256)
    assert bool((stalled == 1.0).all())
    moved, _ = _descend("bf16-sr", rate, steps, count)
    sigma = math.sqrt(steps * (1 / 16) * (15 / 16) / count) * 2.0**-8
    assert abs(float(moved.mean()) - (1 - steps * rate)) < 5 * sigma
    assert 5 * sigma < 0.05 * steps * rate, "the test sees a bias of a twentieth"
    followed, compensation = _descend("bf16-kahan", rate, 300, 256)
    assert compensation is not None
    assert bool((followed + compensation.double() == 1 - 300 * rate).all())


def _train(held: list[LocalParameter], mode: str, steps: int = 2) -> torch.optim.Optimizer:
    fill_weights(held)
    optimizer = build_optimizer(held, OptimizerConfig(lr=0.01, weight_decay=0.1), mode, seed=5)
    for step in range(steps):
        fill_gradients(held, step)
        set_learning_rate(optimizer, 0.01 / (1 + step))
        optimizer.step()
    return optimizer


def _trained(config: ModelConfig, tensor_count: int, cuts: list[float], mode: str) -> dict[str, Tensors]:
    """Weights and states after two steps of all shares of a model, as canonical tensors."""
    found: dict[str, Tensors] = {}
    for index in range(tensor_count):
        for held in share(config, ModelShard(index, tensor_count), cuts):
            optimizer = _train(held, mode)
            canonical(config, held, lambda one: one.tensor, found.setdefault("weight", {}))
            for name in optimizer.state_names:
                state = optimizer.state
                canonical(
                    config,
                    held,
                    lambda one, name=name, state=state: local(state[one.parameter][name]),
                    found.setdefault(name, {}),
                )
    return found


@functools.cache
def _whole(mode: str) -> dict[str, Tensors]:
    return _trained(config_of(coalesce=False), 1, [], mode)


@settings(max_examples=12)
@given(
    st.sampled_from([1, 2, 4]),
    st.lists(st.floats(0, 1), max_size=3),
    st.booleans(),
    st.sampled_from(MODES),
)
def test_every_share_makes_the_bits_of_the_whole(tensor_count, cuts, coalesce, mode):
    """Tensor-parallel shares, of which several may hold the same key heads and all hold the norms; rows cut anywhere,
    also so that none is left; query, key and value, gate and up fused or not.
    """
    found = _trained(config_of(coalesce=coalesce), tensor_count, cuts, mode)
    for kind, tensors in _whole(mode).items():
        assert tensors.keys() == found[kind].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, found[kind][name]), (kind, name)


def test_seed_step_and_name_change_the_bits():
    """Weights of the same values under the same gradients: nothing but the address tells them apart."""

    def weights(seed: int, steps_before: int) -> list[torch.Tensor]:
        net = _Net((16, 16), (16, 16))
        held = plain_held(net)
        optimizer = build_optimizer(held, OptimizerConfig(lr=0.01, betas=(0.0, 0.0)), "bf16-sr", seed)
        with torch.no_grad():
            for one in held:
                one.tensor.fill_(1.0)
                one.parameter.grad = torch.ones_like(one.parameter)
                optimizer.init_state(one.parameter)
                optimizer.state[one.parameter]["step"].fill_(steps_before)
        optimizer.step()
        return [one.tensor.clone() for one in held]

    first, second = weights(0, 0)
    assert torch.equal(first, weights(0, 0)[0])
    for other in (second, weights(1, 0)[0], weights(0, 1)[0]):
        assert not torch.equal(first, other)


def test_what_has_no_gradient_is_not_stepped_and_counts_its_own_steps():
    """The second parameter, stepped from the third step on, ends as one that was stepped alone."""

    def stepped(gradients: list[tuple[int, ...]]) -> tuple[list[torch.Tensor], list[float]]:
        """Step once for each entry, with gradients for the parameters that it names."""
        torch.manual_seed(0)
        held = plain_held(_Net((4, 4), (6, 2)))
        optimizer = build_optimizer(held, OptimizerConfig(lr=0.1), "bf16-sr")
        for named in gradients:
            for index, one in enumerate(held):
                one.parameter.grad = torch.full_like(one.parameter, 1 + index) if index in named else None
            optimizer.step()
        counts = [float(optimizer.state[one.parameter]["step"]) for one in held]
        return [one.tensor.clone() for one in held], counts

    untouched, counts = stepped([()])
    assert counts == [0.0, 0.0]
    weights, counts = stepped([(0,), (0,), (0, 1), (1,)])
    assert counts == [3.0, 2.0]
    alone, counts = stepped([(1,), (), (1,)])
    assert counts == [0.0, 2.0]
    assert torch.equal(weights[1], alone[1]) and torch.equal(alone[0], untouched[0])
    assert not torch.equal(weights[0], untouched[0])


def test_a_closure_is_called_with_gradients_on_and_its_loss_is_handed_on():
    """As torch's optimizers do, also where nothing has a gradient in the end."""
    held = plain_held(_Net((4, 4)))
    optimizer = build_optimizer(held, OptimizerConfig(lr=0.1), "bf16-sr")
    before = held[0].tensor.clone()

    def closure() -> float:
        assert torch.is_grad_enabled()
        return 1.5

    assert optimizer.step(closure) == 1.5
    assert torch.equal(held[0].tensor, before)
    held[0].parameter.grad = torch.ones_like(held[0].parameter)
    assert optimizer.step(closure) == 1.5
    assert not torch.equal(held[0].tensor, before)


def test_a_vector_is_as_few_lines_as_its_names_allow():
    """A table has three numbers for each line: for each element there would be more of it than of the weights."""
    held = {one.name: one for one in share(config_of(), ModelShard())[0]}
    norm, bias = (held[f"layers.0.attention{name}"] for name in ("_norm.weight", ".qkv.bias"))
    whole, fused = address_elements(norm), address_elements(bias)
    assert (whole.count, whole.length) == (1, 24)
    # each of two groups has 2 query heads, a key and a value head of 6 rows
    assert (fused.count, fused.length) == (8, 6)
    nothing = replace(norm, parameter=nn.Parameter(norm.tensor[:0].clone()))
    assert (address_elements(nothing).count, address_elements(nothing).length) == (0, 1)
