"""Model shards have rows, columns and initial weights of the complete model, and their outputs add up to its own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hlat.config.sections.model import ModelConfig
from hlat.model import Decoder, DecoderBlock, ModelShard, collect_local_parameters, initialise
from hlat.model.parameter_layout import canonical_shapes
from tests.support.model.canonical import to_canonical
from tests.support.model.families import FAMILIES, config_of, mask_of, our_model

# kv heads sharded, complete, and replicated 2 and 4 times; gate_up groups that cannot be divided evenly
MODELS = st.builds(
    lambda kv_heads, tied, coalesce, bias, vocab_size: ModelConfig(
        vocab_size=vocab_size,
        layers=3,
        hidden_size=16,
        intermediate_size=24,
        heads=8,
        head_dim=4,
        kv_heads=kv_heads,
        tie_embeddings=tied,
        coalesce=coalesce,
        qkv_bias=bias,
        qk_norm=bias,
    ),
    st.sampled_from([1, 2, 4, 8]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(8, 40),
)


def shards_of(config: ModelConfig, tensor_count: int, cut: int) -> list[Decoder]:
    """Build two pipeline stages, split after ``cut`` layers, each as tensor-parallel shards."""
    stages = [(range(cut), True, False), (range(cut, config.layers), False, True)]
    return [
        Decoder(config, ModelShard(index, tensor_count, layers, embedding, head))
        for layers, embedding, head in stages
        for index in range(tensor_count)
    ]


@given(MODELS, st.sampled_from([1, 2, 4, 8]), st.integers(1, 2))
@settings(max_examples=60)
def test_shards_own_every_element_once_and_have_the_initial_bits_of_the_complete_model(config, tensor_count, cut):
    full = Decoder(config)
    initialise(collect_local_parameters(full), config, seed=11)
    expected = to_canonical(config, {name: p.detach() for name, p in full.named_parameters()})
    found = {name: torch.full(shape, float("nan")) for name, shape in canonical_shapes(config).items()}
    for shard in shards_of(config, tensor_count, cut):
        parameters = collect_local_parameters(shard)
        initialise(parameters, config, seed=11)
        for parameter in parameters:
            for block in parameter.row_blocks():
                values = torch.cat(parameter.row_views(block, parameter.tensor))
                rows = slice(block.canonical_start, block.canonical_start + block.rows)
                columns = slice(parameter.layout.first_column, parameter.layout.first_column + values.shape[-1])
                index_of_rows = (rows, columns) if values.ndim == 2 else (rows,)
                assert torch.equal(values, expected[block.name][index_of_rows]), "owned rows and copies"
                if block.owned:
                    assert found[block.name][index_of_rows].isnan().all(), "owned twice"
                    found[block.name][index_of_rows] = values
    for name, values in found.items():
        assert torch.equal(values, expected[name]), name


def share_sums(full: DecoderBlock, shard: DecoderBlock, x: torch.Tensor) -> None:
    """Give norms over all heads the sums over all shards, as tensor parallelism does; copies of a head count each."""
    queries, keys, _ = full.attention._project(x)
    for norm, projected in zip(shard.sharded_norms(), (queries, keys), strict=False):
        total = projected.flatten(2).square().sum(-1, keepdim=True) * norm._copies
        norm.sum_over_shards = lambda _, total=total: total.clone()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tensor_count", [2, 4])
def test_outputs_of_tensor_parallel_shards_add_up_to_the_complete_block(family: str, tensor_count: int) -> None:
    """This includes more shards than kv heads, where each shard has a copy of its kv head."""
    config = config_of(family)
    full = our_model(config, torch.float64)
    initialise(collect_local_parameters(full), config, seed=5)
    x = torch.randn(2, 8, config.hidden_size, dtype=torch.float64)
    tables = full.ropes[config.rope].tables(((0, 8),), x.device)
    attention, feed_forward, mask = torch.zeros_like(x), torch.zeros_like(x), mask_of(config, x)
    for index in range(tensor_count):
        shard = Decoder(config, ModelShard(index, tensor_count)).double()
        initialise(collect_local_parameters(shard), config, seed=5)
        share_sums(full.layers["1"], shard.layers["1"], x)
        attention += shard.layers["1"].attention(x, tables, document_mask=mask)
        feed_forward += shard.layers["1"].feed_forward(x)
    block = full.layers["1"]
    # sums of at most a few hundred terms of order 1 in float64
    torch.testing.assert_close(attention, block.attention(x, tables, document_mask=mask), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(feed_forward, block.feed_forward(x), rtol=1e-12, atol=1e-13)


def test_any_range_of_rows_is_a_set_of_blocks_of_canonical_rows() -> None:
    """FSDP2 splits rows anywhere: in the middle of a head, of a gate_up group, of a bias."""
    config = ModelConfig(vocab_size=11, layers=1, hidden_size=16, intermediate_size=24, heads=8, head_dim=4, kv_heads=4)
    for tensor_count in (1, 2, 8):
        shard = Decoder(config, ModelShard(0, tensor_count))
        for parameter in collect_local_parameters(shard):
            rows = parameter.layout.rows
            for start in range(rows):
                for stop in range(start + 1, rows + 1):
                    for block in parameter.layout.row_blocks(start, stop):
                        expected = block.canonical_start
                        for run in block.runs:
                            assert (run.name, run.canonical_start) == (block.name, expected)
                            expected += run.count
                    assert sum(block.rows for block in parameter.layout.row_blocks(start, stop)) == stop - start
