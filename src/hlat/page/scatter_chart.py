"""Scatter charts as SVG: logarithmic axes with ticks, one colour and shape per group, chosen points marked.

Dot each, groups -> figure: title, picture, legend, table of the marked dots
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hlat.page.elements import Html, text
from hlat.page.numbers import ChartAxis, format_tick, format_value, make_axis
from hlat.page.style import colour

_WIDTH, _HEIGHT = 400, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 14, 24, 38
_RING = 8
_MARGIN = 1.06  # factor between the outermost dots and the ends of an axis


@dataclass(frozen=True)
class Dot:
    """One point of a scatter chart.

    Attributes:
        x: position, positive.
        y: position, positive.
        filled: True for a filled dot, drawn above the others.
        group: index of its group, which selects the colour.
        label: text of the tooltip.
        chosen: True to mark it with a ring and with whiskers.
        x_ends: ends of the whisker across, as shares of x.
        y_ends: ends of the whisker upwards, as shares of y.
    """

    x: float
    y: float
    filled: bool
    group: int
    label: str
    chosen: bool = False
    x_ends: tuple[float, float] = (1.0, 1.0)
    y_ends: tuple[float, float] = (1.0, 1.0)


def scatter_chart(
    title: str,
    dots: Sequence[Dot],
    groups: Sequence[str],
    across: str,
    up: str,
) -> Html:
    """Draw dots over logarithmic axes.

    Args:
        title: title of the chart.
        dots: at least one.
        groups: names of the groups.
        across: quantity and unit of the horizontal axis.
        up: quantity and unit of the vertical axis.
    """
    x = _axis([dot.x * end for dot in dots for end in dot.x_ends])
    y = _axis([dot.y * end for dot in dots for end in dot.y_ends])
    shapes = [*_axes(x, y, across, up)]
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
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{text(summary)}"><title>{text(title)}</title>'
        f'<desc>{text(summary)}</desc>{"".join(shapes)}</svg><ul class="legend">{"".join(legend)}</ul></figure>'
    )


def _axis(values: Sequence[float]) -> ChartAxis:
    return make_axis((min(values) / _MARGIN, max(values) * _MARGIN), log=True)


def _x(axis: ChartAxis, value: float) -> float:
    return _LEFT + axis.fraction(value) * (_WIDTH - _LEFT - _RIGHT)


def _y(axis: ChartAxis, value: float) -> float:
    return _TOP + (1 - axis.fraction(value)) * (_HEIGHT - _TOP - _BOTTOM)


def _axes(x: ChartAxis, y: ChartAxis, across: str, up: str) -> Iterator[Html]:
    bottom = _HEIGHT - _BOTTOM
    for tick in y.ticks:
        place = _y(y, tick)
        yield f'<path class="gridline" d="M{_LEFT},{place:.1f}H{_WIDTH - _RIGHT}"/>'
        yield f'<text class="tick" x="{_LEFT - 4}" y="{place + 4:.1f}" text-anchor="end">{format_tick(tick)}</text>'
    for tick in x.ticks:
        place = _x(x, tick)
        yield f'<path class="axis" d="M{place:.1f},{bottom}v4"/>'
        yield f'<text class="tick" x="{place:.1f}" y="{bottom + 16}" text-anchor="middle">{format_tick(tick)}</text>'
    yield f'<path class="axis" d="M{_LEFT},{_TOP}V{bottom}H{_WIDTH - _RIGHT}" fill="none"/>'
    yield f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 6}" text-anchor="end">{text(across)}, logarithmic</text>'
    yield f'<text x="2" y="10">{text(up)}, logarithmic</text>'


def _dot(dot: Dot, x: ChartAxis, y: ChartAxis) -> Iterator[Html]:
    a, b = _x(x, dot.x), _y(y, dot.y)
    if dot.chosen:
        left, right = (_x(x, dot.x * end) for end in dot.x_ends)
        low, high = (_y(y, dot.y * end) for end in dot.y_ends)
        yield f'<path class="spread axis" d="M{left:.1f},{b:.1f}H{right:.1f}M{a:.1f},{low:.1f}V{high:.1f}"/>'
        yield f'<circle class="halo" cx="{a:.1f}" cy="{b:.1f}" r="{_RING}"><title>chosen</title></circle>'
    shade = colour(dot.group)
    paint = f'fill="{shade}"' if dot.filled else f'fill="none" stroke="{shade}"'
    yield f'<circle class="dot" cx="{a:.1f}" cy="{b:.1f}" r="4.5" {paint}><title>{text(dot.label)}</title></circle>'
