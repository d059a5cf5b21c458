"""Restart policy: retryable failures, backoff, limit, and world size."""

import pytest

from hlat.resilience import Failure, RestartPolicy, WorldSizePolicy


def failure(kind="signal", rank=0, trained=True, start_step=0, durable_step=None, saves=0, mistake=""):
    return Failure(kind, rank, trained, start_step, durable_step, saves, mistake)


@pytest.mark.parametrize(
    ("kind", "before_training", "during"),
    [
        ("signal", True, True),
        ("hang", True, True),
        ("exit", True, True),
        ("exception", False, True),
        ("passing", False, True),
        ("user", False, False),
    ],
)
def test_failures_that_may_be_transient_are_restarted(kind, before_training, during):
    for trained, again in ((False, before_training), (True, during)):
        assert RestartPolicy(3, 1.0).decide(failure(kind, trained=trained)).restart is again


def test_without_progress_the_backoff_doubles_until_the_run_is_given_up():
    restarts = RestartPolicy(4, 1.0)
    decisions = [restarts.decide(failure(start_step=7)) for _ in range(5)]
    assert [decision.seconds for decision in decisions if decision.restart] == [1.0, 2.0, 4.0, 8.0]
    assert not decisions[4].restart and "4 restarts in a row brought no new checkpoint" in decisions[4].reason


def test_the_backoff_is_at_most_a_minute():
    restarts = RestartPolicy(20, 1.0)
    assert max(restarts.decide(failure()).seconds for _ in range(20)) == 60.0


@pytest.mark.parametrize(
    "progress", [{"durable_step": 20}, {"start_step": 20}], ids=["it saved", "the next attempt started there"]
)
def test_a_new_checkpoint_resets_the_count_of_restarts(progress):
    restarts = RestartPolicy(2, 1.0)
    assert [restarts.decide(failure(start_step=10)).restart for _ in range(2)] == [True, True]
    after = restarts.decide(failure(**{"start_step": 10, **progress}))
    assert (after.restart, after.seconds) == (True, 1.0)
    assert restarts.decide(failure(start_step=20)).restart and not restarts.decide(failure(start_step=20)).restart


def test_a_checkpoint_from_before_the_command_is_no_progress():
    restarts = RestartPolicy(1, 1.0)
    assert restarts.decide(failure(start_step=500)).restart
    assert not restarts.decide(failure(start_step=500)).restart


def test_attempts_without_a_first_step_are_no_progress():
    restarts = RestartPolicy(1, 1.0)
    assert restarts.decide(failure(start_step=3, durable_step=5)).restart
    assert not restarts.decide(failure(start_step=None, trained=True)).restart


def decisions(restarts, attempts):
    return [restarts.decide(failure("hang", **attempt)).restart for attempt in attempts]


def test_attempts_that_gain_one_checkpoint_each_are_given_up_after_ten():
    """A save that ends after the attempt that began it is found by the next one."""
    found_later = [{"start_step": 5 * number} for number in range(12)]
    restarts = RestartPolicy(3, 1.0)
    assert decisions(restarts, found_later[:9]) == [True] * 9
    last = restarts.decide(failure("hang", **found_later[9]))
    assert not last.restart and "each of the last 10 attempts gained one checkpoint at most" in last.reason
    known = [{"start_step": 5 * number, "durable_step": 5 * number + 5, "saves": 1} for number in range(12)]
    assert decisions(RestartPolicy(3, 1.0), known) == [True] * 9 + [False] * 3


@pytest.mark.parametrize("kind", ["host", "signal", "passing"])
def test_lost_machines_may_cost_every_second_checkpoint_for_ever(kind):
    """With a save every 2 h and a machine lost every 3 h, each attempt gains one: the run is productive."""
    restarts, steps = RestartPolicy(3, 1.0), range(0, 500, 5)
    assert all(
        restarts.decide(failure(kind, start_step=step, durable_step=step + 5, saves=1)).restart for step in steps
    )
    assert decisions(restarts, [{"start_step": 500 + 5 * number} for number in range(9)]) == [True] * 9


@pytest.mark.parametrize(
    "good", [{"durable_step": 30, "saves": 2}, {"durable_step": 25, "saves": 1}], ids=["known", "one found later"]
)
def test_an_attempt_that_gains_more_than_one_checkpoint_ends_the_count(good):
    meagre = [{"start_step": 5 * number} for number in range(5)]
    after = [{"start_step": 30 + 5 * number} for number in range(9)]
    assert decisions(RestartPolicy(3, 1.0), [*meagre, {"start_step": 20, **good}, *after]) == [True] * 15


def test_a_mistake_that_is_raised_again_without_progress_is_not_restarted():
    def restarted(*attempts):
        restarts = RestartPolicy(5, 1.0)
        return [restarts.decide(failure("exception", **attempt)).restart for attempt in attempts]

    one, other = {"mistake": "AttributeError at a.py:1 in step 3"}, {"mistake": "AttributeError at a.py:1 in step 4"}
    assert restarted(one, one) == [True, False]
    assert restarted(one, other, {}, one, other) == [True] * 5, "another step, another error in between"
    assert restarted(one, {**one, "durable_step": 7}) == [True, True], "it went on in between"
    assert restarted({}, {}, {}) == [True] * 3, "errors of devices and connections"


def test_a_limit_of_zero_never_restarts():
    decision = RestartPolicy(0, 1.0).decide(failure(durable_step=10))
    assert not decision.restart and "no restarts" in decision.reason


def test_a_rank_lost_twice_in_a_row_shrinks_the_world_size():
    sizes = WorldSizePolicy(2, 8, lambda count: count in (8, 4, 2))
    assert not sizes.shrink_after(failure(rank=3), progress=True)
    assert sizes.shrink_after(failure("hang", rank=3), progress=False) and sizes.now == 4
    assert not sizes.shrink_after(failure(rank=1), progress=False), "the ranks were renumbered"
    assert sizes.shrink_after(failure(rank=1), progress=False) and sizes.now == 2
    for _ in range(3):
        assert not sizes.shrink_after(failure(rank=1), progress=False), "not fewer than the minimum"


@pytest.mark.parametrize(
    ("first", "second", "progress"),
    [
        (failure(rank=3), failure(rank=2), False),
        (failure(rank=3), failure(rank=3), True),
        (failure(rank=3), failure("exception", rank=3), False),
        (failure("exception", rank=3), failure(rank=3), False),
    ],
    ids=["another rank", "progress in between", "then an exception", "first an exception"],
)
def test_otherwise_the_world_size_stays(first, second, progress):
    sizes = WorldSizePolicy(1, 4, lambda count: True)
    assert not sizes.shrink_after(first, progress=False)
    assert not sizes.shrink_after(second, progress) and sizes.now == 4


@pytest.mark.parametrize(
    ("start", "durable", "saved"), [(10, 20, True), (10, 10, False), (10, None, False), (None, None, False)]
)
def test_an_attempt_that_starts_from_a_late_save_of_the_one_before_has_saved_nothing_itself(start, durable, saved):
    assert failure(start_step=start, durable_step=durable).saved is saved
