"""How layers are shared out over stages, beside every other way of doing it, enumerated by a plain script."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlat.config.sections import ModelConfig, ParallelConfig, Schedule
from hlat.parallel.stages import StepShape, peak_memory_rank, rank_bytes, stage_layer_counts, stage_layers
from hlat.parallel.stages.stage_split import StageCosts, balance_layers

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


def worth(counts: Sequence[int], given: StageCosts) -> tuple[float, float, float]:
    """Time of the slowest rank, of the slowest stage, and bytes of the fullest rank."""
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
    """Up to 8 stages, in rounds or in a V, up to 10 layers; costs are whole numbers, so that sums are exact."""
    each, v = draw(st.integers(1, 3)), draw(st.booleans())
    ranks = draw(st.integers(1, 8 // each))
    order = [*range(ranks), *reversed(range(ranks))] if v and each == 2 else [*range(ranks)] * each
    layers = draw(st.integers(len(order), 10))
    whole = st.integers(0, 12)
    extra = [float(draw(whole)) if index in (0, len(order) - 1) else 0.0 for index in range(len(order))]
    base = draw(st.lists(whole, min_size=ranks, max_size=ranks))
    slope = draw(st.lists(st.integers(1, 9), min_size=ranks, max_size=ranks))
    return layers, StageCosts(order, 4.0, extra, lambda rank, n: base[rank] + slope[rank] * n, draw(st.booleans()))


@given(problems())
def test_no_split_has_a_faster_slowest_rank_then_stage_then_a_smaller_fullest_rank(
    problem: tuple[int, StageCosts],
) -> None:
    layers, given = problem
    found = balance_layers(layers, given)
    assert sum(found) == layers and all(found) and len(found) == len(given.ranks)
    assert worth(found, given) == min(worth(other, given) for other in every_split(layers, len(given.ranks)))


def earlier_take_more(layers: int, layer: float, extra: Sequence[float]) -> list[int]:
    """As it was: from the first stage on each takes the most with which the slowest from it on is as fast as can be."""
    counts: list[int] = []
    for index, end in enumerate(extra[:-1]):
        left, rest = layers - sum(counts), extra[index + 1 :]
        costs = {n: max(n * layer + end, _slowest(left - n, layer, rest)) for n in range(1, left - len(rest) + 1)}
        counts.append(max(n for n, cost in costs.items() if cost == min(costs.values())))
    return [*counts, layers - sum(counts)]


def _slowest(layers: int, layer: float, extra: Sequence[float]) -> float:
    """Slowest-stage time of the best split: the shortest in which all stages together can have so many layers."""
    times = sorted({n * layer + end for n, end in product(range(1, layers + 1), set(extra))})
    return next(most for most in times if _most(most, layer, extra) >= layers)


def _most(time: float, layer: float, extra: Sequence[float]) -> float:
    counts = [int((time - end) // layer) for end in extra]
    return sum(counts) if min(counts) >= 1 else 0


def flops(cut: StepShape) -> tuple[float, list[float]]:
    """Of a layer and of each stage's end of the model, forward, backward and again: 2 per weight and score, by hand."""
    model = cut.model
    attention = 4 * model.hidden_size * (cut.sequence + 1) / 2
    weights = 2 * model.hidden_size**2 + 2 * model.hidden_size * model.n_kv_heads * model.n_head_dim
    weights += 3 * model.hidden_size * model.intermediate_size
    layer = 2 * weights + attention
    twice = 1 + (cut.parallel.schedule in ("zbv", "interleaved-zero-bubble"))
    again = {"none": 0.0, "selective": attention, "full": layer * twice}[cut.policy]
    extra = [0.0] * cut.parallel.stages
    extra[0], extra[-1] = 12.0 * model.hidden_size, 6.0 * model.hidden_size * model.vocab_size
    return 3 * layer + again, extra


def cut_of(model: ModelConfig, pipeline: int, schedule: Schedule, each: int, policy: str, tensor: int = 1) -> StepShape:
    parallel = ParallelConfig(pipeline=pipeline, tensor=tensor, schedule=schedule, virtual_stages=each, zero=0)
    length = model.max_sequence_length or 4096
    return StepShape(model, parallel, pipeline * tensor, length, 4 * pipeline, 1, "mixed", policy)


def need(cut: StepShape, rank: int, layers: int) -> float:
    return rank_bytes(cut, rank, (layers / cut.virtual,) * cut.virtual).total


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize(("schedule", "each"), SCHEDULES)
@pytest.mark.parametrize("model", [LLAMA_3_8B, LLAMA_2_70B], ids=["8b", "70b"])
def test_no_layout_is_slower_or_at_the_same_speed_fuller_than_with_earlier_stages_taking_more(
    model: ModelConfig, schedule: Schedule, each: int, policy: str
) -> None:
    for pipeline in (2, 3, 4, 6, 8, 16):
        if pipeline * each > model.layers:
            continue
        cut = cut_of(model, pipeline, schedule, each, policy)
        layer, extra = flops(cut)
        ranks = [cut.layout.stage_rank(stage) for stage in range(len(extra))]
        stages = StageCosts(ranks, layer, extra, partial(need, cut))
        found = [len(layers) for layers in stage_layers(cut)]
        assert worth(found, stages) <= worth(earlier_take_more(model.layers, layer, extra), stages), (pipeline, found)


@pytest.mark.parametrize(
    ("model", "pipeline", "tensor", "before", "share"),
    [(LLAMA_3_8B, 16, 1, [3] * 8 + [1] * 8, 52 / 72), (LLAMA_2_70B, 32, 4, [2] + [3] * 16 + [2] * 15, 100 / 139)],
    ids=["8b", "70b"],
)
def test_the_fullest_rank_needs_less_and_the_slowest_is_no_slower(
    model: ModelConfig, pipeline: int, tensor: int, before: list[int], share: float
) -> None:
    cut = cut_of(model, pipeline, "1f1b", 1, "none", tensor)
    layer, extra = flops(cut)
    assert earlier_take_more(model.layers, layer, extra) == before
    counts = [sum(sizes) for sizes in stage_layer_counts(cut)]

    def slowest(counts: list[int]) -> float:
        return max(n * layer + e for n, e in zip(counts, extra, strict=True))

    def fullest(counts: list[int]) -> float:
        return max(rank_bytes(cut, rank, (n,)).total for rank, n in enumerate(counts))

    assert slowest(counts) <= slowest(before)
    assert fullest(counts) <= share * fullest(before)
    assert fullest(counts) == rank_bytes(cut, peak_memory_rank(cut), (counts[peak_memory_rank(cut)],)).total


def test_an_explicit_split_is_taken_as_it_is() -> None:
    parallel = ParallelConfig(pipeline=2, split=(1, 31))
    assert stage_layers(StepShape(LLAMA_3_8B, parallel, 2, 128, 8)) == [range(1), range(1, 32)]


def test_what_is_computed_again_makes_the_head_cheaper_than_as_many_layers() -> None:
    """A head of 5 layers is one of 15/4 where every layer runs forward twice: 7 | 2 + 5, and 6 | 3 + 3.75."""
    layer, _ = flops(cut_of(LLAMA_3_8B, 2, "1f1b", 1, "none"))
    vocabulary = round(5 * layer / (6 * LLAMA_3_8B.hidden_size))
    model = LLAMA_3_8B.model_copy(update={"layers": 9, "vocab_size": vocabulary})
    found = [stage_layer_counts(cut_of(model, 2, "1f1b", 1, policy)) for policy in ("none", "full")]
    assert found == [[(7,), (2,)], [(6,), (3,)]]
