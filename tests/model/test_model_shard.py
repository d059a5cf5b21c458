"""A part of a model: its rows and columns are the whole's, its first weights too, and parts add up to the whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hlat.config.sections import ModelConfig
from hlat.model import Decoder, ModelShard, collect_local_parameters, initialise
from hlat.model.hf import canonical_shapes
from hlat.model.hf.names import to_canonical
from tests.support.model.families import FAMILIES, config_of, our_model

# kv heads split, kv heads whole, kv heads replicated 2 and 4 times; coalesced blocks that cannot be shared out
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


def parts_of(config: ModelConfig, tensor_count: int, cut: int) -> list[Decoder]:
    """Two pipeline stages, cut after ``cut`` layers, each in tensor-parallel shares."""
    stages = [(range(cut), True, False), (range(cut, config.layers), False, True)]
    return [
        Decoder(config, ModelShard(index, tensor_count, layers, embedding, head))
        for layers, embedding, head in stages
        for index in range(tensor_count)
    ]


@given(MODELS, st.sampled_from([1, 2, 4, 8]), st.integers(1, 2))
@settings(max_examples=60)
def test_parts_own_every_element_once_and_start_from_the_bits_of_the_whole(config, tensor_count, cut):
    whole = Decoder(config)
    initialise(collect_local_parameters(whole), config, seed=11)
    expected = to_canonical(config, {name: p.detach() for name, p in whole.named_parameters()})
    found = {name: torch.full(shape, float("nan")) for name, shape in canonical_shapes(config).items()}
    for part in parts_of(config, tensor_count, cut):
        held = collect_local_parameters(part)
        initialise(held, config, seed=11)
        for one in held:
            for piece in one.row_blocks():
                values = torch.cat(one.row_views(piece, one.tensor))
                rows = slice(piece.canonical_start, piece.canonical_start + piece.rows)
                columns = slice(one.layout.first_column, one.layout.first_column + values.shape[-1])
                place = (rows, columns) if values.ndim == 2 else (rows,)
                assert torch.equal(values, expected[piece.name][place]), "copies too, owned or not"
                if piece.owned:
                    assert found[piece.name][place].isnan().all(), "owned twice"
                    found[piece.name][place] = values
    for name, values in found.items():
        assert torch.equal(values, expected[name]), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tensor_count", [2, 4])
def test_what_tensor_shares_give_adds_up_to_the_whole_block(family: str, tensor_count: int) -> None:
    """Also with more shares than kv heads, where each share has a copy of its kv head."""
    config = config_of(family)
    whole = our_model(config, torch.float64)
    initialise(collect_local_parameters(whole), config, seed=5)
    x = torch.randn(2, 8, config.hidden_size, dtype=torch.float64)
    tables = whole.rope.tables(((0, 8),), x.device)
    attention, feed_forward = torch.zeros_like(x), torch.zeros_like(x)
    for index in range(tensor_count):
        part = Decoder(config, ModelShard(index, tensor_count)).double()
        initialise(collect_local_parameters(part), config, seed=5)
        attention += part.layers["1"].attention(x, tables)
        feed_forward += part.layers["1"].feed_forward(x)
    block = whole.layers["1"]
    # sums of at most a few hundred terms of order 1 in float64
    torch.testing.assert_close(attention, block.attention(x, tables), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(feed_forward, block.feed_forward(x), rtol=1e-12, atol=1e-13)


def test_pieces_of_any_rows_are_blocks_of_canonical_rows() -> None:
    """FSDP2 cuts rows wherever it likes: in the middle of a head, of a block of gate, of a bias."""
    config = ModelConfig(vocab_size=11, layers=1, hidden_size=16, intermediate_size=24, heads=8, head_dim=4, kv_heads=4)
    for tensor_count in (1, 2, 8):
        part = Decoder(config, ModelShard(0, tensor_count))
        for one in collect_local_parameters(part):
            rows = one.layout.rows
            for start in range(rows):
                for stop in range(start + 1, rows + 1):
                    for piece in one.layout.row_blocks(start, stop):
                        expected = piece.canonical_start
                        for run in piece.runs:
                            assert (run.name, run.canonical_start) == (piece.name, expected)
                            expected += run.count
                    assert sum(piece.rows for piece in one.layout.row_blocks(start, stop)) == stop - start
