"""Law 8: counted bytes of state equal the bytes of real processes exactly, on every rank."""

from dataclasses import astuple, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlat.config.load import parse_recipe
from hlat.config.sections.model import ModelConfig
from hlat.config.sections.training import ParallelConfig
from hlat.model.counts import count_parameters
from hlat.parallel.layout import StepShape
from hlat.parallel.stages.rank_memory import StateBytes
from tests.support.distributed.layouts import Case
from tests.support.distributed.memory_rows import (
    FOUR_STAGES,
    ROWS,
    content_of,
    expected,
    measure,
    measure_gathered,
    table,
)
from tests.support.distributed.stage_bytes import state_bytes
from tests.support.distributed.workers import Pool

LENGTH = 32


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_counted_bytes_of_every_rank_equal_measured_ones(row: Case, pool: Pool) -> None:
    measured = pool.run(row.world, measure, content_of(row))
    print(table({row.name: measured}))
    assert measured == expected(row)


def test_many_stages_in_one_round_stay_within_the_upper_bounds(pool: Pool) -> None:
    """Two numbers depend on the order in which the schedule runs the stages of a rank; all others are exact."""
    wanted = expected(FOUR_STAGES)
    for here, bound in zip(pool.run(FOUR_STAGES.world, measure, content_of(FOUR_STAGES)), wanted, strict=True):
        assert here.parameters < here.parameters_within_step <= bound.parameters_within_step
        assert here.gradients < here.gradients_accumulating <= bound.gradients_accumulating
        within = (bound.parameters_within_step, bound.gradients_accumulating)
        assert replace(here, parameters_within_step=within[0], gradients_accumulating=within[1]) == bound


@pytest.mark.parametrize("vocabulary", [64, 1024])
def test_zero_3_gathers_one_unit_at_a_time(vocabulary: int, pool: Pool) -> None:
    """Embedding, blocks, norm with head: whichever is the largest, nothing else is gathered while it is."""
    (row,) = (replace(row, micro_batch=4) for row in ROWS if row.name == "DP2, ZeRO 3")
    content = content_of(row)
    content["model"] |= {"vocab_size": vocabulary}
    stored = state_bytes(StepShape.of(parse_recipe(content, world=2), 2), 0).parameters
    for most, units in pool.run(2, measure_gathered, content):
        assert len(units) == content["model"]["layers"] + 2
        assert most == stored + max(units)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_matrix_stays_gathered_between_lookup_and_head(tied: bool) -> None:
    """Without a pipeline ZeRO 3 keeps embedding, norm and head of a tied model, else norm and head only."""
    model = ModelConfig(**(_EVEN | {"tie_embeddings": tied}))
    matrix, norm = 4 * model.vocab_size * model.hidden_size, 4 * model.hidden_size
    found = state_bytes(StepShape(model, ParallelConfig(zero=3), 2, LENGTH, 2), 0)
    assert found.parameters_within_step - found.parameters == matrix + norm


degrees = st.sampled_from((1, 2, 4))


@given(
    tensor=degrees,
    pipeline=st.sampled_from((1, 2)),
    context=st.sampled_from((1, 2)),
    data=degrees,
    zero=st.sampled_from((0, 1, 2, 3)),
    micro_batches=st.sampled_from((1, 4)),
)
def test_evenly_divided_layouts_have_the_bytes_of_the_zero_paper(
    tensor: int, pipeline: int, context: int, data: int, zero: int, micro_batches: int
) -> None:
    """Check the table of state_bytes.py, summed over the ranks of a pipeline, without padding or replication."""
    model = ModelConfig(**_EVEN)
    parallel = ParallelConfig(tensor=tensor, pipeline=pipeline, context=context, zero=zero)
    world = tensor * pipeline * context * data
    N = data * context if zero else 1
    counts = count_parameters(model)
    psi = (counts.total - counts.norms) // tensor + counts.norms
    embedding = 0 if pipeline == 1 else counts.embedding  # freed after its lookup
    ends = (embedding + counts.head) // tensor + model.hidden_size
    cut = StepShape(model, parallel, world, LENGTH, data * micro_batches)
    ranks = [state_bytes(cut, rank) for rank in cut.layout.group(world - 1, "pp")]
    found = StateBytes(*map(sum, zip(*map(astuple, ranks), strict=True)))

    sharded, in_pipeline = zero > 0 and data * context > 1, pipeline > 1
    assert found.parameters == 4 * psi // N
    extra = 0 if not sharded else 4 * ends if zero == 3 else 4 * psi
    assert found.parameters_within_step == 4 * psi // N + extra
    whole = not sharded or in_pipeline or (zero == 1 and micro_batches > 1)
    assert found.gradients_accumulating == (4 * psi if whole else 4 * psi // N)
    assert found.gradients == 4 * psi // N
    assert found.optimizer == 8 * psi // N + 4 * _PARAMETERS


_EVEN: dict[str, Any] = {
    "layers": 4,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 8,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_sequence_length": LENGTH,
}
_PARAMETERS = 4 * 6 + 3  # two norms and four matrices a layer; embedding, norm and head


@given(
    rows=st.integers(8, 400),
    width=st.integers(1, 40),
    inner=st.integers(1, 40),
    data=st.integers(1, 7),
    context=st.sampled_from((1, 2)),
    tied=st.booleans(),
    zero=st.sampled_from((1, 2, 3)),
)
def test_shards_of_any_model_add_up_to_the_model(
    rows: int, width: int, inner: int, data: int, context: int, tied: bool, zero: int
) -> None:
    """For any uneven sharding, moments of the shards add up to those of the model.

    Padding is less than a row per shard and parameter.
    """
    changes = {"vocab_size": rows, "hidden_size": width, "intermediate_size": inner, "tie_embeddings": tied}
    model = ModelConfig(**(_EVEN | changes))
    world, parallel = data * context, ParallelConfig(context=context, zero=zero)
    shards = [state_bytes(StepShape(model, parallel, world, LENGTH, data), rank) for rank in range(world)]
    parameters = _PARAMETERS - tied
    psi = count_parameters(model).total
    assert sum(shard.optimizer for shard in shards) == 8 * psi + 4 * parameters * world
    assert {shard.parameters for shard in shards} == {shards[0].parameters}, "all shards are padded to the same size"
    padded = world * shards[0].parameters // 4
    widest = max(width, inner, model.heads * model.n_head_dim)
    assert psi <= padded < psi + world * parameters * widest
