"""Prometheus' text format, read by its own client."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlat.launch.metrics_server import MetricFamily, exposition
from tests.support.launch.metrics_lint import parse

# The client's parser splits lines as str.splitlines does; the format's only line end is \n.
TEXTS = st.text(st.characters(exclude_characters="\r\v\f\x1c\x1d\x1e\x85\u2028\u2029", exclude_categories=["Cs"]))


@given(TEXTS, st.floats())
def test_any_label_and_any_number_come_back(text: str, value: float) -> None:
    family = MetricFamily("hlat_run_info", "gauge", "A run,\nby \\ name.", [({"name": text}, value)])
    ((name, labels),) = (found := parse(exposition([family])))
    assert (name, dict(labels)) == ("hlat_run_info", {"name": text})
    (number,) = found.values()
    assert number == value or (math.isnan(number) and math.isnan(value))


@pytest.mark.parametrize(
    "family",
    [
        MetricFamily("hlat_restarts", "counter", "x", [({}, 1.0)]),
        MetricFamily("hlat_steps_total", "gauge", "x", [({}, 1.0)]),
        MetricFamily("hlat_age_minutes", "gauge", "x", [({}, 1.0)]),
        MetricFamily("hlat_Step", "gauge", "x", [({}, 1.0)]),
        MetricFamily("hlat_step", "gauge", "x", [({}, 1.0), ({}, 2.0)]),
        MetricFamily("hlat_step", "gauge", "", [({}, 1.0)]),
    ],
    ids=["counter without _total", "gauge with _total", "unit", "case", "twice", "no help"],
)
def test_the_check_of_names_finds_mistakes(family: MetricFamily) -> None:
    with pytest.raises(AssertionError):
        parse(exposition([family]))


def test_a_metric_without_series_is_left_out() -> None:
    assert exposition([MetricFamily("hlat_loss", "gauge", "Loss.")]) == ""
