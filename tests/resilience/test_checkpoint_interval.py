"""Checkpoint interval and expected goodput, compared with a simulation."""

import math
import random

import pytest

from hlat.resilience import best_interval, expected_goodput


def simulated(interval: float, stall: float, mtbf: float, restart: float, work: float, rng: random.Random) -> float:
    """Simulate the goodput of a run that needs ``work`` seconds of training."""
    wall = done = 0.0
    failure = rng.expovariate(1 / mtbf)  # seconds until the next failure
    while done < work:
        segment = interval + stall
        if failure > segment:
            failure, wall, done = failure - segment, wall + segment, done + interval
            continue
        wall += failure
        failure = rng.expovariate(1 / mtbf)
        while failure <= restart:  # it fails again during the restart
            wall += failure
            failure = rng.expovariate(1 / mtbf)
        failure, wall = failure - restart, wall + restart
    return done / wall


@pytest.mark.parametrize(
    ("interval", "stall", "mtbf", "restart"), [(10, 1, 60, 8), (100, 5, 3600, 120), (40, 2, 50, 20), (5, 0.01, 1000, 1)]
)
def test_expected_goodput_equals_that_of_a_simulation(interval, stall, mtbf, restart):
    rng, runs = random.Random(0), 40
    found = [simulated(interval, stall, mtbf, restart, 400 * mtbf, rng) for _ in range(runs)]
    mean = sum(found) / runs
    error = math.sqrt(sum((goodput - mean) ** 2 for goodput in found) / (runs - 1) / runs)
    # 5 standard errors, plus the last segment, which never fails: at most interval / (400 mtbf) of the time
    assert abs(mean - expected_goodput(interval, stall, mtbf, restart)) < 5 * error + interval / (400 * mtbf)


@pytest.mark.parametrize(("stall", "mtbf"), [(0.01, 60), (1, 60), (30, 3600), (50, 60)])
def test_the_best_interval_maximizes_goodput(stall, mtbf):
    best = best_interval(stall, mtbf)
    peak = max(expected_goodput(best * factor / 100, stall, mtbf, 0) for factor in range(10, 1000))
    # Daly gives the truncation error of his series as below 1 % of the wall time over this range of stall / mtbf
    assert expected_goodput(best, stall, mtbf, 0) >= peak * 0.99
    for factor in (0.25, 4):
        assert expected_goodput(best * factor, stall, mtbf, 0) < expected_goodput(best, stall, mtbf, 0)


def test_the_interval_is_the_mtbf_if_a_save_takes_longer_than_twice_of_it():
    assert best_interval(130, 60) == 60
