"""Charts keep what they are given: extremes, finite or not; ticks are round and inside; texts stay texts."""

import html
import json
import re
from html.parser import HTMLParser
from random import Random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hlat.page import Mark, Series, bar_chart, colour, duration, format_value, line_chart, make_axis, page, table
from hlat.page.charts import extremes

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202e"


def curves(text):
    """The drawn points of each curve."""
    return [
        [tuple(map(float, point.split(","))) for point in path[1:].split("L")]
        for path in re.findall(r'class="curve" d="([^"]+)"', text)
    ]


def data(text):
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', text)[1])


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
    text = line_chart("loss", [Series("loss", x, y)], "step", "nats")
    (points,) = curves(text)
    heights = [up for _, up in points]
    assert len(points) < 1000 and heights.count(min(heights)) == 1, "one point is highest"
    assert 9.0 in data(text)["series"][0]["y"]


@pytest.mark.parametrize("log", [True, False])
@given(st.floats(1e-9, 1e12), st.floats(1e-9, 1e12))
@example(130000000066.0, 138461538563.0)
def test_ticks_are_inside_the_axis_and_enough(log, one, two):
    axis = make_axis((one, two), log=log)
    assert 2 <= len(axis.ticks) <= 25 and axis.least < axis.most
    assert all(-1e-6 <= axis.fraction(tick) <= 1 + 1e-6 for tick in axis.ticks)
    assert list(axis.ticks) == sorted(set(axis.ticks))


def test_values_that_are_not_finite_are_marked():
    y = np.array([1.0, np.inf, 2.0, np.nan])
    text = line_chart("loss", [Series("loss", np.arange(4.0), y)], "step", "nats")
    assert len(curves(text)[0]) == 2
    assert "loss: inf at 1" in text and "NaN" not in text.replace("loss: nan", "")
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
        bar_chart(HOSTILE, {HOSTILE: 1.0}, str, unit=HOSTILE),
        table((HOSTILE, HOSTILE), [(HOSTILE, HOSTILE)], caption=HOSTILE),
    ]
    whole = page(HOSTILE, contents, version=HOSTILE)
    reader = Reader()
    reader.feed(whole)
    assert reader.tags.count("script") == 2, "the data of one chart, and the page's own"
    assert "img" not in reader.tags and whole.count("\u202e") == 0
    assert data(contents[0])["series"][0]["name"] == HOSTILE
    assert sum(html.unescape(HOSTILE.replace("\u202e", "\\u202e")) in text for text in reader.texts) > 10


def test_a_hundred_parts_have_a_hundred_colours():
    assert len({colour(index) for index in range(100)}) == 100


def test_parts_of_a_bar_are_adjacent_and_as_long_as_their_shares():
    text = bar_chart("time", {"a": 3.0, "b": 1.0, "none": 0.0}, str, limit=8.0)
    boxes = re.findall(r'<rect class="edge" x="([\d.]+)" y="4" width="([\d.]+)"', text)
    (x1, w1), (x2, w2) = [(float(x), float(w)) for x, w in boxes]
    assert x1 + w1 == pytest.approx(x2, abs=0.01) and w1 == pytest.approx(3 * w2, rel=1e-3)
    assert w1 + w2 == pytest.approx((400 - 2) / 2, abs=0.02), "half of the limit"
    assert bar_chart("nothing", {"a": 0.0}, str) == ""


def test_numbers_and_times_as_people_read_them():
    assert [format_value(v) for v in (0.123456, 12345.6, 1e6, float("nan"))] == ["0.1235", "12,346", "1,000,000", "nan"]
    assert [duration(s) for s in (0.5, 59, 300, 7300, 4 * 86400)] == ["0.5 s", "59 s", "5.0 min", "2.0 h", "4.0 days"]
