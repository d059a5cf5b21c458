"""An architecture is described once: what the description does not say, or says wrongly, is refused."""

from itertools import product

import pytest
import torch
from torch import nn

from hlat.config.sections.model import ModelConfig
from hlat.model import Decoder, DecoderBlock, ModelShard, layers
from hlat.model.architectures import model_spec
from hlat.model.counts import block_share, count_parameters
from hlat.model.spec import SHARDED, Axis, Component, GradientSum, ParameterSpec, TensorSpec
from tests.support.model.families import FAMILIES, config_of


def test_a_parameter_that_is_not_described_is_refused_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new replicated parameter, such as a layer scale, cannot be forgotten in gradient sums or checkpoints."""
    original = DecoderBlock.__init__

    def with_scale(block: DecoderBlock, config: ModelConfig, shard: ModelShard) -> None:
        original(block, config, shard)
        block.scale = nn.Parameter(torch.ones(config.hidden_size))

    monkeypatch.setattr(layers.DecoderBlock, "__init__", with_scale)
    with pytest.raises(AssertionError, match=r"layers\.0\.scale, layers\.1\.scale"), torch.device("meta"):
        Decoder(config_of("llama2-mha"))


def test_a_parameter_of_another_shape_is_refused_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    original = layers.RMSNorm.__init__
    monkeypatch.setattr(layers.RMSNorm, "__init__", lambda norm, width, eps: original(norm, width + 1, eps))
    with pytest.raises(AssertionError, match=r"layers\.0\.attention_norm\.weight"), torch.device("meta"):
        Decoder(config_of("llama2-mha"))


@pytest.mark.parametrize(("rows", "columns"), [*product(Axis, [*Axis, None])])
def test_a_tensor_on_every_rank_has_to_name_its_gradient_sum(rows: Axis, columns: Axis | None) -> None:
    """A tensor that nothing shards has a term of its gradient on every rank, or nothing would have to be said."""

    def is_accepted(gradient_sum: GradientSum) -> bool:
        try:
            TensorSpec("x", rows, columns, Component.NORMS, gradient_sum=gradient_sum)
        except ValueError as error:
            assert "x: gradient_sum" in str(error) and "use " in str(error)
            return False
        return True

    replicated, copied = not {rows, columns} & SHARDED, Axis.KEYS in (rows, columns)
    assert is_accepted(GradientSum.NONE) == (not replicated and not copied)
    assert is_accepted(GradientSum.SEQUENCE) == is_accepted(GradientSum.TENSOR) == replicated
    assert is_accepted(GradientSum.KEY_COPIES) == (copied and not replicated)


def test_tensors_with_different_sums_are_not_fused_unless_rows_are_summed() -> None:
    norm = TensorSpec("norm", Axis.WIDTH, None, Component.NORMS, gradient_sum=GradientSum.SEQUENCE)
    head_norm = TensorSpec("head_norm", Axis.HEAD, None, Component.NORMS, gradient_sum=GradientSum.TENSOR)
    with pytest.raises(ValueError, match="norms: fuses tensors"):
        ParameterSpec("norms", (norm, head_norm))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("coalesce", [True, False])
def test_counts_are_those_of_the_built_modules(family: str, coalesce: bool) -> None:
    config = config_of(family, coalesce=coalesce)
    with torch.device("meta"):
        model = Decoder(config)
    counts = count_parameters(config)
    assert counts.total == sum(parameter.numel() for parameter in model.parameters())
    blocks = sum(parameter.numel() for parameter in model.layers.parameters())
    assert config.layers * block_share(config, 1) == blocks
    linear = sum(parameter.numel() for parameter in model.layers.parameters() if parameter.dim() == 2)
    assert counts.matmul == linear + config.vocab_size * config.hidden_size


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_the_share_of_a_tensor_rank_is_the_mean_over_the_ranks(kv_heads: int, ranks: int) -> None:
    config = ModelConfig(
        vocab_size=100, layers=1, hidden_size=64, intermediate_size=192, heads=16, kv_heads=kv_heads, head_dim=8,
        qkv_bias=True, qk_norm=True,
    )  # fmt: skip
    shards = [ModelShard(index, ranks, embedding=False, head=False) for index in range(ranks)]
    stored = 0
    for shard in shards:
        with torch.device("meta"):
            stored += sum(parameter.numel() for parameter in Decoder(config, shard).parameters())
    assert block_share(config, ranks) == stored / ranks


def test_every_family_names_every_hugging_face_tensor_once() -> None:
    for family in FAMILIES:
        spec = model_spec(config_of(family))
        names = [tensor.name for tensor in spec.block_tensors]
        assert len(names) == len(set(names))
