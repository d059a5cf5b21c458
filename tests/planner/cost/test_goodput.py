"""Goodput: simulation, formula and published values."""

import random

import pytest

from hlat.hardware import load_catalog, parse_cluster
from hlat.planner.cost.goodput import Reliability, predict_reliability, simulate_goodput
from hlat.resilience import expected_goodput


@pytest.mark.parametrize(
    ("mtbf", "interval", "stall", "restart"),
    [(36000.0, 600.0, 10.0, 300.0), (7200.0, 900.0, 30.0, 600.0), (86400.0, 3600.0, 60.0, 900.0)],
)
def test_simulation_and_formula_agree(mtbf, interval, stall, restart):
    """Daly's formula also counts failures during restarts, so it is slightly lower."""
    one = Reliability(mtbf, stall, 0.0, restart, interval, expected_goodput(interval, stall, mtbf, restart))
    mean, worst_tenth = simulate_goodput(one, 400 * mtbf, random.Random(1), runs=40)
    assert mean == pytest.approx(one.goodput, abs=0.015)
    assert worst_tenth <= mean


def test_a_run_without_failures_loses_only_its_saves():
    one = Reliability(1e15, 10.0, 0.0, 300.0, 90.0, 0.9)
    assert simulate_goodput(one, 1e6, random.Random(1), runs=3)[0] == pytest.approx(0.9, abs=1e-3)


def test_reliability_of_the_llama_3_cluster_matches_its_paper():
    """The Llama 3 paper: 16,384 H100, one unexpected interruption per 3.1 hours, more than 90 % effective time."""
    expected = predict_reliability(parse_cluster("h100:2048", load_catalog()), 405e9 * 12)
    assert expected.mtbf / 3600 == pytest.approx(3.09, rel=0.03)
    assert expected.goodput > 0.9


def test_more_machines_fail_more_often():
    small, large = (predict_reliability(parse_cluster(f"p5.48xlarge:{n}", load_catalog()), 1e12) for n in (16, 256))
    assert small.mtbf > 2 * large.mtbf
    assert small.goodput > large.goodput
    assert small.interval > large.interval


def test_an_unfinished_background_save_is_lost_on_a_failure():
    one = Reliability(7200.0, 30.0, 600.0, 900.0, 900.0, 0.0)
    expected = expected_goodput(900.0, 30.0, 7200.0, 900.0, 600.0)
    assert simulate_goodput(one, 400 * 7200, random.Random(1), runs=40)[0] == pytest.approx(expected, abs=0.02)


def test_a_save_is_durable_before_the_next_begins():
    """10^16 bytes at 2 TB/s take 5000 seconds; formula and simulation agree even at a tenth of the time."""
    one = predict_reliability(parse_cluster("h100:2048", load_catalog()), 1e16)
    assert one.writing == pytest.approx(5000) and one.interval >= one.writing
    mean, _ = simulate_goodput(one, 400 * one.mtbf, random.Random(1), runs=40)
    assert one.goodput == pytest.approx(mean, abs=0.04)
