"""Bars as SVG: one bar of adjacent parts, with a legend that has every part's size.

parts and sizes -> figure: title, bar, a limit or an uncertainty, legend
"""

from collections.abc import Callable, Mapping

from hlat.page.elements import Html, text
from hlat.page.numbers import format_tick, make_axis
from hlat.page.style import colour

_WIDTH, _BAR, _HEIGHT = 400, 26, 58
_EDGE = 1.0


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

    Args:
        title: title of the chart.
        parts: size of each part by name; parts that are not positive are left out.
        form: formats a size for legend and tooltip.
        unit: unit of the axis.
        scale: size of one ``unit``.
        limit: size at which a line is drawn, such as the memory of a device.
        spread: least and greatest total that is to be expected, drawn as a whisker.
    """
    shown = {name: size for name, size in parts.items() if size > 0}
    if not shown:
        return ""
    total = sum(shown.values())
    width = max(total, limit or 0.0, spread[1] if spread else 0.0)
    axis = make_axis((0.0, width / scale))
    shapes, legend, x = [], [], _EDGE
    for number, (name, size) in enumerate(shown.items()):
        wide = size / width * (_WIDTH - 2 * _EDGE)
        label = text(f"{name}: {form(size)}")
        shapes.append(
            f'<rect class="edge" x="{x:.2f}" y="4" width="{wide:.2f}" height="{_BAR}" fill="{colour(number)}">'
            f"<title>{label}</title></rect>"
        )
        share = size / total
        swatch = f'<rect width="16" height="8" fill="{colour(number)}"/>'
        legend.append(f'<li><svg viewBox="0 0 16 8" aria-hidden="true">{swatch}</svg> {label} ({share:.1%})</li>')
        x += wide
    for tick in axis.ticks:
        place = _EDGE + axis.fraction(tick) * (_WIDTH - 2 * _EDGE)
        anchor = "start" if place < 16 else "end" if place > _WIDTH - 16 else "middle"
        shapes.append(f'<path class="axis" d="M{place:.1f},{4 + _BAR}v4"/>')
        shapes.append(f'<text class="tick" x="{place:.1f}" y="48" text-anchor="{anchor}">{format_tick(tick)}</text>')
    if limit is not None:
        place = _EDGE + limit / width * (_WIDTH - 2 * _EDGE)
        shapes.append(f'<path class="limit axis" d="M{place - 0.5:.1f},0V{_BAR + 8}" stroke-width="2"/>')
    if spread is not None:
        low, high = (_EDGE + end / width * (_WIDTH - 2 * _EDGE) for end in spread)
        middle = 4 + _BAR / 2
        shapes.append(f'<path class="halo spread" d="M{low:.1f},{middle}H{high:.1f}M{low:.1f},9v16M{high:.1f},9v16"/>')
    summary = f"{title}: " + ", ".join(f"{name} {form(size)}" for name, size in shown.items())
    return (
        f'<figure class="bar"><figcaption>{text(title)}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{text(summary)}"><title>{text(title)}</title>'
        f'{"".join(shapes)}</svg><ul class="legend">{"".join(legend)}</ul>'
        f"{f'<p>Axis in {text(unit)}.</p>' if unit else ''}</figure>"
    )
