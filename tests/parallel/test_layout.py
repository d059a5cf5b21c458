"""Rank arithmetic of parallel layouts: properties of pure functions, checked by hypothesis."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from hlat.config.sections.training import ParallelConfig
from hlat.parallel.layout import Layout

DEGREES = st.tuples(*(st.integers(1, 3) for _ in range(5)))


def layout_of(degrees: tuple[int, int, int, int, int], **more: object) -> Layout:
    pipeline, per_replica, replicas, context, tensor = degrees
    config = ParallelConfig(pipeline=pipeline, context=context, tensor=tensor, replicas=replicas, **more)
    return Layout.of(config, pipeline * per_replica * replicas * context * tensor)


@given(DEGREES)
def test_ranks_and_coordinates_correspond_one_to_one(degrees):
    layout = layout_of(degrees)
    coordinates = [layout.coordinates(rank) for rank in range(layout.world)]
    assert [layout.rank(each) for each in coordinates] == list(range(layout.world))
    assert len(set(coordinates)) == layout.world == len(list(product(*map(range, layout.sizes))))


@given(DEGREES)
def test_groups_partition_the_world_and_tensor_ranks_are_neighbours(degrees):
    layout = layout_of(degrees)
    for groups in (
        lambda rank: layout.group(rank, "tp"),
        lambda rank: layout.group(rank, "pp"),
        lambda rank: layout.group(rank, "dp", "cp"),
        layout.state_shards,
        layout.state_replicas,
    ):
        found = {groups(rank) for rank in range(layout.world)}
        assert sorted(rank for group in found for rank in group) == list(range(layout.world))
        assert all(rank in groups(rank) for rank in range(layout.world))
    for rank in range(layout.world):
        tensor = layout.group(rank, "tp")
        assert list(tensor) == list(range(tensor[0], tensor[0] + layout.tensor))


@given(DEGREES)
def test_shards_and_replicas_are_rows_and_columns_of_the_data_ranks(degrees):
    layout = layout_of(degrees)
    for rank in range(layout.world):
        shards, replicas = layout.state_shards(rank), layout.state_replicas(rank)
        assert len(shards) * len(replicas) == layout.data * layout.context
        assert set(shards) & set(replicas) == {rank}
        everyone = {other for replica in replicas for other in layout.state_shards(replica)}
        assert everyone == set(layout.group(rank, "dp", "cp"))
        # ranks of a replica are neighbours (one per tensor group), so that shards stay within a machine
        assert max(shards) - min(shards) < len(shards) * layout.tensor


@given(DEGREES, st.integers(1, 3))
def test_every_sequence_of_a_batch_is_assigned_once(degrees, per_rank):
    layout = layout_of(degrees)
    rows = {layout.coordinates(rank).dp: layout.rows(rank, layout.data * per_rank) for rank in range(layout.world)}
    assert [row for index in sorted(rows) for row in rows[index]] == list(range(layout.data * per_rank))


@given(st.integers(1, 8), st.integers(1, 5))
def test_every_position_is_assigned_once_with_equal_work_for_all_context_ranks(context, chunk):
    layout = layout_of((1, 1, 1, context, 1))
    length = 2 * context * chunk
    spans = [layout.spans(rank, length) for rank in range(context)]
    positions = [[position for a, b in pair for position in range(a, b)] for pair in spans]
    assert sorted(position for own in positions for position in own) == list(range(length))
    attended = [sum(position + 1 for position in own) for own in positions]
    assert len(set(attended)) == 1, "every rank has the same number of query-key pairs"


@given(st.integers(2, 5), st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"]))
def test_every_stage_runs_on_one_rank(pipeline, schedule):
    layout = layout_of((pipeline, 1, 1, 1, 1), schedule=schedule)
    stages = [layout.stages_of(rank) for rank in range(pipeline)]
    assert sorted(stage for own in stages for stage in own) == list(range(layout.parallel.stages))
    assert len({len(own) for own in stages}) == 1
    if schedule == "zbv":
        assert stages[0] == [0, 2 * pipeline - 1], "a V begins and ends on the same rank"
