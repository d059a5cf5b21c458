"""Balanced stages are compared with every other split of the layers, enumerated by brute force."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlat.config.sections.model import ModelConfig
from hlat.config.sections.training import ParallelConfig, Schedule
from hlat.parallel.layout import StepShape
from hlat.parallel.stages.rank_memory import rank_bytes
from hlat.parallel.stages.stage_layers import (
    StageCosts,
    balance_layers,
    stage_layer_counts,
    stage_layers,
)
from tests.support.distributed.stage_bytes import peak_memory_rank

GIB = 1 << 30
LLAMA_3_8B = ModelConfig(
    vocab_size=128256, layers=32, hidden_size=4096, intermediate_size=14336, heads=32, kv_heads=8,
    max_sequence_length=8192,
)  # fmt: skip
LLAMA_2_70B = ModelConfig(
    vocab_size=32000, layers=80, hidden_size=8192, intermediate_size=28672, heads=64, kv_heads=8,
    max_sequence_length=4096,
)  # fmt: skip
SCHEDULES: tuple[tuple[Schedule, int], ...] = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved-1f1b", 2),
    ("interleaved-1f1b", 4),
    ("interleaved-zero-bubble", 2),
    ("zbv", 2),
)


def every_split(layers: int, stages: int) -> Iterator[list[int]]:
    if stages == 1:
        yield [layers]
        return
    for first in range(1, layers - stages + 2):
        for rest in every_split(layers - first, stages - 1):
            yield [first, *rest]


def criteria(counts: Sequence[int], given: StageCosts) -> tuple[float, float, float]:
    """Compute the criteria: time of the slowest rank, of the slowest stage, and bytes of the fullest rank."""
    ranks = set(given.ranks)
    times = [count * given.layer + extra for count, extra in zip(counts, given.extra, strict=True)]
    loads = {rank: sum(n for n, where in zip(counts, given.ranks, strict=True) if where == rank) for rank in ranks}
    ends = {rank: sum(e for e, where in zip(given.extra, given.ranks, strict=True) if where == rank) for rank in ranks}
    return (
        max(ends[rank] + loads[rank] * given.layer for rank in ranks),
        max(times),
        max(given.need(rank, loads[rank]) for rank in ranks),
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, StageCosts]:
    """Draw up to 8 stages, in rounds or in a V, and up to 10 layers; costs are integers, so that sums are exact."""
    each, v = draw(st.integers(1, 3)), draw(st.booleans())
    ranks = draw(st.integers(1, 8 // each))
    order = [*range(ranks), *reversed(range(ranks))] if v and each == 2 else [*range(ranks)] * each
    layers = draw(st.integers(len(order), 10))
    integers = st.integers(0, 12)
    extra = [float(draw(integers)) if index in (0, len(order) - 1) else 0.0 for index in range(len(order))]
    base = draw(st.lists(integers, min_size=ranks, max_size=ranks))
    slope = draw(st.lists(st.integers(1, 9), min_size=ranks, max_size=ranks))
    return layers, StageCosts(order, 4.0, extra, lambda rank, n: base[rank] + slope[rank] * n, draw(st.booleans()))


@given(problems())
def test_the_balanced_split_is_optimal_by_all_criteria_in_order(
    problem: tuple[int, StageCosts],
) -> None:
    layers, given = problem
    found = balance_layers(layers, given)
    assert sum(found) == layers and all(found) and len(found) == len(given.ranks)
    assert criteria(found, given) == min(criteria(other, given) for other in every_split(layers, len(given.ranks)))


def earlier_take_more(layers: int, layer: float, extra: Sequence[float]) -> list[int]:
    """Split by a simpler rule: each stage in order takes the most layers that keep the slowest later stage optimal."""
    counts: list[int] = []
    for index, end in enumerate(extra[:-1]):
        left, rest = layers - sum(counts), extra[index + 1 :]
        costs = {n: max(n * layer + end, _slowest(left - n, layer, rest)) for n in range(1, left - len(rest) + 1)}
        counts.append(max(n for n, cost in costs.items() if cost == min(costs.values())))
    return [*counts, layers - sum(counts)]


def _slowest(layers: int, layer: float, extra: Sequence[float]) -> float:
    """Time of the slowest stage in the best split: the shortest in which all stages can take the layers."""
    times = sorted({n * layer + end for n, end in product(range(1, layers + 1), set(extra))})
    return next(most for most in times if _most(most, layer, extra) >= layers)


def _most(time: float, layer: float, extra: Sequence[float]) -> float:
    counts = [int((time - end) // layer) for end in extra]
    return sum(counts) if min(counts) >= 1 else 0


def flops(step: StepShape) -> tuple[float, list[float]]:
    """FLOPs of a layer and of embedding and head, forward, backward and recomputation: 2 per weight and score."""
    model = step.model
    attention = 4 * model.hidden_size * (step.sequence + 1) / 2
    weights = 2 * model.hidden_size**2 + 2 * model.hidden_size * model.n_kv_heads * model.n_head_dim
    weights += 3 * model.hidden_size * model.intermediate_size
    layer = 2 * weights + attention
    twice = 1 + (step.parallel.schedule in ("zbv", "interleaved-zero-bubble"))
    recomputed = {"none": 0.0, "selective": attention, "full": layer * twice}[step.policy]
    extra = [0.0] * step.parallel.stages
    extra[0], extra[-1] = 12.0 * model.hidden_size, 6.0 * model.hidden_size * model.vocab_size
    return 3 * layer + recomputed, extra


def step_of(
    model: ModelConfig, pipeline: int, schedule: Schedule, each: int, policy: str, tensor: int = 1
) -> StepShape:
    parallel = ParallelConfig(pipeline=pipeline, tensor=tensor, schedule=schedule, virtual_stages=each, zero=0)
    length = model.max_sequence_length or 4096
    return StepShape(model, parallel, pipeline * tensor, length, 4 * pipeline, 1, "mixed", policy)


def need(step: StepShape, rank: int, layers: int) -> float:
    return rank_bytes(step, rank, (layers / step.virtual,) * step.virtual).total


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize(("schedule", "each"), SCHEDULES)
@pytest.mark.parametrize("model", [LLAMA_3_8B, LLAMA_2_70B], ids=["8b", "70b"])
def test_the_balanced_split_is_never_worse_than_the_simpler_rule(
    model: ModelConfig, schedule: Schedule, each: int, policy: str
) -> None:
    for pipeline in (2, 3, 4, 6, 8, 16):
        if pipeline * each > model.layers:
            continue
        step = step_of(model, pipeline, schedule, each, policy)
        layer, extra = flops(step)
        ranks = [step.layout.stage_rank(stage) for stage in range(len(extra))]
        stages = StageCosts(ranks, layer, extra, partial(need, step))
        found = [len(layers) for layers in stage_layers(step)]
        assert criteria(found, stages) <= criteria(earlier_take_more(model.layers, layer, extra), stages), (
            pipeline,
            found,
        )


@pytest.mark.parametrize(
    ("model", "pipeline", "tensor", "before", "share"),
    [(LLAMA_3_8B, 16, 1, [3] * 8 + [1] * 8, 52 / 72), (LLAMA_2_70B, 32, 4, [2] + [3] * 16 + [2] * 15, 100 / 139)],
    ids=["8b", "70b"],
)
def test_the_fullest_rank_needs_less_memory_and_the_slowest_is_not_slower(
    model: ModelConfig, pipeline: int, tensor: int, before: list[int], share: float
) -> None:
    step = step_of(model, pipeline, "1f1b", 1, "none", tensor)
    layer, extra = flops(step)
    assert earlier_take_more(model.layers, layer, extra) == before
    counts = [sum(sizes) for sizes in stage_layer_counts(step)]

    def slowest(counts: list[int]) -> float:
        return max(n * layer + e for n, e in zip(counts, extra, strict=True))

    def fullest(counts: list[int]) -> float:
        return max(rank_bytes(step, rank, (n,)).total for rank, n in enumerate(counts))

    assert slowest(counts) <= slowest(before)
    assert fullest(counts) <= share * fullest(before)
    assert fullest(counts) == rank_bytes(step, peak_memory_rank(step), (counts[peak_memory_rank(step)],)).total


def test_an_explicit_split_is_used_unchanged() -> None:
    parallel = ParallelConfig(pipeline=2, split=(1, 31))
    assert stage_layers(StepShape(LLAMA_3_8B, parallel, 2, 128, 8)) == [range(1), range(1, 32)]


def test_recomputation_makes_the_head_cheaper_relative_to_layers() -> None:
    """A head costs 5 layers, but 15/4 if every layer runs forward twice: 7 | 2 + 5, and 6 | 3 + 3.75."""
    layer, _ = flops(step_of(LLAMA_3_8B, 2, "1f1b", 1, "none"))
    vocabulary = round(5 * layer / (6 * LLAMA_3_8B.hidden_size))
    model = LLAMA_3_8B.model_copy(update={"layers": 9, "vocab_size": vocabulary})
    found = [stage_layer_counts(step_of(model, 2, "1f1b", 1, policy)) for policy in ("none", "full")]
    assert found == [[(7,), (2,)], [(6,), (3,)]]


@pytest.mark.parametrize(("schedule", "each"), SCHEDULES)
def test_every_rank_has_its_stages_and_all_layers_are_counted(schedule: Schedule, each: int) -> None:
    """The numbers per rank, added up, are the layers of the model; none has stages of a rank that does not exist."""
    counts = stage_layer_counts(step_of(LLAMA_3_8B, 4, schedule, each, "none"))
    assert len(counts) == 4 and {len(stages) for stages in counts} == {each}
    assert sum(map(sum, counts)) == LLAMA_3_8B.layers
