"""Charts as SVG: lines, dots and bars, each a figure with a title and a legend.

    Series, Mark --line_chart--> extremes of each bucket -> axes with ticks, curves, marks, legend, slider, table
    Dot each, groups --scatter_chart--> logarithmic axes, one colour and shape per group, table of the marked dots
    parts and sizes --bar_chart--> one bar of adjacent parts, a limit or an uncertainty, legend with every part's size

A curve has a point at every step, more than a screen shows. So its range is cut into buckets of equal width, of which
the first, least, greatest and last point are drawn. The mean of a bucket would hide a spike of a single step; its least
and greatest points cannot. The slider of a line chart reads values, which are also there as a table.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hlat.page.elements import Html, colour, dashes, details, embedded_json, table, text
from hlat.page.numbers import ChartAxis, format_tick, format_value, make_axis

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


def extremes(x: Floats, y: Floats, buckets: int) -> Indices:
    """Return ascending indices of the points to draw: the extremes of each bucket, and the ends of the curve.

    ``x`` ascends, shape (points,); NaN and infinities of ``y`` are never chosen. All finite points are, if there are at
    most two per bucket.
    """
    finite = np.flatnonzero(np.isfinite(y) & np.isfinite(x))
    if len(finite) <= 2 * buckets:
        return finite.astype(np.int64)
    places, values = x[finite], y[finite]
    width = (places[-1] - places[0]) or 1.0
    bucket = np.minimum(((places - places[0]) / width * buckets).astype(np.int64), buckets - 1)
    # The first and last of a bucket in this order are its least and greatest.
    by_value = np.lexsort((values, bucket))
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))  # bucket is ascending, as x is
    stops = np.append(starts[1:], len(bucket)) - 1
    chosen = np.concatenate([by_value[starts], by_value[stops], [0, len(finite) - 1]])
    return np.asarray(finite[np.unique(chosen)], dtype=np.int64)


_WIDTH, _HEIGHT = 400, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 10, 24, 38
_BUCKETS = 360  # about one per unit of the plot's width
_TABLE_ROWS = 24  # of a curve, besides its least and greatest value
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
    """A place on the horizontal axis at which something happened."""

    x: float
    kind: str  # marks of one kind have the same shape, and one line of the legend
    label: str  # text of the tooltip
    full_height: bool = False  # True to draw a line through the whole chart too


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

    ``across`` and ``up`` are quantity and unit of the axes. ``log`` None takes a logarithmic vertical axis for a wide
    range of values that begins above zero.
    """
    drawn = [(each, extremes(each.x, each.y, _BUCKETS)) for each in series]
    kept = [(each, index) for each, index in drawn if len(index)]
    if not kept:
        return ""
    every_x = np.concatenate([each.x[index] for each, index in kept])
    every_y = np.concatenate([each.y[index] for each, index in kept])
    # On a linear axis a few high values would press the rest of the curve flat.
    if log is None:
        log = bool(not zero and every_y.min() > 0 and every_y.max() > _WIDE_RANGE * np.median(every_y))
    x = make_axis((float(every_x.min()), float(every_x.max())))
    y = make_axis((float(every_y.min()), float(every_y.max())), log=log, zero=zero)
    inside = [mark for mark in marks if x.least <= mark.x <= x.most]
    shapes = [*_line_axes(x, y, across, up), *_marks(inside, x)]
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


def _across(x: ChartAxis, value: float) -> float:
    return _LEFT + x.fraction(value) * _plot_width()


def _up(y: ChartAxis, value: float) -> float:
    return _TOP + (1 - y.fraction(value)) * _plot_height()


