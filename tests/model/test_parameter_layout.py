"""Conversion between fused and canonical tensors is exact, and a shard of complete groups works on its own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hlat.config import PRESETS
from hlat.config.sections.model import ModelConfig
from hlat.model import build
from hlat.model.parameter_layout import CanonicalTensor, RowLayout, canonical_shapes, parameter_layouts
from hlat.model.spec import Axis, Component, TensorSpec, gate_up_groups
from hlat.runtime.errors import CheckpointError
from tests.support.model.canonical import from_canonical, fuse, split, to_canonical
from tests.support.model.families import FAMILIES, config_of, mask_of, our_model, tokens_of

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
ANY = TensorSpec("any", Axis.QUERIES, Axis.WIDTH, Component.ATTENTION)

layouts = st.builds(
    lambda sizes, groups, columns: RowLayout(
        tuple(CanonicalTensor(f"p{i}", n, ANY) for i, n in enumerate(sizes)), groups, columns
    ),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(1, 6),
    st.sampled_from([(), (1,), (3,)]),
)


@given(layouts, st.sampled_from(DTYPES))
def test_split_and_fuse_are_exact_inverses(layout: RowLayout, dtype: torch.dtype) -> None:
    fused = torch.randn(layout.shape).to(dtype)
    canonical = split(layout, fused)
    assert {name: tuple(t.shape) for name, t in canonical.items()} == layout.canonical_shapes
    assert torch.equal(fuse(layout, canonical), fused)


@given(layouts, st.data())
def test_runs_describe_the_rows_that_split_moves(layout: RowLayout, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, layout.rows))
    stop = data.draw(st.integers(start, layout.rows))
    fused = torch.randn(layout.shape)
    canonical = split(layout, fused)
    runs = list(layout.runs(start, stop))
    assert [run.start for run in runs] == [start + sum(r.count for r in runs[:i]) for i in range(len(runs))]
    rows = [canonical[run.name][run.canonical_start : run.canonical_start + run.count] for run in runs]
    assert torch.equal(torch.cat(rows) if rows else fused[:0], fused[start:stop])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_conversion_through_canonical_names_is_exact(family: str, dtype: torch.dtype) -> None:
    fused, split = config_of(family), config_of(family, coalesce=False)
    named = {name: p.detach() for name, p in our_model(fused).to(dtype).named_parameters()}
    canonical = to_canonical(fused, named)
    unfused = from_canonical(split, canonical)
    assert unfused.keys() == dict(build(split, device="meta", seed=None).named_parameters()).keys()
    back = from_canonical(fused, to_canonical(split, unfused))
    assert back.keys() == named.keys()
    assert all(torch.equal(back[name], named[name]) and back[name].dtype == dtype for name in named)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("coalesce", [True, False])
def test_layouts_have_every_parameter_and_its_shape(family: str, coalesce: bool) -> None:
    config = config_of(family, coalesce=coalesce)
    parameters = {name: tuple(p.shape) for name, p in build(config, device="meta", seed=None).named_parameters()}
    assert {name: layout.shape for name, layout in parameter_layouts(config).items()} == parameters


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tied_head_has_no_canonical_tensor(family: str) -> None:
    config = config_of(family)
    assert ("lm_head.weight" in canonical_shapes(config)) == (not config.tie_embeddings)
    assert build(config, device="cpu", seed=0).state_dict().keys() == parameter_layouts(config).keys()


def test_every_wrong_name_and_shape_is_listed_at_once() -> None:
    config = config_of("llama2-mha")
    canonical = to_canonical(config, dict(build(config, device="meta", seed=None).named_parameters()))
    del canonical["model.norm.weight"]
    canonical["model.extra"] = torch.empty(1)
    canonical["lm_head.weight"] = torch.empty(3, 64)
    with pytest.raises(CheckpointError) as caught:
        from_canonical(config, canonical)
    for problem in ("model.norm.weight: missing", "model.extra: unexpected", "lm_head.weight: is 3 x 64", "211 x 64"):
        assert problem in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_shard_of_complete_groups_is_a_smaller_model(family: str, ranks: int) -> None:
    """Tensor parallelism by hand: contiguous rows of the fused matrices, columns of the outputs, and a sum."""
    config = config_of(family)
    model = our_model(config, torch.float64)
    block = model.layers["0"]
    if config.n_kv_heads % ranks or block.sharded_norms():  # a norm over all heads needs a sum over the ranks
        ranks = 1
    x = torch.randn(2, 8, config.hidden_size, dtype=torch.float64)
    tables = model.ropes[config.rope].tables(((0, 8),), x.device)
    mask = mask_of(config, x)
    expected = block.attention(x, tables, document_mask=mask), block.feed_forward(x)
    weights = {name: p.detach() for name, p in block.named_parameters()}
    outputs = []
    for rank in range(ranks):
        for name in weights:
            if name.startswith(("attention.qkv.", "attention.sinks", "feed_forward.gate_up.")):
                owner = block.get_submodule(name.rpartition(".")[0])
                shard = torch.nn.Parameter(weights[name].chunk(ranks)[rank])
                setattr(owner, name.rpartition(".")[2], shard)
        for name in ("attention.output.weight", "feed_forward.down.weight"):
            block.get_submodule(name.rpartition(".")[0]).weight = torch.nn.Parameter(
                weights[name].chunk(ranks, dim=1)[rank]
            )
        outputs.append((block.attention(x, tables, document_mask=mask), block.feed_forward(x)))
    for full, shards in zip(expected, zip(*outputs, strict=True), strict=True):
        torch.testing.assert_close(sum(shards), full, rtol=1e-12, atol=1e-12)


@given(st.integers(1, 128), st.integers(1, 60000))
@settings(max_examples=200)
def test_gate_up_groups_divide_the_rows_and_can_be_sharded_like_kv_heads(kv_heads: int, inner: int) -> None:
    config = ModelConfig(
        vocab_size=8, layers=1, hidden_size=kv_heads * 2, heads=kv_heads, kv_heads=kv_heads, intermediate_size=inner
    )
    groups = gate_up_groups(config)
    assert inner % groups == 0
    for degree in range(1, kv_heads + 1):
        if kv_heads % degree == 0 and inner % degree == 0:
            assert groups % degree == 0


def test_the_large_presets_can_be_sharded_over_64_ranks() -> None:
    large = [name for name in PRESETS if name.startswith("llama")]
    assert all(gate_up_groups(ModelConfig(**PRESETS[name])) % 64 == 0 for name in large)


def test_a_longer_sequence_does_not_change_later_results() -> None:
    """The rotation tables grow on demand; entries of earlier positions stay the same."""
    config = config_of("llama31-gqa", max_sequence_length=4096)
    model, tokens = our_model(config), tokens_of(config, 1, 16)
    before = model(tokens)
    model(tokens_of(config, 1, 1500))
    assert torch.equal(model(tokens), before)
