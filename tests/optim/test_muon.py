"""Muon against singular value decompositions, a plain script, torch.optim.Muon, and itself with fused parameters."""

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hlat.checkpoint import collect, restore
from hlat.checkpoint.protocol.reader import open_checkpoint
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.config import RecipeError
from hlat.config.load import parse_recipe
from hlat.config.sections.model import ModelConfig
from hlat.config.sections.training import MuonConfig
from hlat.model import LocalParameter, ModelShard, build, collect_local_parameters
from hlat.optim import Optimizer, build_optimizer
from hlat.optim.muon import COEFFICIENTS, orthogonalize
from hlat.precision import MODES, element_bits, step_keys, stochastic_round, stream_keys
from tests.support.optim.parameters import canonical, config_of, fill_gradients, fill_weights, shard_model

BF16_MODES = ("bf16-sr", "bf16", "bf16-kahan")
HIDDEN = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "gate_proj", "up_proj", "down_proj")
STEPS = 4


def quintic(values: torch.Tensor, steps: int) -> torch.Tensor:
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        values = a * values + b * values**3 + c * values**5
    return values


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16), (1, 9)])
@pytest.mark.parametrize("steps", [1, 5])
def test_newton_schulz_applies_the_quintic_to_singular_values(shape: tuple[int, int], steps: int) -> None:
    """In float64, U f(S / norm) V^T: 1e-12 is 4,500 roundings, of 5 x 3 products of at most 40 terms."""
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    expected = u @ torch.diag(quintic(s / s.norm(), steps)) @ v
    assert (orthogonalize(matrix.clone(), steps) - expected).abs().max() < 1e-12


