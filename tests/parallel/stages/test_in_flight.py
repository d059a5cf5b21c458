"""The instants at which memory can peak dominate every instant of the replayed schedule."""

import random
from itertools import product

import pytest

from hlat.config.sections.training import Schedule
from hlat.parallel.stages.in_flight import _numbers, _replay, peak_instants, replayed

CASES: tuple[tuple[Schedule, int], ...] = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved-1f1b", 2),
    ("interleaved-zero-bubble", 2),
    ("zbv", 2),
)


@pytest.mark.parametrize(("schedule", "stages"), CASES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_largest_bytes_of_a_schedule_are_at_a_peak_instant(schedule: Schedule, stages: int, ranks: int) -> None:
    """Whatever the (non-negative) bytes of each number, no instant needs more than the kept ones."""
    rng = random.Random(17)
    sends, sizes = ((True, True),) * stages, tuple(float(3 + index) for index in range(stages))
    for rank, forward in product(range(ranks), (True, False)):
        count = 2 * ranks  # fewer than are replayed, so that nothing is added for later rounds
        all_instants = [each for each in _replay(schedule, rank, ranks, count, sends, sizes) if each.forward == forward]
        kept = [each for each in peak_instants(schedule, rank, ranks, count, sends, sizes) if each.forward == forward]
        assert all_instants and kept and set(kept) <= set(all_instants)
        for _ in range(20):
            cost = [rng.choice((0.0, rng.random())) for _ in _numbers(all_instants[0])]
            need = [
                max(sum(c * n for c, n in zip(cost, _numbers(each), strict=True)) for each in instants)
                for instants in (all_instants, kept)
            ]
            assert need[0] == need[1]


@pytest.mark.parametrize(("schedule", "stages"), CASES)
def test_the_peaks_of_a_step_are_known_from_the_micro_batches_that_are_replayed(
    schedule: Schedule, stages: int
) -> None:
    """GPipe keeps the activations of all; the rounds of other schedules repeat."""
    for ranks, rounds in product((2, 3), (5, 8)):
        count = rounds * ranks
        few = replayed(schedule, ranks, count)
        assert few == (count if schedule == "gpipe" else 4 * ranks)
        for rank in range(ranks):
            some, every = (
                peak_instants(schedule, rank, ranks, number, ((True, True),) * stages, (1.0,) * stages)
                for number in (few, count)
            )
            assert set(some) == set(every)
            assert schedule != "gpipe" or max(instant.alive for instant in some) == count
