"""Charts: figures of Plotly as plain JSON, which page.js draws; each with a title, a legend and its values as a table.

    Series, Mark   --line_chart-->     extremes of each bucket; horizontal axes to choose from; what happened, below;
    Band                               a range around a curve
    Dot, groups    --scatter_chart-->  names on hover, the frontier of each group as a line
    parts by bar   --bar_chart-->      stacked parts, a limit, an uncertainty
    Span by row    --timeline_chart--> boxes by time
    rows, columns  --heat_map-->       cells with texts

A curve has a point at every step, more than a screen shows. So its range is cut into buckets of equal width, of which
the first, least, greatest and last point are drawn. The mean of a bucket would hide a spike of a single step; its least
and greatest points cannot.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

from hlat.page.elements import Html, colour, figure, format_value, table

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Trace = dict[str, Any]  # as Plotly takes it; ``places``, ``smooth`` and ``legend_...`` are for page.js and the legend

_DASHES = ("solid", "dash", "dot", "dashdot")  # so that colour is not the only difference
_DASH_ARRAYS = {"solid": "", "dash": "5 2", "dot": "2 2", "dashdot": "5 2 2 2"}
_MOST_DRAWN = 12  # curves that can be told apart; the reader chooses among the others
_MOST_POINTS = 14_000  # of the curves of a chart
_BUCKETS = 600  # of a curve: about one per two pixels of a large screen
_TABLE_ROWS = 24  # of a curve, besides its least and greatest value
_MAX_MARKS = 120  # of one kind; more would be a grey area
_SPARSE = 12  # a series with fewer points also gets a dot at each of them
_SYMBOLS = ("triangle-up", "square", "diamond", "triangle-down", "x")
_BAND_COLOUR = 7  # none of the first curves has it
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
    """A curve over one or several horizontal axes; values that are NaN or infinite are marked at the top."""

    name: str
    x: Floats | Sequence[Floats]  # each ascends; several are in the order of the chart's axes
    y: Floats
    style: tuple[int, int] | None = None  # numbers of colour and dashes; None for those of its place in the chart

    @property
    def places(self) -> Sequence[Floats]:
        return [self.x] if isinstance(self.x, np.ndarray) else self.x


@dataclass(frozen=True)
class Band:
    """A range around a curve, drawn below all curves; its horizontal places are as those of a ``Series``."""

    name: str
    x: Sequence[Floats]
    low: Floats
    high: Floats


@dataclass(frozen=True)
class Mark:
    """A place on the horizontal axes at which something happened."""

    x: float | Sequence[float]  # in the order of the chart's axes
    kind: str  # marks of one kind have the same shape, and one line of the legend
    label: str  # text of the tooltip
    full_height: bool = False  # True to draw a line through the whole chart too

    @property
    def places(self) -> Sequence[float]:
        return self.x if isinstance(self.x, Sequence) else [self.x]


def line_chart(
    title: str,
    series: Sequence[Series],
    across: str | Sequence[str],
    up: str,
    *,
    marks: Sequence[Mark] = (),
    band: Band | None = None,
    zero: bool = False,
    height: int = 260,
    drawn: int | None = None,
) -> Html:
    """Draw curves over a common axis; empty if no series has a finite point.

    The reader takes curves after the first ``drawn`` from a list, by default those after the first twelve.

    ``across`` is the quantity and unit of the horizontal axis, or of several: the page has one switch between them.
    The vertical axis, of ``up``, is logarithmic for a wide range of values above zero, unless it begins at ``zero``.
    """
    axes = [across] if isinstance(across, str) else list(across)
    buckets = min(_BUCKETS, max(60, _MOST_POINTS // (2 * len(series) or 1)))
    chosen = [(each, extremes(each.places[0], each.y, buckets)) for each in series]
    curves = [replace(each, x=[x[at] for x in each.places], y=each.y[at]) for each, at in chosen if len(at)]
    if not curves:
        return Html()
    whole = [each for each, at in chosen if len(at)]
    every_y = np.concatenate([each.y for each in curves])
    # On a linear axis a few high values would press the rest of the curve flat.
    log = bool(not zero and every_y.min() > 0 and every_y.max() > _WIDE_RANGE * np.median(every_y))
    traces = [] if band is None else [_band_trace(band)]
    traces += [_curve(each, number, number < (drawn or _MOST_DRAWN)) for number, each in enumerate(curves)]
    traces += [trace for number, each in enumerate(whole) for trace in _not_finite(each, number)]
    traces += _mark_traces(marks)
    layout = {
        "xaxis": {"title": {"text": axes[0]}},
        "yaxis": {
            "title": {"text": up},
            "type": "log" if log else "linear",
            "rangemode": "tozero" if zero else "normal",
        },
        "hovermode": "x unified",
        # Of marks: they stand above the lower edge, whatever the range of the curves is.
        "yaxis2": {"overlaying": "y", "range": [0, 1], "fixedrange": True, "visible": False},
    }
    content = {"data": traces, "layout": layout, "axes": axes}
    return figure(title, _summary(title, curves, axes[0]), content, height, _table(title, curves, axes[0]))


def _curve(points: Series, number: int, visible: bool) -> Trace:
    shade, dashes = points.style or (number, number // 4)
    paint, dash = colour(shade), _DASHES[dashes % len(_DASHES)]
    return {
        "type": "scatter",
        "name": points.name,
        "places": [_short(x) for x in points.places],
        "y": _short(points.y),
        "mode": "lines+markers" if len(points.y) <= _SPARSE else "lines",
        "line": {"color": paint, "width": 1.8, "dash": dash},
        "marker": {"size": 5},
        "visible": visible,
        "smooth": True,
        "legend_colour": paint,
        "legend_dashes": _DASH_ARRAYS[dash],
    }


def _band_trace(band: Band) -> Trace:
    # One outline, along the lower edge and back along the upper one, so that it is shown and hidden as a whole.
    shade = colour(_BAND_COLOUR)
    return {
        "type": "scatter", "name": band.name, "mode": "lines", "fill": "toself", "fillcolor": f"{shade}33",
        "places": [_short(np.concatenate([x, x[::-1]])) for x in band.x],
        "y": _short(np.concatenate([band.low, band.high[::-1]])), "line": {"width": 0, "color": shade},
        "hoverinfo": "skip", "visible": True, "legend_colour": shade,
    }  # fmt: skip


def _not_finite(each: Series, number: int) -> Iterator[Trace]:
    """Mark the values that no curve can show by crosses at the top."""
    where = np.flatnonzero(~np.isfinite(each.y))[:_MAX_MARKS]
    if len(where):
        yield _marker_trace(
            f"{each.name}, not finite",
            [_short(x[where]) for x in each.places],
            [0.97] * len(where),
            [f"{each.name}: {each.y[at]}" for at in where],
            {"symbol": "x", "color": colour(number), "size": 8},
        )


def _mark_traces(marks: Sequence[Mark]) -> Iterator[Trace]:
    for row, kind in enumerate(dict.fromkeys(mark.kind for mark in marks)):
        found = [mark for mark in marks if mark.kind == kind]
        shown = found[:: -(-len(found) // _MAX_MARKS)]  # every n-th, rounded up, so that at most that many are drawn
        shade, low = colour(9 + row), 0.025 + 0.04 * row
        places = [list(column) for column in zip(*(mark.places for mark in shown), strict=True)]
        up, labels = [low] * len(shown), [mark.label for mark in shown]
        marker: dict[str, Any] = {"symbol": _SYMBOLS[row % len(_SYMBOLS)], "color": shade, "size": 9}
        marker |= {"line": {"width": 0}, "opacity": 1}
        trace = _marker_trace(f"{kind} ({len(found):,})", places, up, labels, marker)
        if any(mark.full_height for mark in shown):
            # One line through the chart and a gap, for each mark.
            trace |= {
                "places": [[x for place in column for x in (place, place, None)] for column in places],
                "y": [y for _ in shown for y in (low, 1.0, None)],
                "text": [text for label in labels for text in (label, label, "")],
                "mode": "lines+markers",
                "line": {"color": shade, "width": 1, "dash": "dot"},
                "marker": marker | {"size": [size for _ in shown for size in (9, 0, 0)]},
            }
        yield trace


def _marker_trace(
    name: str, places: list[list[float]], up: list[float], labels: list[str], marker: dict[str, Any]
) -> Trace:
    return {
        "type": "scatter", "name": name, "places": places, "y": up, "yaxis": "y2", "mode": "markers", "text": labels,
        "hovertemplate": "%{text}<extra></extra>", "marker": marker, "visible": True, "legend_colour": marker["color"],
    }  # fmt: skip


def _summary(title: str, drawn: Sequence[Series], across: str) -> str:
    words = []
    for each in drawn[:_MOST_DRAWN]:
        first, last, least, greatest = map(_value, (each.y[0], each.y[-1], each.y.min(), each.y.max()))
        words.append(f"{each.name}: from {first} to {last}, least {least}, greatest {greatest}")
    more = f" And {len(drawn) - _MOST_DRAWN:,} more." if len(drawn) > _MOST_DRAWN else ""
    return f"{title}, over {across}. {'. '.join(words)}.{more} Arrow keys read values, + and - zoom, 0 shows all."


def _table(title: str, drawn: Sequence[Series], across: str) -> Html:
    rows = []
    for each in drawn[:_MOST_DRAWN]:
        even = np.linspace(0, len(each.y) - 1, min(len(each.y), _TABLE_ROWS)).round().astype(int)
        chosen = np.unique(np.concatenate([even, [int(each.y.argmin()), int(each.y.argmax())]]))
        rows += [(each.name, _value(each.places[0][place]), _value(each.y[place])) for place in chosen]
    more = len(drawn) - _MOST_DRAWN
    return table(("series", across, "value"), rows, caption=f"{title}; CSV has {more:,} more" if more > 0 else title)


def _value(number: np.float64) -> str:
    return format_value(float(number))


def _short(values: Floats) -> list[float]:
    # Six digits are as many as a reader compares; steps and tokens stay exact.
    return [float(f"{value:.6g}") if abs(value) < 1e5 or not math.isfinite(value) else float(value) for value in values]


@dataclass(frozen=True)
class Dot:
    """One point of a scatter chart."""

    x: float
    y: float
    group: int  # index of its group, which selects the colour
    label: str  # its name
    says: str = ""  # further lines of its tooltip
    best: bool = False  # a line joins the best dots of a group
    chosen: bool = False  # a star
    spread: tuple[float, float] | None = None  # ends of a line through it, as shares of x and of y


def scatter_chart(
    title: str,
    dots: Sequence[Dot],
    groups: Sequence[str],
    across: str,
    up: str,
    *,
    until: float | None = None,
    height: int = 460,
) -> Html:
    """Draw dots, at least one, and the frontier of each group: a line that steps from one of its best dots to the next.

    The first view ends at ``until``; dots beyond it are seen after zooming out.
    """
    traces = [trace for number, name in enumerate(groups) for trace in _group_traces(name, dots, number)]
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": across}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": up}, "rangemode": "tozero"},
    }
    if until is not None:
        least = min(dot.x for dot in dots)
        layout["xaxis"]["range"] = [least - 0.08 * (until - least), until]
    words = [f"{dot.label}: {format_value(dot.x)} {across}, {format_value(dot.y)} {up}" for dot in dots if dot.chosen]
    summary = f"{title}: {len(dots)} dots. Chosen: {'; '.join(words) or 'none'}."
    rows = [(dot.label, groups[dot.group], format_value(dot.x), format_value(dot.y)) for dot in dots]
    values = table(("name", "group", across, up), rows, caption=title)
    return figure(title, summary, {"data": traces, "layout": layout}, height, values)


def _group_traces(name: str, dots: Sequence[Dot], number: int) -> Iterator[Trace]:
    """Frontier, spread and dots of a group; all have its name, so that its button of the legend hides them together."""
    own, shade = [dot for dot in dots if dot.group == number], colour(number)
    best = sorted((dot for dot in own if dot.best), key=lambda dot: dot.x)
    lines = {"type": "scatter", "mode": "lines", "name": name, "hoverinfo": "skip", "showlegend": False}
    if len(best) > 1:
        path = {"shape": "hv", "dash": "dot", "width": 2, "color": shade}
        yield lines | {"x": [dot.x for dot in best], "y": [dot.y for dot in best], "line": path}
    for dot in own:
        if dot.spread is not None:
            ends = {"x": [share * dot.x for share in dot.spread], "y": [share * dot.y for share in dot.spread]}
            yield lines | ends | {"line": {"width": 4, "color": shade}, "opacity": 0.45, "mode": "lines+markers"}
    yield {
        "type": "scatter",
        "mode": "markers+text",
        "name": name,
        "x": [dot.x for dot in own],
        "y": [dot.y for dot in own],
        "text": [dot.label if len(own) == 1 else "" for dot in own],
        "textposition": "top left",
        # Plotly reads tags in texts. page.js escapes `text`; here are tags of our own, so names are escaped here.
        "hovertext": [_lines(f"<b>{escape(dot.label)}</b>\n{escape(dot.says)}") for dot in own],
        "hoverinfo": "text",
        "marker": {
            "color": shade,
            "opacity": 1,
            "size": [18 if dot.chosen else 10 for dot in own],
            "symbol": ["star" if dot.chosen else "circle" if dot.best else "circle-open" for dot in own],
        },
        "legend_colour": shade,
    }


def _lines(text: str) -> str:
    return text.replace("\n", "<br>")


_BAR, _AXES = 44, 72  # pixels of a bar, and of what is above and below it


def bar_chart(
    title: str,
    bars: Mapping[str, Mapping[str, float]],
    form: Callable[[float], str],
    *,
    unit: str = "",
    scale: float = 1.0,
    limit: float | None = None,
    limit_name: str = "limit",
) -> Html:
    """Draw bars of adjacent parts, each bar with a name that may be empty; empty if no part is positive.

    The axis counts in ``unit`` of size ``scale``. A line marks ``limit``, such as a device's memory.
    """
    names = [name for name, parts in bars.items() if sum(parts.values()) > 0]
    kinds = dict.fromkeys(kind for name in names for kind, size in bars[name].items() if size > 0)
    if not names:
        return Html()
    total = sum(sum(bars[name].values()) for name in names)
    traces = []
    for number, kind in enumerate(kinds):
        sizes = [bars[name].get(kind, 0.0) for name in names]
        legend = f"{kind}: {form(sum(sizes))} ({sum(sizes) / total:.1%})" if len(names) == 1 else kind
        traces.append(
            {"type": "bar", "orientation": "h", "name": legend, "y": names, "x": [size / scale for size in sizes],
             "text": [f"{kind}: {form(size)}" for size in sizes], "textposition": "none",
             "hovertemplate": "%{text}<extra></extra>", "marker": {"color": colour(number)},
             "legend_colour": colour(number)}
        )  # fmt: skip
    layout: dict[str, Any] = {
        "barmode": "stack",
        "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "fixedrange": True, "showgrid": False, "visible": len(names) > 1},
    }
    if limit is not None:
        line = {"type": "line", "x0": limit / scale, "x1": limit / scale, "yref": "paper", "y0": 0, "y1": 1}
        layout["shapes"] = [line | {"line": {"width": 2, "dash": "dash", "color": "#c2410c"}}]
        layout["annotations"] = [
            {"x": limit / scale, "y": 1, "yref": "paper", "yanchor": "bottom", "text": limit_name, "showarrow": False}
        ]
        # A shape does not widen the axis.
        layout["xaxis"]["autorangeoptions"] = {"include": 1.06 * limit / scale}
    rows = [(name or title, kind, form(bars[name].get(kind, 0.0))) for name in names for kind in kinds]
    values = table(("bar", "part", "size"), rows, caption=title)
    summary = f"{title}: " + ", ".join(f"{kind} {form(bars[names[0]].get(kind, 0.0))}" for kind in kinds)
    return figure(title, summary, {"data": traces, "layout": layout}, _AXES + _BAR * len(names), values)


@dataclass(frozen=True)
class Span:
    """A box of a time line."""

    row: str
    kind: str  # boxes of one kind have one colour
    start: float
    stop: float
    label: str  # text of the tooltip


def timeline_chart(title: str, spans: Sequence[Span], across: str, *, kinds: Sequence[str] = ()) -> Html:
    """Draw one row of boxes per ``row``, in the order of their first box; empty without a box.

    ``kinds`` is the order of colours and legend; default: that of their first box.
    """
    if not spans:
        return Html()
    rows = list(dict.fromkeys(span.row for span in spans))
    traces = []
    for number, kind in enumerate(kinds or dict.fromkeys(span.kind for span in spans)):
        found = [span for span in spans if span.kind == kind]
        traces.append(
            {"type": "bar", "orientation": "h", "name": kind, "base": _short(np.array([s.start for s in found])),
             "x": _short(np.array([s.stop - s.start for s in found])), "y": [s.row for s in found],
             "text": [s.label for s in found], "textposition": "none", "hovertemplate": "%{text}<extra></extra>",
             "marker": {"color": colour(number), "line": {"width": 0}},
             "legend_colour": colour(number)}
        )  # fmt: skip
    layout = {
        "barmode": "overlay",
        "bargap": 0.25,
        "xaxis": {"title": {"text": across}},
        "yaxis": {"autorange": "reversed", "fixedrange": True, "showgrid": False, "type": "category"},
    }
    shown = spans[: _TABLE_ROWS * 4]
    cells = [(each.row, each.label, format_value(each.start), format_value(each.stop)) for each in shown]
    caption = title if len(shown) == len(spans) else f"{title}: the first {len(shown)} of {len(spans):,}"
    values = table(("row", "what", "from", f"to, {across}"), cells, caption=caption)
    summary = f"{title}: {len(rows)} rows, {len(spans):,} boxes"
    return figure(title, summary, {"data": traces, "layout": layout}, _AXES + max(60, 24 * len(rows)), values)


def heat_map(
    title: str,
    columns: Sequence[str],
    rows: Sequence[str],
    values: Sequence[Sequence[float | None]],
    texts: Sequence[Sequence[str]],
    *,
    across: str = "",
    says: Sequence[Sequence[str]] = (),
) -> Html:
    """Draw cells by value, ``values[row][column]``; grey where it is None.

    ``texts`` are written into the cells, a line for each of theirs; ``says`` are tooltips, by default the same.
    """
    shared = {
        "type": "heatmap",
        "x": list(columns),
        "y": list(rows),
        "text": [[_lines(escape(text)) for text in row] for row in texts],
        "hovertext": [[_lines(escape(text)) for text in row] for row in says or texts],
        "texttemplate": "%{text}",
        "hoverinfo": "text",
        "hoverongaps": False,
        "textfont": {"color": "#14161a"},
        "showlegend": False,
        "showscale": False,
        "xgap": 2,
        "ygap": 2,
    }
    z = [list(row) for row in values]
    grey = [[0 if value is None else None for value in row] for row in z]
    # Dark text is read on all of these colours.
    scale, missing = [[0, "#e4eefb"], [1, "#6ea3e8"]], [[0, "#c3c8d0"], [1, "#c3c8d0"]]
    traces = [shared | {"z": z, "colorscale": scale}, shared | {"z": grey, "colorscale": missing}]
    layout = {
        "xaxis": {"title": {"text": across}, "type": "category", "showgrid": False},
        "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False},
    }
    cells = table(("", *columns), [(name, *row) for name, row in zip(rows, texts, strict=True)], caption=title)
    summary = f"{title}: {len(rows)} rows, {len(columns)} columns"
    lines = 1 + max(text.count("\n") for row in texts for text in row)
    height = _AXES + max(120, (14 + 20 * lines) * len(rows))
    return figure(title, summary, {"data": traces, "layout": layout}, height, cells)