def test_five_steps_bring_singular_values_near_one() -> None:
    """From 0.002 of the norm upwards, as its docstring says; the polar factor U V^T has ones."""
    start = torch.logspace(math.log10(0.002), 0, 10_001, dtype=torch.float64)
    band = quintic(start, 5)
    assert band.min() > 0.65 and band.max() < 1.25
    matrix = torch.randn(32, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonalize(matrix.clone(), 5)
    cosine = (found * (u @ v)).sum() / found.norm() / (u @ v).norm()
    assert cosine > 0.97  # singular values in the band: mean / root mean square of any values there is at least 0.95
    assert not orthogonalize(torch.zeros(3, 5), 5).any()


def plain_muon(
    weights: dict[str, torch.Tensor], gradients: list[dict[str, torch.Tensor]], config: MuonConfig, rates: list[float]
) -> dict[str, torch.Tensor]:
    """Script of Muon and AdamW over canonical tensors, in float64."""
    found = {name: tensor.double().clone() for name, tensor in weights.items()}
    first, second = ({name: torch.zeros_like(tensor) for name, tensor in found.items()} for _ in range(2))
    for number, (step, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        for name, weight in found.items():
            gradient = step[name].double()
            if name.endswith(HIDDEN) or any(part in name for part in HIDDEN):
                momentum = first[name]
                momentum.mul_(config.momentum).add_((1 - config.momentum) * gradient)
                seen = gradient * (1 - config.momentum) + momentum * config.momentum if config.nesterov else momentum
                u, s, v = torch.linalg.svd(seen, full_matrices=False)
                update = u @ torch.diag(quintic(s / s.norm(), config.ns_steps)) @ v
                weight.mul_(1 - rate * config.weight_decay)
                weight.sub_(rate * 0.2 * math.sqrt(max(weight.shape)) * update)
                continue
            rate_here = rate * (config.adamw_lr or config.lr) / config.lr
            weight.mul_(1 - rate_here * config.weight_decay * (weight.ndim == 2))
            beta1, beta2 = config.betas
            first[name].mul_(beta1).add_((1 - beta1) * gradient)
            second[name].mul_(beta2).add_((1 - beta2) * gradient**2)
            root = (second[name] / (1 - beta2**number)).sqrt() + config.eps
            weight.sub_(rate_here * first[name] / (1 - beta1**number) / root)
    return found


@functools.cache
def parameters_of(coalesce: bool, dtype: torch.dtype) -> tuple[ModelConfig, list[LocalParameter]]:
    config = config_of(coalesce=coalesce, intermediate_size=256)
    return config, collect_local_parameters(build(config, device="cpu", seed=0, dtype=dtype))


def run(
    coalesce: bool, dtype: torch.dtype, config: MuonConfig, mode: str = "fp32", steps: int = STEPS
) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Train a model with given gradients; return canonical weights before, the gradients, and weights after."""
    model, parameters = parameters_of(coalesce, dtype)
    fill_weights(parameters)

    def read(tensor_of: Any) -> dict[str, torch.Tensor]:
        return canonical(model, parameters, tensor_of, {})

    before, gradients = read(lambda each: each.tensor), []
    optimizer = build_optimizer(parameters, config, mode, seed=4)
    for step in range(steps):
        fill_gradients(parameters, step)
        gradients.append(read(lambda each: each.gradient))
        optimizer.set_learning_rate(config.lr / (1 + step))
        optimizer.step()
    return before, gradients, read(lambda each: each.tensor)


@pytest.mark.parametrize("coalesce", [True, False])
@pytest.mark.parametrize(
    "changes", [{}, {"nesterov": False, "momentum": 0.5, "ns_steps": 3}, {"adamw_lr": 0.002}], ids=str
)
def test_fused_and_separate_matrices_follow_a_plain_script(coalesce: bool, changes: dict[str, Any]) -> None:
    """In float64, copied to fp32 for the comparison: weights of about 1 differ by a rounding of fp32, 2^-24."""
    config = MuonConfig(kind="muon", lr=0.02, weight_decay=0.1, **changes)
    before, gradients, after = run(coalesce, torch.float64, config)
    expected = plain_muon(before, gradients, config, [config.lr / (1 + step) for step in range(STEPS)])
    for name, tensor in expected.items():
        assert (after[name] - tensor).abs().max() < 2.0**-22, name


@pytest.mark.parametrize("mode", ["fp32", "mixed", *BF16_MODES])
def test_fusing_does_not_change_a_bit(mode: str) -> None:
    """Biases in fp32 are left out: torch's fused AdamW rounds the last elements of a tensor differently."""
    config = MuonConfig(kind="muon", lr=0.02)
    fused, separate = (run(coalesce, MODES[mode].weights, config, mode)[2] for coalesce in (True, False))
    compared = [name for name in fused if mode in BF16_MODES or fused[name].ndim == 2]
    assert len(compared) >= 9 and all(torch.equal(fused[name], separate[name]) for name in compared)


def test_torchs_muon_takes_the_same_steps() -> None:
    """Torch rounds every product to bf16, and so does the mode mixed; they differ by the order of normalisation.

    torch normalizes by the norm rounded to bf16, so that inputs of Newton-Schulz differ by 2^-9, and later roundings
    are others. Each step amplifies by at most 3.44, and there are 3 roundings of 2^-9 in each, relative to the largest
    singular value. At random signs that is below 10 % of an update after five steps; a wrong scale, a wrong decay or a
    wrong momentum changes the updates by more.
    """
    config = MuonConfig(kind="muon", lr=0.02, weight_decay=0.1)
    before, gradients, after = run(False, torch.float32, config, "mixed")
    for name, weight in before.items():
        if weight.ndim != 2 or ("self_attn" not in name and "mlp" not in name):
            continue
        theirs = torch.nn.Parameter(weight.clone())
        torchs = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        for step in range(STEPS):
            theirs.grad = gradients[step][name].clone()
            torchs.param_groups[0]["lr"] = config.lr / (1 + step)
            torchs.step()
        moved = (theirs.detach() - weight).norm()
        assert (after[name] - theirs.detach()).norm() < 0.1 * moved, name


@pytest.mark.parametrize("mode", BF16_MODES)
def test_bf16_weights_are_rounded_once_in_the_way_of_the_mode(mode: str) -> None:
    """The first step is computed again in fp32 from the same bf16 values, with the addressed random bits.

    Newton-Schulz is bf16 in both; its result is bf16.
    """
    config = MuonConfig(kind="muon", lr=0.05, weight_decay=0.1)
    before, gradients, after = run(True, torch.bfloat16, config, mode, steps=1)
    name = "model.layers.0.self_attn.k_proj.weight"
    weight, gradient = before[name], gradients[0][name]
    momentum = gradient * (1 - config.momentum)
    direction = (gradient + (momentum - gradient) * config.momentum).bfloat16()
    update = orthogonalize(direction, 5).float() * (config.lr * 0.2 * math.sqrt(max(weight.shape)))
    exact = weight - (weight * (config.lr * config.weight_decay) + update)
    if mode == "bf16-sr":
        key = step_keys(stream_keys(4, "rounding", [name], torch.device("cpu")), torch.ones(1))
        rows, columns = (torch.arange(size, dtype=torch.int32) for size in weight.shape)
        bits, _, _ = element_bits((key[0], key[1]), rows.unsqueeze(1), columns)
        expected = stochastic_round(exact, bits.expand(weight.shape))
        assert not torch.equal(expected, exact.bfloat16()), "rounded to nearest"
    else:
        expected = exact.bfloat16()
    assert torch.equal(after[name], expected.float())


@pytest.mark.parametrize("mode", ["bf16-sr", "bf16-kahan"])
def test_a_restored_optimizer_continues_bit_for_bit_fused_or_not(mode: str, tmp_path: Path) -> None:
    store, config = CheckpointStore(tmp_path / "checkpoints", 1), config_of()

    def start(coalesce: bool) -> tuple[list[LocalParameter], Optimizer]:
        [parameters] = shard_model(config_of(coalesce=coalesce), ModelShard())
        return parameters, build_optimizer(parameters, MuonConfig(kind="muon", lr=0.01), mode, seed=2)

    def train(parameters: list[LocalParameter], optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            fill_gradients(parameters, step)
            optimizer.step()

    straight, optimizer = start(True)
    fill_weights(straight)
    train(straight, optimizer, range(2))
    path = store.save(2, collect(config, straight, optimizer), {})
    saved = open_checkpoint(path).tensors
    assert "optimizer.momentum.model.layers.0.mlp.up_proj.weight" in saved
    assert "optimizer.exp_avg.model.layers.0.mlp.up_proj.weight" not in saved
    assert "optimizer.exp_avg_sq.model.embed_tokens.weight" in saved
    assert "optimizer.momentum.model.embed_tokens.weight" not in saved
    train(straight, optimizer, range(2, 4))
    other, restored = start(False)
    restore(open_checkpoint(path), config, other, restored)
    train(other, restored, range(2, 4))
    found, expected = (canonical(config, each, lambda one: one.tensor, {}) for each in (other, straight))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("mode", ["fp32", "bf16-sr"])
def test_clipping_by_the_optimizer_has_the_bits_of_torchs(mode: str) -> None:
    """Gradients of hidden matrices are scaled in place, those of AdamW perhaps within its update."""
    ends = []
    for clips in (True, False):
        [parameters] = shard_model(config_of(), ModelShard())
        for each in parameters:
            each.parameter.data = each.parameter.data.to(MODES[mode].weights)
        fill_weights(parameters)
        optimizer = build_optimizer(parameters, MuonConfig(kind="muon", lr=0.01), mode, seed=2)
        fill_gradients(parameters, 0)
        norm = torch.tensor(30.0)
        if clips:
            optimizer.clip_gradients(norm, 1.0)
        else:
            torch.nn.utils.clip_grads_with_norm_([each.parameter for each in parameters], 1.0, norm)
        optimizer.step()
        ends.append([each.tensor for each in parameters])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*ends, strict=True))


def test_a_sharded_parameter_without_access_to_whole_matrices_is_refused() -> None:
    [parameters] = shard_model(config_of(), ModelShard(0, 2))
    optimizer = build_optimizer(parameters, MuonConfig(kind="muon", lr=0.01), "bf16", seed=2)
    fill_gradients(parameters, 0)
    with pytest.raises(AssertionError, match="is sharded: build the optimizer with"):
        optimizer.step()


RECIPE: dict[str, Any] = {
    "model": {"vocab_size": 320, "layers": 2, "heads": 4, "hidden_size": 32, "intermediate_size": 96},
    "data": {"path": "none", "tokenizer": {"train": "char"}},
    "training": {"steps": 10},
}


def test_a_section_without_kind_is_adamws() -> None:
    assert parse_recipe(RECIPE).optimizer.kind == "adamw"
    assert parse_recipe(RECIPE | {"optimizer": {"lr": 0.1}}).optimizer.kind == "adamw"
    assert parse_recipe(RECIPE | {"optimizer": {"kind": "muon"}}).optimizer == MuonConfig(kind="muon")


@pytest.mark.parametrize(
    ("section", "paths"),
    [
        ({"kind": "sgd"}, ["kind"]),
        ({"kind": "muon", "momentum": 1.0, "ns_steps": 0, "adamw_lr": 0}, ["momentum", "ns_steps", "adamw_lr"]),
        ({"momentum": 0.9}, ["momentum"]),
        ({"kind": "muon", "nesterow": True}, ["nesterow"]),
    ],
)
def test_nonsense_is_refused_with_its_field(section: dict[str, Any], paths: list[str]) -> None:
    with pytest.raises(RecipeError) as error:
        parse_recipe(RECIPE | {"optimizer": section})
    assert [problem.path.removeprefix("optimizer.") for problem in error.value.problems] == paths
