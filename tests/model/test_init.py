"""Initial weights depend on canonical name and element index only, however the model is built or sharded."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hlat.config import OptimizerConfig
from hlat.config.sections.model import ModelConfig
from hlat.model import build
from hlat.model import decoder as initial
from hlat.model.decoder import initial_rows
from hlat.model.parameter_layout import parameter_layouts
from hlat.runtime.random_keys import stream_key
from hlat.runtime.randomness import normal_range
from tests.support.model.canonical import to_canonical
from tests.support.model.families import FAMILIES, config_of


def canonical_of(config: ModelConfig, seed: int = 7, **more: object) -> dict[str, torch.Tensor]:
    model = build(config, device="cpu", seed=seed, **more)
    return to_canonical(config, {name: p.detach() for name, p in model.named_parameters()})


@pytest.mark.parametrize("family", FAMILIES)
def test_coalescing_does_not_change_a_bit(family: str) -> None:
    fused, split = canonical_of(config_of(family)), canonical_of(config_of(family, coalesce=False))
    assert fused.keys() == split.keys()
    assert all(torch.equal(fused[name], split[name]) for name in fused)


def test_each_tensor_has_its_own_random_stream_in_canonical_order() -> None:
    config = config_of("qwen2-bias")
    for name, tensor in canonical_of(config).items():
        if name.endswith("norm.weight"):
            expected = torch.ones(tensor.shape)
        elif name.endswith("bias"):
            expected = torch.zeros(tensor.shape)
        else:
            is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = config.init_std / (math.sqrt(2 * config.layers) if is_output else 1)
            expected = (normal_range(stream_key(7, "init", name), 0, tensor.numel()) * std).view(tensor.shape)
        assert torch.equal(tensor, expected), name


def test_the_chunk_size_does_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("llama31-gqa")
    whole = canonical_of(config)
    monkeypatch.setattr(initial, "_CHUNK", 333)
    chunked = canonical_of(config)
    assert all(torch.equal(chunked[name], whole[name]) for name in whole)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_rows_of_any_parameter_can_be_computed_alone(data: st.DataObject) -> None:
    config = config_of("qwen2-bias", layers=1)
    name = data.draw(st.sampled_from(sorted(parameter_layouts(config))))
    layout = parameter_layouts(config)[name]
    rows = layout.rows
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    whole = build(config, device="cpu", seed=7).get_parameter(name).detach()
    assert torch.equal(initial_rows(config, 7, layout, start, stop, OptimizerConfig()), whole[start:stop])


def test_seed_and_layer_change_every_matrix() -> None:
    config = config_of("llama2-mha")
    first, other = canonical_of(config, 7), canonical_of(config, 8)
    matrices = [name for name in first if first[name].ndim == 2]
    assert not any(torch.equal(first[name], other[name]) for name in matrices)
    assert len({first[name].flatten()[0].item() for name in matrices}) == len(matrices)


def test_unscaled_outputs_and_other_dtypes() -> None:
    config = config_of("llama2-mha", init_scaled_outputs=False)
    plain, half = canonical_of(config), canonical_of(config, dtype=torch.bfloat16)
    name = "model.layers.0.mlp.down_proj.weight"
    # the sample standard deviation of n normals has an error of about std / sqrt(2 n); allow five of these
    bound = 5 * config.init_std / math.sqrt(2 * plain[name].numel())
    assert abs(float(plain[name].std()) - config.init_std) < bound
    assert all(torch.equal(half[name], plain[name].to(torch.bfloat16)) for name in plain)


def test_a_model_on_the_meta_device_allocates_no_weights() -> None:
    model = build(config_of("tied"), device="meta", seed=3)
    assert all(p.is_meta for p in model.parameters())
