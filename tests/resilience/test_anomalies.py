"""Anomaly policy: spikes, window, budget, and its state in JSON."""

import json
import math
import random

import pytest

from hlat.config import BatchSchedule
from hlat.config.sections.operation import AnomalyConfig
from hlat.resilience import AnomalyPolicy
from hlat.resilience.anomalies import center_and_scale
from hlat.runtime.errors import CheckpointError

BATCH, TOKENS = 8, 10_000


def policy(**fields):
    return AnomalyPolicy(
        AnomalyConfig(**{"window": 16, "threshold": 10.0, **fields}), BatchSchedule(BATCH), TOKENS // BATCH
    )


def noisy(step):
    rng = random.Random(step)
    return 3.0 + 0.1 * rng.gauss(0, 1), 1.0 + 0.05 * rng.gauss(0, 1)


def check_steps(anomalies, steps, values=noisy):
    """Check some steps; return the actions."""
    return [anomalies.check(step, (step - 1) * BATCH, *values(step)).action for step in steps]


@pytest.mark.parametrize("bad", [(math.nan, 1.0), (3.0, math.nan), (math.inf, 1.0), (3.0, -math.inf)])
def test_a_non_finite_step_is_skipped_and_not_added_to_the_window(bad):
    disturbed, quiet = policy(), policy()
    assert check_steps(disturbed, range(1, 13)) == check_steps(quiet, range(1, 13)) == ["apply"] * 12
    verdict = disturbed.check(13, 96, *bad)
    assert (verdict.action, verdict.kind, verdict.samples) == ("skip", "non_finite", (96, 104))
    assert not verdict.applied
    state, expected = disturbed.state(), quiet.state()
    assert (state["losses"], state["norms"]) == (expected["losses"], expected["norms"])
    assert state["skipped_steps"] == [13]
    assert policy(non_finite="stop").check(1, 0, *bad).action == "stop"


@pytest.mark.parametrize(("spike", "action"), [("warn", "warn"), ("skip", "skip"), ("rollback", "rollback")])
@pytest.mark.parametrize("kind", ["loss_spike", "norm_spike"])
def test_a_spike_gets_the_action_of_the_recipe(spike, action, kind):
    anomalies = policy(spike=spike)
    check_steps(anomalies, range(1, 17))
    verdict = anomalies.check(17, 128, *((9.0, 1.0) if kind == "loss_spike" else (3.0, 5.0)))
    assert (verdict.action, verdict.kind, verdict.samples) == (action, kind, (128, 136))
    assert verdict.applied == (action == "warn")
    assert verdict.window["steps"] == 16 and abs(verdict.window["loss_median"] - 3.0) < 0.1
    assert (max(anomalies.state()["losses"]) == 9.0) == (action == "warn" and kind == "loss_spike")
    assert anomalies.skipped.next_step_start(16) == (136 if action == "rollback" else 128)


def test_ignored_spikes_are_not_reported():
    anomalies = policy(spike="ignore")
    check_steps(anomalies, range(1, 17))
    assert anomalies.check(17, 128, 9.0, 1.0).samples is None


def test_no_spike_is_found_before_a_quarter_of_the_window_is_filled():
    anomalies = policy(spike="skip")
    assert check_steps(anomalies, range(1, 5), lambda step: (10.0**step, 10.0**step)) == ["apply"] * 4
    assert anomalies.check(5, 32, 1e9, 1e9).action == "skip"


def test_falling_values_are_no_spike():
    anomalies = policy(spike="skip", threshold=4.0)
    assert set(check_steps(anomalies, range(1, 200), lambda step: (10 / step**0.3, 1e-6 if step == 150 else 1.0))) == {
        "apply"
    }


def test_sampling_noise_after_a_flat_window_is_no_spike():
    """The window is constant; then the loss rises by half of threshold / sqrt(tokens), and by twice of it."""
    anomalies = policy(spike="skip")
    check_steps(anomalies, range(1, 17), lambda step: (2.0, 2.0))
    floor = 10.0 * 2.0 / math.sqrt(TOKENS)
    assert anomalies.check(17, 128, 2.0 + floor / 2, 2.0).action == "apply"
    assert anomalies.check(18, 136, 2.0 + 2 * floor, 2.0).action == "skip"


def test_a_few_outliers_hardly_change_median_and_deviation():
    clean = [noisy(step)[0] for step in range(100)]
    center, deviation = center_and_scale(clean, 10**12)
    assert center == pytest.approx(3.0, abs=0.05) and deviation == pytest.approx(0.1, rel=0.3)
    with_outliers, wider = center_and_scale([*clean[:80], *[1e9] * 20], 10**12)
    assert with_outliers == pytest.approx(center, abs=0.05) and wider < 2 * deviation


