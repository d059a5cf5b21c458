"""The table of initial values and rates: what the model and the optimizers make of it, against plain torch."""

import pytest
import torch
from torch import nn

from hlat.config import AdamWConfig, MuonConfig
from hlat.model import build, collect_local_parameters, scale_lines
from hlat.optim import build_optimizer
from tests.support.model.families import FAMILIES, config_of


@pytest.mark.parametrize("decay_norms", [False, True])
@pytest.mark.parametrize("family", ["qwen2-bias", "olmo2-gqa"])
def test_two_groups_of_torch_give_the_same_bits(family: str, decay_norms: bool) -> None:
    section = AdamWConfig(lr=0.01, weight_decay=0.3, decay_norms=decay_norms)
    model, plain = (build(config_of(family), device="cpu", seed=3) for _ in range(2))
    optimizer = build_optimizer(collect_local_parameters(model), section)
    matrices = [each for each in plain.parameters() if each.ndim == 2]
    vectors = [each for each in plain.parameters() if each.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.3},
        {"params": vectors, "weight_decay": 0.3 if decay_norms else 0.0},
    ]
    expected = torch.optim.AdamW(groups, betas=section.betas, eps=section.eps, fused=True)
    for rate in (0.003, 0.01):
        optimizer.set_learning_rate(rate)
        for group in expected.param_groups:
            group["lr"] = rate
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            ours.grad = torch.randn(ours.shape, generator=torch.Generator().manual_seed(ours.numel()))
            theirs.grad = ours.grad.clone()
        optimizer.step()
        expected.step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("family", FAMILIES)
def test_lines_do_not_grow_with_layers_and_name_every_kind_of_tensor(family: str) -> None:
    few, many = (list(scale_lines(config_of(family, layers=n), AdamWConfig())) for n in (3, 30))
    assert len(few) == len(many) <= 12
    text = " ".join(many)
    assert all(name in text for name in ("embed_tokens", "o_proj", "down_proj", "norm"))
    # 0.15 / sqrt(2 * 30)
    assert "std 0.0194" in next(line for line in many if "down_proj" in line)


def test_muon_has_another_rate_for_what_adamw_updates() -> None:
    section = MuonConfig(kind="muon", lr=0.02, adamw_lr=0.001)
    rows = {line.split()[-1]: line for line in scale_lines(config_of("llama2-mha"), section)}
    assert "0.02" in rows["up_proj"].split()[4:] and "0.001" in rows["lm_head"].split()[4:]
    model = build(config_of("llama2-mha"), device="cpu", seed=3)
    optimizer = build_optimizer(collect_local_parameters(model), section)
    optimizer.set_learning_rate(0.01)  # half of the peak
    rates = {
        id(each): group["lr"]
        for group in optimizer.param_groups
        for each in group["params"]
        if isinstance(each, nn.Parameter)
    }
    assert {
        rates[id(each)] for name, each in model.named_parameters() if name.startswith("layers") and each.ndim == 2
    } == {0.01}
    assert rates[id(model.get_parameter("norm.weight"))] == pytest.approx(0.0005, rel=1e-12)
