"""Charts keep what they are given: extremes, finite or not; texts stay texts."""

from html.parser import HTMLParser
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hlat.page import (
    Dot,
    Mark,
    Series,
    Span,
    bar_chart,
    details,
    duration,
    format_value,
    headline,
    heat_map,
    line_chart,
    page,
    preformatted,
    scatter_chart,
    table,
    tabs,
    timeline_chart,
)
from hlat.page.charts import extremes
from hlat.page.elements import colour
from tests.support.reporting import curves, figures

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202e"


@given(st.integers(3, 2000), st.integers(1, 50), st.integers(0, 2**32))
def test_every_bucket_keeps_its_extremes(points, buckets, seed):
    """Against a plain loop over the buckets."""
    random = Random(seed)  # of its own: thousands of draws from hypothesis are more than it allows
    x = np.cumsum([random.random() + 1e-3 for _ in range(points)])
    y = np.array([random.choice([random.gauss(0, 1), float("nan")]) for _ in range(points)])
    kept = set(extremes(x, y, buckets).tolist())
    there = [index for index in range(points) if np.isfinite(y[index])]
    for number in range(buckets):
        inside = [
            index
            for index in there
            if min(int((x[index] - x[there[0]]) / ((x[there[-1]] - x[there[0]]) or 1.0) * buckets), buckets - 1)
            == number
        ]
        if inside:
            values = y[inside]
            assert {values.min(), values.max()} <= {y[index] for index in inside if index in kept}
    assert len(kept) <= max(2 * buckets + 2, len(there))


def test_a_spike_of_one_step_in_200_000_is_drawn_at_its_height():
    x, y = np.arange(200_000.0), np.full(200_000, 2.0)
    y[123_456] = 9.0
    (curve,) = curves(line_chart("loss", [Series("loss", x, y)], "step", "nats"), "loss").values()
    assert curve["y"].count(9.0) == 1 and curve["places"][0][curve["y"].index(9.0)] == 123_456
    assert len(curve["y"]) < 3000


def test_a_curve_has_the_same_points_on_every_axis():
    steps = np.arange(5000.0)
    series = Series("loss", [steps * 64, steps, np.sqrt(steps)], np.sin(steps))
    (curve,) = curves(line_chart("loss", [series], ["tokens", "step", "hours"], "nats"), "loss").values()
    tokens, step, hours = map(np.array, curve["places"])
    assert np.array_equal(tokens, step * 64) and np.allclose(hours, np.sqrt(step), rtol=1e-5)
    assert np.allclose(curve["y"], np.sin(step), rtol=1e-5)


def test_values_that_are_not_finite_are_marked():
    y = np.array([1.0, np.inf, 2.0, np.nan])
    (found,) = figures(line_chart("loss", [Series("loss", np.arange(4.0), y)], "step", "nats")).values()
    curve, crosses = found["data"]
    assert curve["y"] == [1.0, 2.0] and crosses["text"] == ["loss: inf", "loss: nan"]
    assert crosses["places"] == [[1.0, 3.0]]
    assert line_chart("loss", [Series("loss", np.arange(2.0), np.array([np.nan, np.nan]))], "step", "nats") == ""


class Reader(HTMLParser):
    """Collects the elements and the text of a page as a browser would."""

    def __init__(self):
        super().__init__()
        self.tags, self.texts = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.texts += [value for _, value in attrs if value]

    def handle_data(self, data):
        self.texts.append(data)


def test_hostile_text_stays_text():
    series = [Series(HOSTILE, np.arange(3.0), np.arange(3.0))]
    contents = [
        line_chart(HOSTILE, series, HOSTILE, HOSTILE, marks=[Mark(1.0, HOSTILE, HOSTILE)]),
        bar_chart(HOSTILE, {HOSTILE: {HOSTILE: 1.0}}, str, unit=HOSTILE),
        timeline_chart(HOSTILE, [Span(HOSTILE, HOSTILE, 0.0, 1.0, HOSTILE)], HOSTILE),
        scatter_chart(HOSTILE, [Dot(1.0, 1.0, 0, HOSTILE, HOSTILE, True, True)], [HOSTILE], HOSTILE, HOSTILE),
        heat_map(HOSTILE, [HOSTILE], [HOSTILE], [[1.0]], [[HOSTILE]]),
        table((HOSTILE, HOSTILE), [(HOSTILE, HOSTILE)] * 3, caption=HOSTILE),
        headline([(HOSTILE, HOSTILE, HOSTILE)]),
        tabs([(HOSTILE, details(HOSTILE, preformatted(HOSTILE, HOSTILE)))]),
        HOSTILE,  # a part that nobody has made HTML of
    ]
    whole = page(HOSTILE, contents, version=HOSTILE)
    reader = Reader()
    reader.feed(whole)
    assert reader.tags.count("script") == 5 + 2, "the data of each chart, Plotly, and the page's own"
    assert "img" not in reader.tags and "\u202e" not in whole.replace("\\u202e", "")
    assert figures(contents[0]).popitem()[1]["data"][0]["name"] == HOSTILE
    seen = [text for text in reader.texts if "<script>alert(1)" in text]
    assert len(seen) > 40 and not any("&lt;" in text or "&amp;" in text for text in seen), "escaped once"


def test_a_hundred_parts_have_a_hundred_colours():
    assert len({colour(index) for index in range(100)}) == 100


def test_parts_of_bars_are_stacked_in_their_unit_with_limit():
    bars = {"rank 0": {"a": 3e3, "b": 1e3, "none": 0.0}, "rank 1": {"b": 2e3}}
    text = bar_chart("memory", bars, str, scale=1e3, limit=8e3)
    (found,) = figures(text).values()
    one, two = found["data"]
    assert (one["name"], one["x"], one["y"]) == ("a", [3.0, 0.0], ["rank 0", "rank 1"]) and two["x"] == [1.0, 2.0]
    assert found["layout"]["shapes"][0]["x0"] == 8.0 and found["layout"]["barmode"] == "stack"
    assert bar_chart("nothing", {"": {"a": 0.0}}, str) == ""


def test_a_wide_range_is_drawn_on_a_logarithmic_axis_unless_it_begins_at_zero():
    series = [Series("gnorm", np.arange(100.0), np.where(np.arange(100) == 50, 1e4, 1.0))]
    kinds = [
        figures(line_chart("g", series, "step", "norm", zero=zero))["g"]["layout"]["yaxis"]["type"]
        for zero in (False, True)
    ]
    assert kinds == ["log", "linear"]


def test_numbers_and_times_as_people_read_them():
    assert [format_value(v) for v in (0.123456, 12345.6, 1e6, float("nan"))] == ["0.1235", "12,346", "1,000,000", "nan"]
    assert [duration(s) for s in (0.5, 59, 300, 7300, 4 * 86400)] == ["0.5 s", "59 s", "5.0 min", "2.0 h", "4.0 days"]