def test_the_budget_counts_skips_and_rollbacks_of_one_window_only():
    anomalies = policy(budget=3, spike="rollback")
    check_steps(anomalies, range(1, 17))
    bad = {20: (math.nan, 1.0), 22: (9.0, 1.0), 24: (math.nan, 1.0)}
    assert {step: anomalies.check(step, step * BATCH, *numbers).action for step, numbers in bad.items()} == {
        20: "skip",
        22: "rollback",
        24: "skip",
    }
    later = AnomalyPolicy(
        AnomalyConfig(window=16, threshold=10.0, budget=3, spike="rollback"), BatchSchedule(BATCH), TOKENS // BATCH
    )
    later.restore(anomalies.state())
    stopped = anomalies.check(35, 280, math.nan, 1.0)
    assert stopped.action == "stop" and "3 steps were skipped or rolled back within 16" in stopped.reason
    assert later.check(36, 288, math.nan, 1.0).action == "skip", "step 20 is a window ago"


def test_a_restored_policy_decides_like_the_saved_one():
    """Restored from JSON at every step of a history with a skip and two rollbacks."""

    def numbers(step):
        loss, norm = noisy(step)
        return {30: (math.nan, norm), 41: (9.0, norm), 52: (loss, 7.0)}.get(step, (loss, norm))

    uninterrupted = policy(spike="rollback")
    states, verdicts = [], []
    for step in range(1, 80):
        states.append(json.dumps(uninterrupted.state(), allow_nan=False))
        verdicts.append(uninterrupted.check(step, uninterrupted.skipped.next_step_start(step - 1), *numbers(step)))
    for at, state in enumerate(states):
        resumed = policy(spike="rollback")
        resumed.restore(json.loads(state))
        assert json.dumps(resumed.state()) == state
        found = [
            resumed.check(step, resumed.skipped.next_step_start(step - 1), *numbers(step)) for step in range(at + 1, 80)
        ]
        assert found == verdicts[at:]


def test_a_rollback_forgets_the_undone_steps_and_keeps_the_skipped_samples():
    anomalies = policy(spike="rollback")
    check_steps(anomalies, range(1, 21))
    saved = anomalies.state()
    check_steps(anomalies, range(21, 23))
    assert anomalies.check(23, 176, math.nan, 1.0).action == "skip"
    assert anomalies.check(24, 184, 9.0, 1.0).action == "rollback"
    anomalies.roll_back(saved)
    assert anomalies.state() == {**saved, "rollbacks": [{"step": 24, "samples": [184, 192]}]}
    assert [anomalies.skipped.next_step_start(done) for done in (22, 23)] == [176, 192]
    anomalies.roll_back(None)
    assert anomalies.state()["losses"] == [] and anomalies.skipped.next_step_start(23) == 192


def test_during_a_ramp_the_bad_batch_is_the_one_that_was_read_and_the_scale_is_of_the_smallest_in_the_window():
    """In a flat window the deviation is at least |median| / sqrt(tokens), here of batches of 2 sequences, then of 8."""
    length = 1250
    batches = BatchSchedule(8, ((20, 2), (4, 4)))
    anomalies = AnomalyPolicy(AnomalyConfig(window=16, spike="rollback"), batches, length)
    for number in range(40):
        assert anomalies.check(number + 1, batches.first_of(number), 3.0, 1.0).action == "apply"
        verdict = AnomalyPolicy(AnomalyConfig(window=16, spike="warn"), batches, length)
        verdict.restore(anomalies.state())
        said = verdict.check(number + 2, batches.first_of(number + 1), 9.0, 1.0)
        if number >= 15:
            smallest = min(len(batches.batch(each)) for each in range(number - 15, number + 1))
            assert said.window["loss_deviation"] == 3.0 / math.sqrt(smallest * length), number
    anomalies = AnomalyPolicy(AnomalyConfig(window=16, spike="rollback"), batches, length)
    for number in range(21):
        anomalies.check(number + 1, batches.first_of(number), 3.0, 1.0)
    verdict = anomalies.check(22, 44, 9.0, 1.0)
    assert (verdict.action, verdict.samples) == ("rollback", (44, 48))
    assert [anomalies.skipped.next_step_start(done) for done in (20, 21, 22, 23)] == [40, 48, 52, 56]
    restored = AnomalyPolicy(AnomalyConfig(window=16, spike="rollback"), batches, length)
    restored.restore(json.loads(json.dumps(anomalies.state())))
    assert restored.state() == anomalies.state()


def test_a_missing_state_resets_the_policy_and_an_invalid_one_is_refused():
    anomalies = policy()
    anomalies.restore(None)
    assert anomalies.state() == policy().state()
    good = anomalies.state()
    for wrong in (
        {},
        [],
        {**good, "losses": ["x"]},
        {**good, "norms": [math.inf]},
        {**good, "rollbacks": [{"step": 3, "samples": [3, 11]}]},
        {**good, "rollbacks": [{"step": 3, "samples": [8]}]},
    ):
        with pytest.raises(CheckpointError, match="record of anomalies"):
            policy().restore(wrong)
