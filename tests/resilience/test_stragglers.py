"""A rank that works much longer than the others is reported once, and only if it delays them."""

from hlat.resilience import StragglerDetector
from tests.support.resilience.readings import reading


def check_windows(detector, *windows, seconds=10.0):
    """Return the stragglers found after each window of ten steps with these seconds of work per step."""
    totals, found = [0.0] * len(windows[0]), []
    detector.check([reading(rank, step=0) for rank in range(len(totals))], 0.0)
    for number, busy in enumerate(windows, start=1):
        totals = [total + 10 * work for total, work in zip(totals, busy, strict=True)]
        ranks = [
            reading(rank, step=10 * number, busy={"forward": total, "checkpoint": 50.0 * number * (rank == 0)})
            for rank, total in enumerate(totals)
        ]
        found.append(detector.check(ranks, seconds * number))
    return found


def test_a_straggler_is_reported_with_factor_and_phase():
    (found,) = check_windows(StragglerDetector(2.0), (0.3, 0.9, 0.3, 0.3))
    assert [(slow.rank, round(slow.factor, 6), slow.phase, slow.step) for slow in found] == [(1, 3.0, "forward", 10)]


def test_a_straggler_is_reported_once_until_it_has_recovered():
    fast, slow = (0.3, 0.3, 0.3), (0.3, 0.9, 0.3)
    found = check_windows(StragglerDetector(2.0), slow, slow, fast, slow)
    assert [len(each) for each in found] == [1, 0, 0, 1]


def test_ranks_with_similar_work_are_no_stragglers():
    assert check_windows(StragglerDetector(2.0), (0.3, 0.35, 0.5)) == [[]]


def test_a_rank_that_delays_no_other_is_no_straggler():
    assert check_windows(StragglerDetector(2.0), (0.01, 0.05, 0.01)) == [[]], "steps take 1 s, so 0.04 s delays no rank"


def test_short_windows_and_single_ranks_are_not_checked():
    assert check_windows(StragglerDetector(2.0), (0.3, 0.9), seconds=1.0) == [[]]
    assert check_windows(StragglerDetector(2.0), (0.9,)) == [[]]
    detector = StragglerDetector(2.0)
    detector.check([reading(0, step=0, first_step_at=None), reading(1, step=0)], 0.0)
    later = [reading(0, step=10, busy={"forward": 3.0}), reading(1, step=10, busy={"forward": 9.0})]
    assert detector.check(later, 10.0) == [], "no window starts before all ranks have begun a step"
