"""Charts as SVG: lines, dots and bars, each a figure with a title and a legend.

    Series, Mark --line_chart--> extremes of each bucket -> axes with ticks, curves, marks, legend, slider, table
    Dot each, groups --scatter_chart--> logarithmic axes, one colour and shape per group, table of the marked dots
    parts and sizes --bar_chart--> one bar of adjacent parts, a limit or an uncertainty, legend with every part's size
    range of values --make_axis--> round ticks, linear or logarithmic -> their positions

A curve has a point at every step, more than a screen shows. So its range is cut into buckets of equal width, of which
the first, least, greatest and last point are drawn. The mean of a bucket would hide a spike of a single step; its least
and greatest points cannot. The slider of a line chart reads values, which are also there as a table.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hlat.page.elements import Html, colour, dashes, details, embedded_json, format_value, table, text

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

_LARGE = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_LEAST_RANGE = 1e-9  # a range that is smaller, relative to its values, is one value
_DECADES_WITH_HALVES = 2  # a logarithmic axis of at most so many decades also has ticks at 2 and 5


def format_tick(value: float) -> str:
    """Format the value of a tick in few characters, as ``1.5M``."""
    size = abs(value)
    for unit, letter in _LARGE:
        if size >= 0.99995 * unit:  # rounded to four digits, that is 1
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}" if size >= 1e-3 or value == 0 else f"{value:.0e}"


@dataclass(frozen=True)
class ChartAxis:
    """An axis from ``least`` to ``most``, with ticks between them."""

    least: float
    most: float
    log: bool
    ticks: tuple[float, ...]

    def fraction(self, value: float) -> float:
        """Return the position of a value along the axis, 0 to 1."""
        if self.log:
            return math.log(value / self.least) / math.log(self.most / self.least)
        return (value - self.least) / (self.most - self.least)


def make_axis(values: Sequence[float], *, log: bool = False, zero: bool = False, count: int = 5) -> ChartAxis:
    """Choose range and ticks of an axis, about ``count`` of them.

    ``log`` is ignored unless all values are positive; ``zero`` begins a linear axis at zero.
    """
    least, most = min(values), max(values)
    if log and least > 0:
        return _log_axis(least, most)
    if zero:
        least, most = min(least, 0.0), max(most, 0.0)
    # A constant curve runs through the middle, not along an edge.
    if most - least <= _LEAST_RANGE * max(abs(least), abs(most)):
        margin = abs(least) * 0.05 or 1.0
        least, most = least - (0.0 if zero and least == 0 else margin), most + margin
    return ChartAxis(least, most, False, _even_ticks(least, most, count))


def _even_ticks(least: float, most: float, count: int) -> tuple[float, ...]:
    # Round ticks need a step of 1, 2 or 5 times a power of ten.
    wanted = (most - least) / count
    power = 10.0 ** math.floor(math.log10(wanted))
    # Tolerances: a division may miss a whole number by its rounding error.
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wanted * (1 - 1e-9))
    first = math.ceil(least / step - 1e-9)
    return tuple(number * step for number in range(first, math.floor(most / step + 1e-9) + 1))


def _log_axis(least: float, most: float) -> ChartAxis:
    if most / least < 1.5:
        least, most = least / 1.3, most * 1.3
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(most))
    factors = (1, 2, 5) if high - low <= _DECADES_WITH_HALVES else (1,)
    every = max(1, (high - low) // 6)  # at most a dozen powers of ten have labels
    found = [factor * 10.0**power for power in range(low, high + 1, every) for factor in factors]
    ticks = tuple(tick for tick in found if least * (1 - 1e-9) <= tick <= most * (1 + 1e-9))
    return ChartAxis(least, most, True, ticks if len(ticks) > 1 else _even_ticks(least, most, 8))


_WIDTH = 400  # of every chart
_LEFT, _TOP, _BOTTOM = 48, 24, 38  # margins of a plot


@dataclass(frozen=True)
class _Plot:
    """An area between two axes: places of values in the SVG, which is ``height`` high."""

    x: ChartAxis
    y: ChartAxis
    height: int
    right: int  # margin
    end_labels: bool = False  # True: a label at the right edge ends there

    @property
    def bottom(self) -> int:
        return self.height - _BOTTOM

    @property
    def edge(self) -> int:
        return _WIDTH - self.right

    def across(self, value: float) -> float:
        return _LEFT + self.x.fraction(value) * (self.edge - _LEFT)

    def up(self, value: float) -> float:
        return _TOP + (1 - self.y.fraction(value)) * (self.bottom - _TOP)

    def axes(self, across: str, up: str) -> Iterator[Html]:
        for tick in self.y.ticks:
            place = self.up(tick)
            yield f'<path class="gridline" d="M{_LEFT},{place:.1f}H{self.edge}"/>'
            yield f'<text class="tick" x="{_LEFT - 4}" y="{place + 4:.1f}" text-anchor="end">{format_tick(tick)}</text>'
        for tick in self.x.ticks:
            place, low = self.across(tick), self.bottom + 16
            anchor = "end" if self.end_labels and place >= self.edge - 16 else "middle"
            yield f'<path class="axis" d="M{place:.1f},{self.bottom}v4"/>'
            yield f'<text class="tick" x="{place:.1f}" y="{low}" text-anchor="{anchor}">{format_tick(tick)}</text>'
        yield f'<path class="axis" d="M{_LEFT},{_TOP}V{self.bottom}H{self.edge}" fill="none"/>'
        yield f'<text x="{self.edge}" y="{self.height - 6}" text-anchor="end">{_label(across, self.x)}</text>'
        yield f'<text x="2" y="10">{_label(up, self.y)}</text>'


def _label(quantity: str, axis: ChartAxis) -> Html:
    return text(quantity) + (", logarithmic" if axis.log else "")


def _figure(kind: str, title: str, summary: str, height: int, shapes: Iterable[Html], below: Iterable[Html]) -> Html:
    """Make the figure of a chart; ``summary`` is what a screen reader says instead of the picture."""
    return (
        f'<figure class="{kind}"><figcaption>{text(title)}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{text(summary)}"><title>{text(title)}</title>'
        f"{''.join(shapes)}</svg>{''.join(below)}</figure>"
    )


def _legend(entries: Iterable[tuple[Html, Html]]) -> Html:
    """Make a list of swatches and their labels."""
    items = (f'<li><svg viewBox="0 0 16 8" aria-hidden="true">{swatch}</svg> {label}</li>' for swatch, label in entries)
    return f'<ul class="legend">{"".join(items)}</ul>'


_BUCKETS = 360  # about one per unit of the plot's width
_TABLE_ROWS = 24  # of a curve, besides its least and greatest value
_SLIDER_STEPS = 400
_MAX_MARKS = 120  # of one kind; more would be a grey area
_SPARSE = 60  # a series with fewer points also gets a dot at each of them
_GLYPHS = ("m-3,3h6l-3,-6z", "m-2.5,-2.5h5v5h-5z", "m0,-3l3,3l-3,3l-3,-3z", "m-3,-3h6l-3,6z", "m-3,-1h6v2h-6z")
"""Shapes of marks around their place: triangle, square, diamond, inverted triangle, bar."""
_WIDE_RANGE = 20.0  # greatest value / median from which a curve is drawn on a logarithmic axis


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
) -> Html:
    """Draw curves over a common axis; empty if no series has a finite point.

    ``across`` and ``up`` are quantity and unit of the axes. The vertical axis is logarithmic for a wide range of values
    above zero, unless it begins at ``zero``.
    """
    chosen = [(each, extremes(each.x, each.y, _BUCKETS)) for each in series]
    whole = [each for each, index in chosen if len(index)]
    drawn = [Series(each.name, each.x[index], each.y[index]) for each, index in chosen if len(index)]
    if not drawn:
        return ""
    every_x, every_y = np.concatenate([each.x for each in drawn]), np.concatenate([each.y for each in drawn])
    # On a linear axis a few high values would press the rest of the curve flat.
    log = bool(not zero and every_y.min() > 0 and every_y.max() > _WIDE_RANGE * np.median(every_y))
    x = make_axis((float(every_x.min()), float(every_x.max())))
    y = make_axis((float(every_y.min()), float(every_y.max())), log=log, zero=zero)
    plot = _Plot(x, y, height=240, right=10, end_labels=True)
    inside = [mark for mark in marks if x.least <= mark.x <= x.most]
    summary = _summary(title, drawn, across)
    shapes = [f"<desc>{text(summary)}</desc>", *plot.axes(across, up), *_marks(inside, plot)]
    for number, (each, points) in enumerate(zip(whole, drawn, strict=True)):
        shapes += _curve(points, plot, number)
        shapes += _not_finite(each, plot, number)
    shapes.append(f'<path class="cursor" d="M0,{_TOP}V{plot.bottom}"/>')
    data = {
        "from": x.least, "to": x.most, "log": x.log, "left": _LEFT, "width": plot.edge - _LEFT, "unit": across,
        "series": [{"name": each.name, "x": _short(each.x), "y": _short(each.y)} for each in drawn],
    }  # fmt: skip
    below = (
        _legend([*_curve_entries(drawn), *_mark_entries(inside)]),
        f'<input type="range" min="0" max="{_SLIDER_STEPS}" value="{_SLIDER_STEPS}" '
        f'aria-label="Read values: {text(title)}"><output aria-live="off"></output>'
        f'<script type="application/json">{embedded_json(data)}</script>',
        details("Values as a table", _table(title, drawn, across)),
    )
    return _figure("chart", title, summary, plot.height, shapes, below)


def _marks(marks: Sequence[Mark], plot: _Plot) -> Iterator[Html]:
    for row, (_, found) in enumerate(_by_kind(marks)):
        # Every n-th, rounded up, so that at most that many are drawn.
        for mark in found[:: -(-len(found) // _MAX_MARKS)]:
            place, low = plot.across(mark.x), plot.bottom - 6 - 9 * row
            line = f'<path class="mark" d="M{place:.1f},{_TOP}V{plot.bottom}"/>' if mark.full_height else ""
            glyph = f'<path class="glyph" d="M{place:.1f},{low}{_GLYPHS[row % len(_GLYPHS)]}"/>'
            yield f"<g><title>{text(mark.label)}</title>{line}{glyph}</g>"


def _by_kind(marks: Sequence[Mark]) -> list[tuple[str, list[Mark]]]:
    kinds = dict.fromkeys(mark.kind for mark in marks)
    return [(kind, [mark for mark in marks if mark.kind == kind]) for kind in kinds]


def _mark_entries(marks: Sequence[Mark]) -> Iterator[tuple[Html, Html]]:
    for row, (kind, found) in enumerate(_by_kind(marks)):
        yield f'<path class="glyph" d="M8,4{_GLYPHS[row % len(_GLYPHS)]}"/>', f"{text(kind)} ({len(found):,})"


def _dash(number: int) -> Html:
    return f' stroke-dasharray="{dashes(number)}"' if dashes(number) else ""


def _curve_entries(drawn: Sequence[Series]) -> Iterator[tuple[Html, Html]]:
    for number, each in enumerate(drawn):
        swatch = f'<path d="M0,4H16" stroke="{colour(number)}" stroke-width="3"{_dash(number)}/>'
        yield swatch, text(each.name)


def _curve(points: Series, plot: _Plot, number: int) -> Iterator[Html]:
    places = [(plot.across(float(a)), plot.up(float(b))) for a, b in zip(points.x, points.y, strict=True)]
    path = "M" + "L".join(f"{a:.1f},{b:.1f}" for a, b in places)
    yield (
        f'<path class="curve" d="{path}" fill="none" stroke="{colour(number)}" stroke-width="1.5" '
        f'stroke-linejoin="round"{_dash(number)}/>'
    )
    if len(places) <= _SPARSE:
        dots = "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.4"/>' for a, b in places)
        yield f'<g fill="{colour(number)}">{dots}</g>'


def _not_finite(series: Series, plot: _Plot, number: int) -> Iterator[Html]:
    # Values that are not finite have no place on the axis: a cross at the upper edge stands for them.
    bad = np.flatnonzero(~np.isfinite(series.y))
    for place in bad[:: max(1, len(bad) // _MAX_MARKS)]:
        value = float(series.x[place])
        if plot.x.least <= value <= plot.x.most:
            label = text(f"{series.name}: {float(series.y[place])} at {format_value(value)}")
            yield (
                f'<path class="not-finite" d="M{plot.across(value) - 3:.1f},{_TOP}l6,6m0,-6l-6,6" '
                f'stroke="{colour(number)}" stroke-width="2"><title>{label}</title></path>'
            )


def _summary(title: str, drawn: Sequence[Series], across: str) -> str:
    words = []
    for each in drawn:
        first, last, least, greatest = map(_value, (each.y[0], each.y[-1], each.y.min(), each.y.max()))
        words.append(f"{each.name}: from {first} to {last}, least {least}, greatest {greatest}")
    return f"{title}, over {across}. " + ". ".join(words) + "."


def _table(title: str, drawn: Sequence[Series], across: str) -> Html:
    rows = []
    for each in drawn:
        even = np.linspace(0, len(each.y) - 1, min(len(each.y), _TABLE_ROWS)).round().astype(int)
        chosen = np.unique(np.concatenate([even, [int(each.y.argmin()), int(each.y.argmax())]]))
        rows += [(each.name, _value(each.x[place]), _value(each.y[place])) for place in chosen]
    return table(("series", across, "value"), rows, caption=title)


def _value(number: np.float64) -> str:
    return format_value(float(number))


def _short(values: Floats) -> list[float]:
    # Six digits are as many as a reader compares; steps and tokens stay exact.
    return [float(f"{value:.6g}") if abs(value) < 1e5 or not math.isfinite(value) else float(value) for value in values]


_RING = 8  # radius
_MARGIN = 1.06  # factor between the outermost dots and the ends of an axis


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


def scatter_chart(title: str, dots: Sequence[Dot], groups: Sequence[str], across: str, up: str) -> Html:
    """Draw dots, at least one, over logarithmic axes, with a legend of the groups."""
    x = _scatter_axis([dot.x * end for dot in dots for end in dot.x_ends])
    y = _scatter_axis([dot.y * end for dot in dots for end in dot.y_ends])
    plot = _Plot(x, y, height=260, right=14)
    chosen = [dot for dot in dots if dot.chosen]
    words = [f"{dot.label}: {format_value(dot.x)} {across}, {format_value(dot.y)} {up}" for dot in chosen]
    summary = f"{title}: {len(dots)} layouts. Chosen: {'; '.join(words) or 'none'}."
    shapes = [f"<desc>{text(summary)}</desc>", *plot.axes(across, up)]
    # Later shapes cover earlier ones: the chosen dots are on top.
    for dot in sorted(dots, key=lambda dot: (dot.chosen, dot.filled)):
        shapes += _dot(dot, plot)
    entries = [
        (f'<circle cx="8" cy="4" r="3.5" fill="{colour(number)}"/>', text(name)) for number, name in enumerate(groups)
    ]
    if chosen:
        entries.append(('<circle cx="8" cy="4" r="3" class="halo"/>', "chosen; whiskers: expected range"))
    return _figure("scatter", title, summary, plot.height, shapes, [_legend(entries)])


def _scatter_axis(values: Sequence[float]) -> ChartAxis:
    return make_axis((min(values) / _MARGIN, max(values) * _MARGIN), log=True)


def _dot(dot: Dot, plot: _Plot) -> Iterator[Html]:
    a, b = plot.across(dot.x), plot.up(dot.y)
    if dot.chosen:
        left, right = (plot.across(dot.x * end) for end in dot.x_ends)
        low, high = (plot.up(dot.y * end) for end in dot.y_ends)
        yield f'<path class="spread axis" d="M{left:.1f},{b:.1f}H{right:.1f}M{a:.1f},{low:.1f}V{high:.1f}"/>'
        yield f'<circle class="halo" cx="{a:.1f}" cy="{b:.1f}" r="{_RING}"><title>chosen</title></circle>'
    shade = colour(dot.group)
    paint = f'fill="{shade}"' if dot.filled else f'fill="none" stroke="{shade}"'
    yield f'<circle class="dot" cx="{a:.1f}" cy="{b:.1f}" r="4.5" {paint}><title>{text(dot.label)}</title></circle>'


_BAR_THICKNESS, _BAR_HEIGHT = 26, 58
_BAR_EDGE = 1.0  # left free at both ends
_BAR_WIDTH = _WIDTH - 2 * _BAR_EDGE


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
    shapes, entries, x = [], [], _BAR_EDGE
    for number, (name, size) in enumerate(shown.items()):
        wide, label, shade = size / width * _BAR_WIDTH, text(f"{name}: {form(size)}"), colour(number)
        shapes.append(
            f'<rect class="edge" x="{x:.2f}" y="4" width="{wide:.2f}" height="{_BAR_THICKNESS}" fill="{shade}">'
            f"<title>{label}</title></rect>"
        )
        entries.append((f'<rect width="16" height="8" fill="{shade}"/>', f"{label} ({size / total:.1%})"))
        x += wide
    shapes += _bar_axis(make_axis((0.0, width / scale)))
    if limit is not None:
        place = _BAR_EDGE + limit / width * _BAR_WIDTH
        shapes.append(f'<path class="limit axis" d="M{place - 0.5:.1f},0V{_BAR_THICKNESS + 8}" stroke-width="2"/>')
    if spread is not None:
        low, high = (_BAR_EDGE + end / width * _BAR_WIDTH for end in spread)
        middle = 4 + _BAR_THICKNESS / 2
        shapes.append(f'<path class="halo spread" d="M{low:.1f},{middle}H{high:.1f}M{low:.1f},9v16M{high:.1f},9v16"/>')
    summary = f"{title}: " + ", ".join(f"{name} {form(size)}" for name, size in shown.items())
    below = [_legend(entries), f"<p>Axis in {text(unit)}.</p>" if unit else ""]
    return _figure("bar", title, summary, _BAR_HEIGHT, shapes, below)


def _bar_axis(axis: ChartAxis) -> Iterator[Html]:
    for tick in axis.ticks:
        place = _BAR_EDGE + axis.fraction(tick) * _BAR_WIDTH
        # A label at the edge would be cut off.
        anchor = "start" if place < 16 else "end" if place > _WIDTH - 16 else "middle"
        yield f'<path class="axis" d="M{place:.1f},{4 + _BAR_THICKNESS}v4"/>'
        yield f'<text class="tick" x="{place:.1f}" y="48" text-anchor="{anchor}">{format_tick(tick)}</text>'
