"""Every second of a run is counted once, in the right part."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlat.resilience import Goodput
from hlat.resilience.goodput import GOODPUT_PARTS
from tests.support.resilience.readings import reading

SECONDS = st.floats(0, 1000)


def trained(first_step_at, start_step, step, productive, saving=0.0, data=0.0, durable_step=None, durable_seconds=0.0):
    seconds = {"forward": productive, "checkpoint": saving, "data": data}
    return reading(
        first_step_at=first_step_at,
        start_step=start_step,
        step=step,
        durable_step=durable_step,
        durable_seconds=durable_seconds,
        seconds={name: value for name, value in seconds.items() if value},
    )


def test_a_run_that_fails_once():
    account = Goodput(100.0)
    # 10 s until the first step; 20 steps of 3 s; 5 s of saves; 1 s of data; 4 s until the failure is detected
    account.record_attempt(
        180.0, trained(110.0, 0, 20, 60.0, 5.0, 1.0, durable_step=10, durable_seconds=30.0), failed=True
    )
    assert account.totals() == parts(productive=30, saving=5, lost=34, starting=10, waiting=1), "as far as it is known"
    account.record_wait(182.0)
    # it resumes at step 15, whose save was completed after all; 8 s until its first step, 5 steps of 3 s, 2 s to end
    account.record_attempt(210.0, trained(190.0, 15, 20, 15.0, 3.0), failed=False)
    expected = parts(productive=45 + 15, saving=8, lost=15 + 4, starting=10 + 2, recovering=8, waiting=3)
    assert account.totals() == pytest.approx(expected)


def test_an_attempt_without_a_first_step_does_not_settle_the_lost_time():
    account = Goodput(0.0)
    account.record_attempt(40.0, trained(10.0, 0, 10, 30.0, durable_step=5, durable_seconds=10.0), failed=True)
    account.record_attempt(45.0, None, failed=True)
    account.record_attempt(60.0, trained(50.0, 0, 5, 10.0), failed=False)
    assert account.totals() == parts(productive=10, lost=30, starting=10, recovering=10), "no step was durable"


def test_lost_seconds_are_interpolated_from_the_known_save():
    account = Goodput(0.0)
    account.record_attempt(110.0, trained(10.0, 0, 10, 100.0, durable_step=5, durable_seconds=90.0), failed=True)
    account.record_attempt(110.0, trained(110.0, 5, 5, 0.0), failed=False)
    assert account.totals()["productive"] == pytest.approx(90.0)


def parts(**seconds):
    return {**dict.fromkeys(GOODPUT_PARTS, 0.0), **seconds}


@given(
    st.lists(st.tuples(SECONDS, st.one_of(st.none(), st.tuples(*[SECONDS] * 5)), st.booleans(), SECONDS), max_size=6),
    st.data(),
)
def test_the_parts_add_up_to_the_whole_time(attempts, data):
    now = begin = 1000.0
    account, step = Goodput(begin), 0
    for startup, phases, failed, pause in attempts:
        beat, now = None, now + startup
        if phases is not None:
            productive, saving, waiting, tail, durable_seconds = phases
            done = step + data.draw(st.integers(0, 20))
            durable_step = data.draw(st.one_of(st.none(), st.integers(step, done)))
            beat = trained(now, step, done, productive, saving, waiting, durable_step, min(durable_seconds, productive))
            now += productive + saving + waiting + tail
            step = data.draw(st.integers(step, done))
        account.record_attempt(now, beat, failed)
        now += pause
        account.record_wait(now)
        totals = account.totals()
        assert sum(totals.values()) == pytest.approx(now - begin, abs=1e-6)
        assert min(totals.values()) >= -1e-6
