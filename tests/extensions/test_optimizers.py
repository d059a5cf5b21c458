"""Optimizers of torch and of the user's own: their formula, what their trial finds, and what is refused."""

from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from hlat.config import ModelConfig, RecipeError
from hlat.config.own_parts import give_part
from hlat.config.sections.training import AnyOptimizerConfig
from hlat.model import build, collect_local_parameters
from hlat.optim import build_optimizer, optimizer_spec

MODEL = ModelConfig(vocab_size=64, layers=2, hidden_size=16, intermediate_size=24, heads=2, max_sequence_length=16)


def section(**fields: Any) -> Any:
    return TypeAdapter(AnyOptimizerConfig).validate_python(fields)


def parameters() -> list[Any]:
    return collect_local_parameters(build(MODEL, device="cpu", seed=1))


def give_gradients(found: list[Any], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for each in found:
        each.parameter.grad = torch.randn(each.parameter.shape, generator=generator)


def test_lion_updates_as_a_plain_script_of_its_paper_does(installed) -> None:
    found = parameters()
    optimizer = build_optimizer(found, section(kind="lion", lr=1e-2, weight_decay=0.2), "fp32")
    weights = [each.tensor.clone() for each in found]
    momenta = [torch.zeros_like(each) for each in weights]
    for step, rate in enumerate((0.01, 0.02, 0.005), start=1):
        give_gradients(found, step)
        gradients = [each.parameter.grad.clone() for each in found]
        optimizer.set_learning_rate(rate)
        optimizer.step()
        for weight, momentum, gradient in zip(weights, momenta, gradients, strict=True):
            # Algorithm 2 of arXiv 2302.06675; norms are not decayed
            update = torch.sign(0.9 * momentum + (1 - 0.9) * gradient)
            weight.mul_(1 - rate * (0.2 if weight.ndim > 1 else 0.0)).sub_(rate * update)
            momentum.mul_(0.99).add_(gradient, alpha=1 - 0.99)
    assert all(torch.equal(each.tensor, weight) for each, weight in zip(found, weights, strict=True))


def test_adamw_of_torch_by_name_takes_the_same_steps_as_adamw() -> None:
    ours, theirs = parameters(), parameters()
    fields = {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}
    one = build_optimizer(ours, section(kind="adamw", **fields), "fp32")
    other = build_optimizer(theirs, section(kind="torch.optim:AdamW", **fields), "fp32")
    for step in range(1, 6):
        for found, optimizer in ((ours, one), (theirs, other)):
            give_gradients(found, step)
            optimizer.clip_gradients(torch.tensor(20.0), 1.0)
            optimizer.set_learning_rate(1e-2 / step)
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.tensor, b.tensor, rtol=1e-5, atol=1e-7)
    assert one.state_names == other.state_names and one.numbers()["step"] == other.numbers()["step"] == 5


@pytest.mark.parametrize(
    ("name", "states", "numbers"),
    [
        ("AdamW", ["exp_avg", "exp_avg_sq"], ["step"]),
        ("RAdam", ["exp_avg", "exp_avg_sq"], ["step"]),
        ("NAdam", ["exp_avg", "exp_avg_sq"], ["step", "mu_product"]),
        ("Adagrad", ["sum"], ["step"]),
        ("SGD", [], []),
        ("ASGD", ["ax"], ["step", "eta", "mu"]),
        ("Rprop", ["prev", "step_size"], ["step"]),
    ],
)
def test_state_is_found_and_loaded_with_the_same_bits(name: str, states: list[str], numbers: list[str]) -> None:
    config = section(kind=f"torch.optim:{name}", lr=1e-2)
    spec = optimizer_spec(config, "fp32")
    assert list(spec.state_dtypes(True)) == states and list(spec.trial.numbers) == numbers
    assert spec.state_bytes(True) == 4 * len(states) and not list(spec.obstacles(True))
    first, second = parameters(), parameters()
    straight, resumed = (build_optimizer(found, config, "fp32") for found in (first, second))
    for step in range(1, 3):
        give_gradients(first, step)
        straight.step()
    # As a checkpoint does: tensors in place, and numbers.
    for here, there in zip(second, first, strict=True):
        here.tensor.copy_(there.tensor)
    for state, tensors in resumed.state_tensors(second).items():
        for target, source in zip(tensors, straight.state_tensors(first)[state], strict=True):
            target.copy_(source)
    resumed.load_numbers(straight.numbers())
    assert resumed.numbers() == straight.numbers()
    for step in range(3, 6):
        for found, optimizer in ((first, straight), (second, resumed)):
            give_gradients(found, step)
            optimizer.step()
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(first, second, strict=True))


class PerTensor(torch.optim.Optimizer):
    """Divides each gradient by its norm: the halves of a tensor are updated otherwise than the whole."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(group["lr"] * each.grad / each.grad.norm())


class Counting(PerTensor):
    """Keeps a counter in its param_groups, which no checkpoint has."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for each in group["params"]:
                each.sub_(group["lr"] / group["calls"] * each.grad.sign())


class Stubborn(PerTensor):
    """Ignores the learning rate of its groups."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(0.01 * each.grad.sign())


class Unlike(PerTensor):
    """Has a number for each parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["size"] = each.numel()
                each.sub_(group["lr"] * each.grad)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (Counting, "a resumed run would differ: it keeps state elsewhere than in state[parameter]"),
        (Stubborn, "does not read the learning rate of its param_groups"),
        (Unlike, "numbers of its state (size) differ from parameter to parameter"),
        (torch.optim.LBFGS, "a step of it on a matrix and a vector fails: TypeError"),
        (torch.optim.Adafactor, "its state row_var is a Tensor of shape (4, 1), for a parameter of (4, 6)"),
    ],
)
def test_an_optimizer_that_cannot_be_saved_or_driven_is_refused_with_the_reason(part: Any, reason: str) -> None:
    with pytest.raises(RecipeError) as refusal:
        optimizer_spec(section(kind=give_part(part)), "fp32")
    assert reason in str(refusal.value)


def test_an_update_that_is_not_elementwise_is_refused_where_parameters_are_sharded_only() -> None:
    spec = optimizer_spec(section(kind=give_part(PerTensor)), "fp32")
    assert not list(spec.obstacles(sharded=False))
    (problem,) = spec.obstacles(sharded=True)
    assert "steps on the halves of a tensor differ from those on the whole" in str(problem)


def test_bf16_weights_need_an_update_that_rounds_to_them() -> None:
    (problem,) = optimizer_spec(section(kind="torch.optim:RAdam"), "bf16-sr").obstacles(sharded=False)
    assert "weights are bf16 with precision.mode=bf16-sr" in str(problem)
