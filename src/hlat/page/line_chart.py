"""Line charts as SVG: axes with ticks, marks, a legend, a slider that reads values, and the values as a table.

Series, Mark -> extremes of each bucket -> figure: title, picture, legend, slider, table
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hlat.page.downsample import Floats, Indices, extremes
from hlat.page.elements import Html, details, embedded_json, table, text
from hlat.page.numbers import Axis, format_tick, format_value, make_axis
from hlat.page.style import colour, dashes

_WIDTH, _HEIGHT = 400, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 10, 24, 38
_BUCKETS = 360  # about one per unit of the plot's width
_TABLE_ROWS = 24
_SLIDER_STEPS = 400
_MAX_MARKS = 120  # of one kind; more would be a grey area
_SPARSE = 60  # a series with fewer points also gets a dot at each of them
_GLYPHS = ("m-3,3h6l-3,-6z", "m-2.5,-2.5h5v5h-5z", "m0,-3l3,3l-3,3l-3,-3z", "m-3,-3h6l-3,6z", "m-3,-1h6v2h-6z")
"""Shapes of marks around their place: triangle, square, diamond, inverted triangle, bar."""
_WIDE_RANGE = 20.0  # greatest value / median from which a curve is drawn on a logarithmic axis


@dataclass(frozen=True)
class Series:
    """A curve; ``x`` ascends, values that are NaN or infinite are marked at the edge of the chart."""

    name: str
    x: Floats
    y: Floats


@dataclass(frozen=True)
class Mark:
    """A place on the horizontal axis at which something happened.

    Attributes:
        x: the place.
        kind: marks of one kind have the same shape, and one line of the legend.
        label: text of the tooltip.
        full_height: True to draw a line through the whole chart too.
    """

    x: float
    kind: str
    label: str
    full_height: bool = False


def line_chart(
    title: str,
    series: Sequence[Series],
    across: str,
    up: str,
    *,
    marks: Sequence[Mark] = (),
    zero: bool = False,
    log: bool | None = None,
) -> Html:
    """Draw curves over a common axis; empty if no series has a finite point.

    Args:
        title: title of the chart.
        series: the curves, first drawn first.
        across: quantity and unit of the horizontal axis.
        up: quantity and unit of the vertical axis.
        marks: events on the horizontal axis.
        zero: True to begin the vertical axis at zero.
        log: True for a logarithmic vertical axis; None takes one for a wide range of values that begins above zero.
    """
    drawn = [(each, extremes(each.x, each.y, _BUCKETS)) for each in series]
    kept = [(each, index) for each, index in drawn if len(index)]
    if not kept:
        return ""
    every_x = np.concatenate([each.x[index] for each, index in kept])
    every_y = np.concatenate([each.y[index] for each, index in kept])
    if log is None:
        log = bool(not zero and every_y.min() > 0 and every_y.max() > _WIDE_RANGE * np.median(every_y))
    x = make_axis((float(every_x.min()), float(every_x.max())), count=4)
    y = make_axis((float(every_y.min()), float(every_y.max())), log=log, zero=zero)
    inside = [mark for mark in marks if x.least <= mark.x <= x.most]
    shapes = [*_axes(x, y, across, up), *_marks(inside, x)]
    for number, (each, index) in enumerate(kept):
        shapes += _curve(each, index, x, y, number)
        shapes += _not_finite(each, x, number)
    summary = _summary(title, kept, across)
    label = text(title)
    svg = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{text(summary)}">'
        f"<title>{label}</title><desc>{text(summary)}</desc>{''.join(shapes)}"
        f'<path class="cursor" d="M0,{_TOP}V{_HEIGHT - _BOTTOM}"/></svg>'
    )
    data = {
        "from": x.least, "to": x.most, "log": x.log, "left": _LEFT, "width": _plot_width(), "unit": across,
        "series": [
            {"name": each.name, "x": _short(each.x[index]), "y": _short(each.y[index])} for each, index in kept
        ],
    }  # fmt: skip
    return (
        f'<figure class="chart"><figcaption>{label}</figcaption>{svg}{_legend(kept, inside)}'
        f'<input type="range" min="0" max="{_SLIDER_STEPS}" value="{_SLIDER_STEPS}" '
        f'aria-label="Read values: {label}"><output aria-live="off"></output>'
        f'<script type="application/json">{embedded_json(data)}</script>'
        f"{details('Values as a table', _table(title, kept, across))}</figure>"
    )


def _plot_width() -> float:
    return _WIDTH - _LEFT - _RIGHT


def _plot_height() -> float:
    return _HEIGHT - _TOP - _BOTTOM


def _across(x: Axis, value: float) -> float:
    return _LEFT + x.fraction(value) * _plot_width()


def _up(y: Axis, value: float) -> float:
    return _TOP + (1 - y.fraction(value)) * _plot_height()


def _axes(x: Axis, y: Axis, across: str, up: str) -> Iterator[Html]:
    bottom = _HEIGHT - _BOTTOM
    for tick in y.ticks:
        place = _up(y, tick)
        yield f'<path class="gridline" d="M{_LEFT},{place:.1f}H{_WIDTH - _RIGHT}"/>'
        yield f'<text class="tick" x="{_LEFT - 4}" y="{place + 4:.1f}" text-anchor="end">{format_tick(tick)}</text>'
    for tick in x.ticks:
        place = _across(x, tick)
        anchor = "middle" if place < _WIDTH - _RIGHT - 16 else "end"
        yield f'<path class="axis" d="M{place:.1f},{bottom}v4"/>'
        yield f'<text class="tick" x="{place:.1f}" y="{bottom + 16}" text-anchor="{anchor}">{format_tick(tick)}</text>'
    yield f'<path class="axis" d="M{_LEFT},{_TOP}V{bottom}H{_WIDTH - _RIGHT}" fill="none"/>'
    yield f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 6}" text-anchor="end">{text(across)}</text>'
    scale = ", logarithmic" if y.log else ""
    yield f'<text x="2" y="10">{text(up)}{scale}</text>'


def _marks(marks: Sequence[Mark], x: Axis) -> Iterator[Html]:
    for row, kind in enumerate(_kinds(marks)):
        found = [mark for mark in marks if mark.kind == kind]
        for mark in found[:: -(-len(found) // _MAX_MARKS)]:
            place, low = _across(x, mark.x), _HEIGHT - _BOTTOM - 6 - 9 * row
            line = f'<path class="mark" d="M{place:.1f},{_TOP}V{_HEIGHT - _BOTTOM}"/>' if mark.full_height else ""
            glyph = f'<path class="glyph" d="M{place:.1f},{low}{_GLYPHS[row % len(_GLYPHS)]}"/>'
            yield f"<g><title>{text(mark.label)}</title>{line}{glyph}</g>"


def _kinds(marks: Sequence[Mark]) -> list[str]:
    return list(dict.fromkeys(mark.kind for mark in marks))


def _curve(series: Series, index: Indices, x: Axis, y: Axis, number: int) -> Iterator[Html]:
    points = [(_across(x, float(a)), _up(y, float(b))) for a, b in zip(series.x[index], series.y[index], strict=True)]
    dash = f' stroke-dasharray="{dashes(number)}"' if dashes(number) else ""
    path = "M" + "L".join(f"{a:.1f},{b:.1f}" for a, b in points)
    yield (
        f'<path class="curve" d="{path}" fill="none" stroke="{colour(number)}" stroke-width="1.5" '
        f'stroke-linejoin="round"{dash}/>'
    )
    if len(points) <= _SPARSE:
        dots = "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.4"/>' for a, b in points)
        yield f'<g fill="{colour(number)}">{dots}</g>'


def _not_finite(series: Series, x: Axis, number: int) -> Iterator[Html]:
    """Mark values that are NaN or infinite with a cross at the upper edge."""
    bad = np.flatnonzero(~np.isfinite(series.y))
    for place in bad[:: max(1, len(bad) // _MAX_MARKS)]:
        value = float(series.x[place])
        if x.least <= value <= x.most:
            a, kind = _across(x, value), float(series.y[place])
            label = text(f"{series.name}: {kind} at {format_value(value)}")
            yield (
                f'<path class="not-finite" d="M{a - 3:.1f},{_TOP}l6,6m0,-6l-6,6" stroke="{colour(number)}" '
                f'stroke-width="2"><title>{label}</title></path>'
            )


def _legend(kept: Sequence[tuple[Series, Indices]], marks: Sequence[Mark]) -> Html:
    lines = []
    for number, (each, _) in enumerate(kept):
        dash = f' stroke-dasharray="{dashes(number)}"' if dashes(number) else ""
        swatch = f'<path d="M0,4H16" stroke="{colour(number)}" stroke-width="3"{dash}/>'
        lines.append(f'<li><svg viewBox="0 0 16 8" aria-hidden="true">{swatch}</svg> {text(each.name)}</li>')
    for row, kind in enumerate(_kinds(marks)):
        total = sum(mark.kind == kind for mark in marks)
        glyph = f'<path class="glyph" d="M8,4{_GLYPHS[row % len(_GLYPHS)]}"/>'
        lines.append(f'<li><svg viewBox="0 0 16 8" aria-hidden="true">{glyph}</svg> {text(kind)} ({total:,})</li>')
    return f'<ul class="legend">{"".join(lines)}</ul>'


def _summary(title: str, kept: Sequence[tuple[Series, Indices]], across: str) -> str:
    """Describe the curves in words, for screen readers."""
    words = []
    for each, index in kept:
        values = each.y[index]
        words.append(
            f"{each.name}: from {format_value(float(values[0]))} to {format_value(float(values[-1]))}, "
            f"least {format_value(float(values.min()))}, greatest {format_value(float(values.max()))}"
        )
    return f"{title}, over {across}. " + ". ".join(words) + "."


def _table(title: str, kept: Sequence[tuple[Series, Indices]], across: str) -> Html:
    rows = []
    for each, index in kept:
        values = each.y[index]
        even = np.linspace(0, len(index) - 1, min(len(index), _TABLE_ROWS)).round().astype(int)
        chosen = np.unique(np.concatenate([even, [int(values.argmin()), int(values.argmax())]]))
        rows += [
            (each.name, format_value(float(each.x[index[place]])), format_value(float(values[place])))
            for place in chosen
        ]
    return table(("series", across, "value"), rows, caption=title)


def _short(values: Floats) -> list[float]:
    """Round to six significant digits, as many as a reader compares."""
    return [float(f"{value:.6g}") if abs(value) < 1e5 or not math.isfinite(value) else float(value) for value in values]
