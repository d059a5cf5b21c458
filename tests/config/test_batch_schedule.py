"""Batch schedules equal a plain loop that counts tokens, for any stages."""

from dataclasses import dataclass
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlat.config import BatchSchedule
from hlat.config.load import parse_recipe
from hlat.config.sections.training import RampStage

BATCHES = 40


@dataclass(frozen=True)
class Case:
    """Fields of a recipe."""

    length: int
    stages: list[tuple[int, int]]  # tokens and batch of each
    size: int

    @property
    def schedule(self) -> BatchSchedule:
        ramp = [RampStage(tokens=tokens, global_batch=size) for tokens, size in self.stages]
        return BatchSchedule.of(self.size, ramp, self.length)

    def sizes(self, count: int = BATCHES) -> list[int]:
        """Sizes of the first ``count`` batches, by a loop: a stage ends with the step that reaches its tokens."""
        sizes: list[int] = []
        for tokens, size in self.stages:
            seen = 0
            while seen < tokens:
                seen += size * self.length
                sizes.append(size)
        return (sizes + [self.size] * count)[:count]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    length = draw(st.integers(1, 6))
    sizes = sorted(draw(st.sets(st.integers(1, 12), min_size=1, max_size=4)))
    return Case(length, [(draw(st.integers(1, 200)), size) for size in sizes[:-1]], sizes[-1])


@given(cases())
def test_boundaries_are_those_of_a_loop_over_the_batches(case: Case) -> None:
    schedule, sizes = case.schedule, case.sizes()
    firsts = [0, *accumulate(sizes)]
    assert [schedule.first_of(number) for number in range(BATCHES + 1)] == firsts
    for number, (first, size) in enumerate(zip(firsts, sizes, strict=False)):
        assert schedule.number_of(first) == number
        assert schedule.batch(number) == schedule.batch_at(first) == range(first, first + size)
        assert {schedule.containing(sample) for sample in range(first, first + size)} == {number}
        for inside in range(first + 1, first + size):
            with pytest.raises(ValueError, match="no global batch begins"):
                schedule.number_of(inside)
    assert set(sizes) <= set(schedule.sizes) and schedule.sizes[-1] == case.size
    with pytest.raises(ValueError, match="no global batch begins"):
        schedule.number_of(-1)


@given(cases(), st.integers(1, 400))
def test_steps_and_tokens_of_a_run_are_those_of_a_loop(case: Case, tokens: int) -> None:
    seen = steps = 0
    sizes = iter(case.sizes(tokens))
    while seen < tokens:
        seen += next(sizes) * case.length
        steps += 1
    content = {
        "model": {"vocab_size": 320, "layers": 1, "hidden_size": 8, "intermediate_size": 8, "heads": 1},
        "data": {"path": "text", "sequence_length": case.length},
        "batch": {
            "global_batch": case.size,
            "micro_batch": 1,
            "ramp": [{"tokens": each, "global_batch": size} for each, size in case.stages],
        },
        "training": {"tokens": tokens},
    }
    recipe = parse_recipe({**content, "data": {**content["data"], "tokenizer": {"vocab_size": 320}}})
    assert (recipe.total_steps, recipe.total_tokens) == (steps, seen)
    assert sum(count for count, _ in recipe.batches.in_steps(steps)) == steps
    by_stage = [size for count, size in recipe.batches.in_steps(steps) for _ in range(count)]
    assert by_stage == case.sizes(steps)


@given(st.integers(1, 64), st.integers(0, 10**12))
def test_without_a_ramp_it_is_a_multiplication(size: int, number: int) -> None:
    schedule = BatchSchedule(size)
    assert schedule.first_of(number) == number * size
    assert schedule.containing(number) == number // size
    assert schedule.count(number) == -(-number // size)