def _line_axes(x: ChartAxis, y: ChartAxis, across: str, up: str) -> Iterator[Html]:
    bottom = _HEIGHT - _BOTTOM
    for tick in y.ticks:
        place = _up(y, tick)
        yield f'<path class="gridline" d="M{_LEFT},{place:.1f}H{_WIDTH - _RIGHT}"/>'
        yield f'<text class="tick" x="{_LEFT - 4}" y="{place + 4:.1f}" text-anchor="end">{format_tick(tick)}</text>'
    for tick in x.ticks:
        place = _across(x, tick)
        anchor = "middle" if place < _WIDTH - _RIGHT - 16 else "end"  # a label at the edge would be cut off
        yield f'<path class="axis" d="M{place:.1f},{bottom}v4"/>'
        yield f'<text class="tick" x="{place:.1f}" y="{bottom + 16}" text-anchor="{anchor}">{format_tick(tick)}</text>'
    yield f'<path class="axis" d="M{_LEFT},{_TOP}V{bottom}H{_WIDTH - _RIGHT}" fill="none"/>'
    yield f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 6}" text-anchor="end">{text(across)}</text>'
    scale = ", logarithmic" if y.log else ""
    yield f'<text x="2" y="10">{text(up)}{scale}</text>'


def _marks(marks: Sequence[Mark], x: ChartAxis) -> Iterator[Html]:
    for row, kind in enumerate(_kinds(marks)):
        found = [mark for mark in marks if mark.kind == kind]
        # Every n-th, rounded up, so that at most that many are drawn.
        for mark in found[:: -(-len(found) // _MAX_MARKS)]:
            place, low = _across(x, mark.x), _HEIGHT - _BOTTOM - 6 - 9 * row
            line = f'<path class="mark" d="M{place:.1f},{_TOP}V{_HEIGHT - _BOTTOM}"/>' if mark.full_height else ""
            glyph = f'<path class="glyph" d="M{place:.1f},{low}{_GLYPHS[row % len(_GLYPHS)]}"/>'
            yield f"<g><title>{text(mark.label)}</title>{line}{glyph}</g>"


def _kinds(marks: Sequence[Mark]) -> list[str]:
    return list(dict.fromkeys(mark.kind for mark in marks))


def _curve(series: Series, index: Indices, x: ChartAxis, y: ChartAxis, number: int) -> Iterator[Html]:
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


def _not_finite(series: Series, x: ChartAxis, number: int) -> Iterator[Html]:
    # Values that are not finite have no place on the axis: a cross at the upper edge stands for them.
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
    # For screen readers.
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
    # Six digits are as many as a reader compares; steps and tokens stay exact.
    return [float(f"{value:.6g}") if abs(value) < 1e5 or not math.isfinite(value) else float(value) for value in values]


_SCATTER_WIDTH, _SCATTER_HEIGHT = 400, 260
_SCATTER_LEFT, _SCATTER_RIGHT, _SCATTER_TOP, _SCATTER_BOTTOM = 48, 14, 24, 38
_RING = 8  # radius
_SCATTER_MARGIN = 1.06  # factor between the outermost dots and the ends of an axis


@dataclass(frozen=True)
class Dot:
    """One point of a scatter chart."""

    x: float  # position, positive
    y: float  # position, positive
    filled: bool  # True for a filled dot, drawn above the others
    group: int  # index of its group, which selects the colour
    label: str  # text of the tooltip
    chosen: bool = False  # True to mark it with a ring and with whiskers
    x_ends: tuple[float, float] = (1.0, 1.0)  # ends of the whisker across, as shares of x
    y_ends: tuple[float, float] = (1.0, 1.0)  # ends of the whisker upwards, as shares of y


def scatter_chart(
    title: str,
    dots: Sequence[Dot],
    groups: Sequence[str],
    across: str,
    up: str,
) -> Html:
    """Draw dots, at least one, over logarithmic axes, with a legend of the groups."""
    x = _scatter_axis([dot.x * end for dot in dots for end in dot.x_ends])
    y = _scatter_axis([dot.y * end for dot in dots for end in dot.y_ends])
    shapes = [*_scatter_axes(x, y, across, up)]
    # Later shapes cover earlier ones: the chosen dots are on top.
    for dot in sorted(dots, key=lambda dot: (dot.chosen, dot.filled)):
        shapes += _dot(dot, x, y)
    chosen = [dot for dot in dots if dot.chosen]
    words = [f"{dot.label}: {format_value(dot.x)} {across}, {format_value(dot.y)} {up}" for dot in chosen]
    summary = f"{title}: {len(dots)} layouts. Chosen: {'; '.join(words) or 'none'}."
    legend = [
        f'<li><svg viewBox="0 0 16 8" aria-hidden="true"><circle cx="8" cy="4" r="3.5" fill="{colour(number)}"/></svg> '
        f"{text(name)}</li>"
        for number, name in enumerate(groups)
    ]
    if chosen:
        ring = '<circle cx="8" cy="4" r="3" class="halo"/>'
        legend.append(
            f'<li><svg viewBox="0 0 16 8" aria-hidden="true">{ring}</svg> chosen; whiskers: expected range</li>'
        )
    return (
        f'<figure class="scatter"><figcaption>{text(title)}</figcaption>'
        f'<svg viewBox="0 0 {_SCATTER_WIDTH} {_SCATTER_HEIGHT}" role="img" '
        f'aria-label="{text(summary)}"><title>{text(title)}</title>'
        f'<desc>{text(summary)}</desc>{"".join(shapes)}</svg><ul class="legend">{"".join(legend)}</ul></figure>'
    )


def _scatter_axis(values: Sequence[float]) -> ChartAxis:
    return make_axis((min(values) / _SCATTER_MARGIN, max(values) * _SCATTER_MARGIN), log=True)


def _dot_x(axis: ChartAxis, value: float) -> float:
    return _SCATTER_LEFT + axis.fraction(value) * (_SCATTER_WIDTH - _SCATTER_LEFT - _SCATTER_RIGHT)


def _dot_y(axis: ChartAxis, value: float) -> float:
    return _SCATTER_TOP + (1 - axis.fraction(value)) * (_SCATTER_HEIGHT - _SCATTER_TOP - _SCATTER_BOTTOM)


def _scatter_axes(x: ChartAxis, y: ChartAxis, across: str, up: str) -> Iterator[Html]:
    bottom, right = _SCATTER_HEIGHT - _SCATTER_BOTTOM, _SCATTER_WIDTH - _SCATTER_RIGHT
    for tick in y.ticks:
        place = _dot_y(y, tick)
        yield f'<path class="gridline" d="M{_SCATTER_LEFT},{place:.1f}H{right}"/>'
        label = format_tick(tick)
        yield f'<text class="tick" x="{_SCATTER_LEFT - 4}" y="{place + 4:.1f}" text-anchor="end">{label}</text>'
    for tick in x.ticks:
        place = _dot_x(x, tick)
        yield f'<path class="axis" d="M{place:.1f},{bottom}v4"/>'
        yield f'<text class="tick" x="{place:.1f}" y="{bottom + 16}" text-anchor="middle">{format_tick(tick)}</text>'
    yield f'<path class="axis" d="M{_SCATTER_LEFT},{_SCATTER_TOP}V{bottom}H{right}" fill="none"/>'
    yield f'<text x="{right}" y="{_SCATTER_HEIGHT - 6}" text-anchor="end">{text(across)}, logarithmic</text>'
    yield f'<text x="2" y="10">{text(up)}, logarithmic</text>'


def _dot(dot: Dot, x: ChartAxis, y: ChartAxis) -> Iterator[Html]:
    a, b = _dot_x(x, dot.x), _dot_y(y, dot.y)
    if dot.chosen:
        left, right = (_dot_x(x, dot.x * end) for end in dot.x_ends)
        low, high = (_dot_y(y, dot.y * end) for end in dot.y_ends)
        yield f'<path class="spread axis" d="M{left:.1f},{b:.1f}H{right:.1f}M{a:.1f},{low:.1f}V{high:.1f}"/>'
        yield f'<circle class="halo" cx="{a:.1f}" cy="{b:.1f}" r="{_RING}"><title>chosen</title></circle>'
    shade = colour(dot.group)
    paint = f'fill="{shade}"' if dot.filled else f'fill="none" stroke="{shade}"'
    yield f'<circle class="dot" cx="{a:.1f}" cy="{b:.1f}" r="4.5" {paint}><title>{text(dot.label)}</title></circle>'


_BAR_WIDTH, _BAR_THICKNESS, _BAR_HEIGHT = 400, 26, 58
_BAR_EDGE = 1.0  # left free at both ends


def bar_chart(
    title: str,
    parts: Mapping[str, float],
    form: Callable[[float], str],
    *,
    unit: str = "",
    scale: float = 1.0,
    limit: float | None = None,
    spread: tuple[float, float] | None = None,
) -> Html:
    """Draw one bar of adjacent parts; empty if no part is positive.

    The axis counts in ``unit`` of size ``scale``. A line marks ``limit``, such as a device's memory, a whisker the
    ``spread``: least and greatest total that is to be expected.
    """
    shown = {name: size for name, size in parts.items() if size > 0}
    if not shown:
        return ""
    total = sum(shown.values())
    width = max(total, limit or 0.0, spread[1] if spread else 0.0)
    axis = make_axis((0.0, width / scale))
    shapes, legend, x = [], [], _BAR_EDGE
    for number, (name, size) in enumerate(shown.items()):
        wide = size / width * (_BAR_WIDTH - 2 * _BAR_EDGE)
        label = text(f"{name}: {form(size)}")
        shapes.append(
            f'<rect class="edge" x="{x:.2f}" y="4" width="{wide:.2f}" height="{_BAR_THICKNESS}" '
            f'fill="{colour(number)}">'
            f"<title>{label}</title></rect>"
        )
        share = size / total
        swatch = f'<rect width="16" height="8" fill="{colour(number)}"/>'
        legend.append(f'<li><svg viewBox="0 0 16 8" aria-hidden="true">{swatch}</svg> {label} ({share:.1%})</li>')
        x += wide
    for tick in axis.ticks:
        place = _BAR_EDGE + axis.fraction(tick) * (_BAR_WIDTH - 2 * _BAR_EDGE)
        anchor = "start" if place < 16 else "end" if place > _BAR_WIDTH - 16 else "middle"  # as above
        shapes.append(f'<path class="axis" d="M{place:.1f},{4 + _BAR_THICKNESS}v4"/>')
        shapes.append(f'<text class="tick" x="{place:.1f}" y="48" text-anchor="{anchor}">{format_tick(tick)}</text>')
    if limit is not None:
        place = _BAR_EDGE + limit / width * (_BAR_WIDTH - 2 * _BAR_EDGE)
        shapes.append(f'<path class="limit axis" d="M{place - 0.5:.1f},0V{_BAR_THICKNESS + 8}" stroke-width="2"/>')
    if spread is not None:
        low, high = (_BAR_EDGE + end / width * (_BAR_WIDTH - 2 * _BAR_EDGE) for end in spread)
        middle = 4 + _BAR_THICKNESS / 2
        shapes.append(f'<path class="halo spread" d="M{low:.1f},{middle}H{high:.1f}M{low:.1f},9v16M{high:.1f},9v16"/>')
    summary = f"{title}: " + ", ".join(f"{name} {form(size)}" for name, size in shown.items())
    return (
        f'<figure class="bar"><figcaption>{text(title)}</figcaption>'
        f'<svg viewBox="0 0 {_BAR_WIDTH} {_BAR_HEIGHT}" role="img" '
        f'aria-label="{text(summary)}"><title>{text(title)}</title>'
        f'{"".join(shapes)}</svg><ul class="legend">{"".join(legend)}</ul>'
        f"{f'<p>Axis in {text(unit)}.</p>' if unit else ''}</figure>"
    )
