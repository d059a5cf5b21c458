"""The table of initial values and rates: what the model and the optimizers make of it."""

import pytest
import torch
from torch import nn

from hlat.config import AdamWConfig, MuonConfig
from hlat.model import build, collect_local_parameters, model_spec, scale_lines
from hlat.model.parameter_layout import parameter_layouts
from hlat.model.parametrization import scale_of
from hlat.optim import build_optimizer
from tests.support.model.families import FAMILIES, config_of, mask_of, our_model


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
    assert len(few) == len(many) <= 14
    text = " ".join(many)
    assert all(name in text for name in ("embed_tokens", "o_proj", "down_proj", "norm"))
    # 0.15 / sqrt(2 * 30)
    assert "std 0.0194" in next(line for line in many if "down_proj" in line and "bias" not in line)


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


def test_a_model_of_the_size_of_its_base_has_the_bits_of_no_transfer() -> None:
    config = config_of("llama31-gqa")
    base = {"transfer": "completep", "base_hidden_size": 64, "base_layers": 3, "base_head_dim": 16}
    plain, same = AdamWConfig(lr=0.01), AdamWConfig.model_validate({"lr": 0.01, **base})
    for tensor in (each for layout in parameter_layouts(config).values() for each in layout.tensors):
        assert scale_of(tensor.spec, config, same) == scale_of(tensor.spec, config, plain)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_groups_over_bf16_weights_have_the_rates_of_those_over_fp32(kind: str) -> None:
    """Their witness is in tests/training/test_transfer.py."""
    section = {"kind": kind, "transfer": "completep", "base_hidden_size": 16, "base_layers": 1, "lr": 0.01}
    config = (AdamWConfig if kind == "adamw" else MuonConfig).model_validate(section)
    found = []
    for mode, dtype in (("fp32", torch.float32), ("bf16-sr", torch.bfloat16)):
        model = build(config_of("llama31-gqa"), device="cpu", seed=3, dtype=dtype)
        optimizer = build_optimizer(collect_local_parameters(model), config, mode)
        names = {id(each): name for name, each in model.named_parameters()}
        rates = ("lr", "weight_decay", "eps")
        found.append(
            {
                names[id(each)]: [group.get(rate) for rate in rates]
                for group in optimizer.param_groups
                for each in group["params"]
            }
        )
    assert found[0] == found[1] and len(found[0]) == len(names)
    assert len({tuple(rates) for rates in found[0].values()}) >= 5


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_described_as_added_to_the_residual_stream_scales_it(family: str) -> None:
    """CompleteP's multiplier of each half of a block is that of the last tensor of the half."""
    config = config_of(family)
    model = our_model(config, torch.float64)
    block, x = next(model.blocks()), torch.randn(2, 12, config.hidden_size, dtype=torch.float64)
    tables = model.ropes[config.rope].tables(((0, 12),), x.device)
    mask = mask_of(config, x)
    added = {each.name for each in model_spec(config).block if any(tensor.is_added for tensor in each.tensors)}
    assert len(added) == (4 if family == "gpt-oss" else 2)  # with biases

    def halves() -> tuple[torch.Tensor, torch.Tensor]:
        attention = block.after_attention(x, block.attention(block.before_attention(x), tables, document_mask=mask)) - x
        return attention, block.after_feed_forward(x, block.feed_forward(block.before_feed_forward(x))) - x

    with torch.no_grad():
        before = halves()
        for name in added:
            parameter = block.get_parameter(name)
            # A norm of weight w multiplies by w, in Gemma by w + 1.
            offset = 1.0 if "gemma" in family else 0.0
            parameter.copy_((parameter + offset) * 0.25 - offset)
        for found, whole in zip(halves(), before, strict=True):
            torch.testing.assert_close(found, whole * 0.25, rtol=1e-12, atol=1e-14)
