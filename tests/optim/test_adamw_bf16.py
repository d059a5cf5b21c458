"""AdamW over bf16 weights follows the published formula, does not stall, and gives the same bits in any sharding."""

import functools
import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hlat.config.sections.model import ModelConfig
from hlat.config.sections.training import AdamWConfig
from hlat.model import LocalParameter, ModelShard, local
from hlat.optim import Optimizer, build_optimizer
from hlat.optim.adamw import Bf16AdamW
from hlat.optim.adamw_reference import address_elements
from tests.support.optim.parameters import (
    Tensors,
    canonical,
    config_of,
    fill_gradients,
    fill_weights,
    plain_parameters,
    shard_model,
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
def test_each_step_equals_torchs_in_float64_up_to_rounding(mode, gradient, eps):
    """Each step is repeated by torch.optim.AdamW in float64 from the same state.

    A stored value has an error of half a bf16 spacing with rounding to nearest, of a full spacing with stochastic
    rounding: relative to the value 2^-8 and 2^-7. With compensation the error is half a spacing of the compensation,
    itself half a spacing: 2^-16; and decay uses the stored weight, which has an error of 2^-8. The arithmetic before
    has about ten roundings to fp32, each 2^-24 of the numbers that are added; the bound allows 16.
    """
    torch.manual_seed(0)
    net = _Net((31, 17), (23,), (1, 5))
    parameters = plain_parameters(net)
    betas, decay = (0.9, 0.95), 0.1
    config = AdamWConfig(lr=1.0, betas=betas, eps=eps, weight_decay=decay, decay_norms=True)
    optimizer = build_optimizer(parameters, config, mode, seed=1)
    spacing = {"bf16-sr": 2.0**-7, "bf16": 2.0**-8, "bf16-kahan": 2.0**-8}[mode]
    for step in range(1, 6):
        rate = 0.01 / step
        before = {name: [t.double() for t in tensors] for name, tensors in optimizer.state_tensors(parameters).items()}
        weights = [each.tensor.double() for each in parameters]
        if mode == "bf16-kahan":
            weights = [weight + lost for weight, lost in zip(weights, before["compensation"], strict=True)]
        for each in parameters:
            each.parameter.grad_dtype = gradient
            each.parameter.grad = (10.0 ** (-3 * torch.rand(())) * torch.randn(each.tensor.shape)).to(gradient)
        optimizer.set_learning_rate(rate)
        optimizer.step()
        for index, each in enumerate(parameters):
            exact = nn.Parameter(weights[index].clone())
            exact.grad = each.gradient.double()
            oracle = torch.optim.AdamW([exact], lr=rate, betas=betas, eps=eps, weight_decay=decay)
            oracle.state[exact] = {name: before[name][index].clone() for name in MOMENTS}
            oracle.state[exact]["step"] = torch.tensor(float(step - 1))
            oracle.step()
            after = {name: tensors[index].double() for name, tensors in optimizer.state_tensors(parameters).items()}
            m, v = (oracle.state[exact][name] for name in MOMENTS)
            added = before["exp_avg"][index].abs() + exact.grad.abs()
            fp32 = 16 * 2.0**-24
            assert bool(((after["exp_avg"] - m).abs() <= spacing * m.abs() + fp32 * added).all())
            assert bool(((after["exp_avg_sq"] - v).abs() <= (spacing + fp32) * v).all())
            direction = added / (1 - betas[0] ** step) / ((v / (1 - betas[1] ** step)).sqrt() + eps)
            slack = fp32 * (weights[index].abs() + rate * direction)
            stored = each.tensor.double() + after.get("compensation", 0.0)
            rounding = spacing * exact.detach().abs()
            if mode == "bf16-kahan":
                rounding = 2.0**-8 * (rounding + rate * decay * weights[index].abs())
            assert bool(((stored - exact.detach()).abs() <= rounding * (1 + 2.0**-7) + slack).all())


def _descend(mode: str, rate: float, steps: int, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Step weights of 1 with a constant gradient of 1 and both betas 0: an update is exactly the learning rate."""
    net = _Net((count // 256, 256))
    (parameter,) = plain_parameters(net)
    options = {"lr": rate, "eps": 1e-12, "weight_decay": 0.0}
    optimizer = Bf16AdamW([([parameter], options)], betas=(0.0, 0.0), mode=mode, seed=0)
    with torch.no_grad():
        parameter.tensor.fill_(1.0)
    for _ in range(steps):
        parameter.parameter.grad = torch.ones_like(parameter.parameter)
        optimizer.step()
    return parameter.tensor.double(), optimizer.state[parameter.parameter].get("compensation")


def test_updates_below_half_a_spacing_are_lost_only_with_rounding_to_nearest():
    """Below 1 the spacing d is 2^-8; updates are 2^-12, a sixteenth of a spacing.

    With stochastic rounding a weight changes by d with probability p = 1/16 per step. Over 2^16 weights and 16 steps
    the mean changes by 16 updates, with a standard deviation of sqrt(16 p (1 - p) / 2^16) d. With compensation, the sum
    of weight and compensation is exact: the compensation never needs more than the 8 bits between 2^-12 and a spacing.
    """
    rate, steps, count = 2.0**-12, 16, 1 << 16
    stalled, _ = _descend("bf16", rate, steps, 256)
    assert bool((stalled == 1.0).all())
    stochastic, _ = _descend("bf16-sr", rate, steps, count)
    sigma = math.sqrt(steps * (1 / 16) * (15 / 16) / count) * 2.0**-8
    assert abs(float(stochastic.mean()) - (1 - steps * rate)) < 5 * sigma
    assert 5 * sigma < 0.05 * steps * rate, "the test would detect a bias of a twentieth"
    compensated, compensation = _descend("bf16-kahan", rate, 300, 256)
    assert compensation is not None
    assert bool((compensated + compensation.double() == 1 - 300 * rate).all())


def _train(parameters: list[LocalParameter], mode: str, steps: int = 2) -> Optimizer:
    fill_weights(parameters)
    optimizer = build_optimizer(parameters, AdamWConfig(lr=0.01, weight_decay=0.1), mode, seed=5)
    for step in range(steps):
        fill_gradients(parameters, step)
        optimizer.set_learning_rate(0.01 / (1 + step))
        optimizer.step()
    return optimizer


def _trained(config: ModelConfig, tensor_count: int, cuts: list[float], mode: str) -> dict[str, Tensors]:
    """Train all shards of a model for two steps; return weights and states as canonical tensors."""
    found: dict[str, Tensors] = {}
    for index in range(tensor_count):
        for parameters in shard_model(config, ModelShard(index, tensor_count), cuts):
            optimizer = _train(parameters, mode)
            canonical(config, parameters, lambda each: each.tensor, found.setdefault("weight", {}))
            for name in optimizer.state_names:
                state = optimizer.state
                canonical(
                    config,
                    parameters,
                    lambda each, name=name, state=state: local(state[each.parameter][name]),
                    found.setdefault(name, {}),
                )
    return found


@functools.cache
def _complete(mode: str) -> dict[str, Tensors]:
    return _trained(config_of(coalesce=False), 1, [], mode)


@settings(max_examples=12)
@given(
    st.sampled_from([1, 2, 4]),
    st.lists(st.floats(0, 1), max_size=3),
    st.booleans(),
    st.sampled_from(MODES),
)
def test_any_sharding_gives_the_bits_of_the_complete_model(tensor_count, cuts, coalesce, mode):
    """Shard in many ways: tensor-parallel, by rows, and with fused or separate matrices.

    Several tensor-parallel shards may have copies of the same kv heads, and all have the norms. Rows are split
    anywhere; a shard may have none.
    """
    found = _trained(config_of(coalesce=coalesce), tensor_count, cuts, mode)
    for kind, tensors in _complete(mode).items():
        assert tensors.keys() == found[kind].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, found[kind][name]), (kind, name)


def test_seed_step_and_name_change_the_bits():
    """Two parameters have the same values and gradients: only the addresses of their elements differ."""

    def weights(seed: int, steps_before: int) -> list[torch.Tensor]:
        net = _Net((16, 16), (16, 16))
        parameters = plain_parameters(net)
        optimizer = build_optimizer(parameters, AdamWConfig(lr=0.01, betas=(0.0, 0.0)), "bf16-sr", seed)
        with torch.no_grad():
            for each in parameters:
                each.tensor.fill_(1.0)
                each.parameter.grad = torch.ones_like(each.parameter)
                optimizer.init_state(each.parameter)
                optimizer.state[each.parameter]["step"].fill_(steps_before)
        optimizer.step()
        return [each.tensor.clone() for each in parameters]

    first, second = weights(0, 0)
    assert torch.equal(first, weights(0, 0)[0])
    for other in (second, weights(1, 0)[0], weights(0, 1)[0]):
        assert not torch.equal(first, other)


def test_a_parameter_without_gradient_is_not_updated_and_counts_its_own_steps():
    """The second parameter, updated from the third step on, ends like one that was updated alone."""

    def stepped(gradients: list[tuple[int, ...]]) -> tuple[list[torch.Tensor], list[float]]:
        """Take a step for each entry, with gradients for the parameters at its indices."""
        torch.manual_seed(0)
        parameters = plain_parameters(_Net((4, 4), (6, 2)))
        optimizer = build_optimizer(parameters, AdamWConfig(lr=0.1), "bf16-sr")
        for named in gradients:
            for index, each in enumerate(parameters):
                each.parameter.grad = torch.full_like(each.parameter, 1 + index) if index in named else None
            optimizer.step()
        counts = [float(optimizer.state[each.parameter]["step"]) for each in parameters]
        return [each.tensor.clone() for each in parameters], counts

    untouched, counts = stepped([()])
    assert counts == [0.0, 0.0]
    weights, counts = stepped([(0,), (0,), (0, 1), (1,)])
    assert counts == [3.0, 2.0]
    alone, counts = stepped([(1,), (), (1,)])
    assert counts == [0.0, 2.0]
    assert torch.equal(weights[1], alone[1]) and torch.equal(alone[0], untouched[0])
    assert not torch.equal(weights[0], untouched[0])


def test_a_closure_is_called_with_gradients_enabled_and_its_loss_is_returned():
    """As torch's optimizers do, also if no parameter has a gradient afterwards."""
    parameters = plain_parameters(_Net((4, 4)))
    optimizer = build_optimizer(parameters, AdamWConfig(lr=0.1), "bf16-sr")
    before = parameters[0].tensor.clone()

    def closure() -> float:
        assert torch.is_grad_enabled()
        return 1.5

    assert optimizer.step(closure) == 1.5
    assert torch.equal(parameters[0].tensor, before)
    parameters[0].parameter.grad = torch.ones_like(parameters[0].parameter)
    assert optimizer.step(closure) == 1.5
    assert not torch.equal(parameters[0].tensor, before)


def test_a_vector_has_as_few_lines_as_its_canonical_tensors_allow():
    """Addresses are three numbers per line: with a line per element they would be larger than the weights."""
    parameters = {each.name: each for each in shard_model(config_of(), ModelShard())[0]}
    norm, bias = (parameters[f"layers.0.attention{name}"] for name in ("_norm.weight", ".qkv.bias"))
    norm_lines, bias_lines = address_elements(norm), address_elements(bias)
    assert (norm_lines.count, norm_lines.length) == (1, 24)
    # each of two groups has 2 query heads, a key and a value head of 6 rows
    assert (bias_lines.count, bias_lines.length) == (8, 6)
    nothing = replace(norm, parameter=nn.Parameter(norm.tensor[:0].clone()))
    assert (address_elements(nothing).count, address_elements(nothing).length) == (0, 1)


@pytest.mark.parametrize("exponent", [-32, -26, -20, -19, -18])
def test_compensation_keeps_every_update_on_average(exponent):
    """Weights of 1 move by exactly the sum of their updates, up to the noise of rounding compensations stochastically.

    The witness is that sum as a fraction. A compensation has at most half a spacing of a weight, 2^-8, so that its own
    spacing is at most 2^-16: rounding a step of u to it has a variance of at most u 2^-16. Rounded to nearest, no
    weight moved with updates of 2^-20, and twice as far as they should with those just above 2^-18.
    """
    update, steps, count = Fraction(5, 4) * Fraction(2) ** exponent, 400, 1 << 14
    weights, compensation = _descend("bf16-kahan", float(update), steps, count)
    assert compensation is not None
    moved = 1 - (weights + compensation.double()).mean()
    sigma = math.sqrt(steps * float(update) * 2.0**-16 / count)
    assert abs(float(moved) - float(steps * update)) < 5 * sigma
    assert 5 * sigma < 0.3 * steps * update or exponent < -20, "the test would detect a third"


def test_compensations_have_random_bits_of_their_own():
    """Neighbours round differently in a step, and an element differently in the next one."""
    _, first = _descend("bf16-kahan", 2.0**-12 + 2.0**-22, 2, 1 << 12)
    _, second = _descend("bf16-kahan", 2.0**-12 + 2.0**-22, 3, 1 << 12)
    assert first is not None and second is not None
    assert first.unique().numel() > 1 and second.unique().numel() > first.unique().numel()
