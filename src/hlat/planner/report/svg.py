"""Charts of a plan as SVG, which browsers draw without scripts.

components -> bar chart | days and GiB of layouts -> scatter chart | passes -> one row per pipeline rank
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from hlat.planner.cost import Timeline

_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#222255", "#cc6633",
            "#999933", "#117733", "#882255", "#44aa99")  # fmt: skip
PASS_COLOURS = {"forward": "#4477aa", "backward": "#228833", "input": "#228833", "weight": "#ccbb44"}
_WIDTH = 960
_HEIGHT, _MARGIN = 360, 50  # of a scatter chart
_MAX_SHOWN_PASSES = 6000


def bar_chart(components: dict[str, float], total: float, unit: str, scale: float) -> str:
    """One bar of adjacent components, with a legend. ``total`` is the full width; labels show sizes in ``scale``."""
    x, shapes, legend = 0.0, [], []
    for index, (name, size) in enumerate(components.items()):
        if size <= 0:
            continue
        colour, width = _COLOURS[index % len(_COLOURS)], size / total * _WIDTH
        label = f"{name} {size / scale:.2f} {unit}"
        shapes.append(
            f'<rect x="{x:.1f}" y="0" width="{width:.1f}" height="28" fill="{colour}"><title>{label}</title></rect>'
        )
        legend.append(f'<span style="color:{colour}">&#9632;</span> {label}')
        x += width
    frame = f'<rect x="0" y="0" width="{_WIDTH}" height="28" fill="none" stroke="#888"/>'
    return f'<svg viewBox="0 0 {_WIDTH} 28" role="img">{"".join(shapes)}{frame}</svg><p>{" &nbsp; ".join(legend)}</p>'


@dataclass(frozen=True)
class Dot:
    """One point of a scatter chart; ``x`` and ``y`` are positive, ``group`` selects the colour."""

    x: float
    y: float
    filled: bool
    group: int
    label: str


def scatter_chart(dots: Sequence[Dot], groups: Sequence[str], across: str, up: str) -> str:
    """Scatter chart with logarithmic axes, the filled dots on top, and a legend of the groups."""
    x, y = _Axis.of([dot.x for dot in dots]), _Axis.of([dot.y for dot in dots])
    wide, high = _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN
    shapes = [
        f'<path d="M{_MARGIN},{_MARGIN} V{_HEIGHT - _MARGIN} H{_WIDTH - _MARGIN}" fill="none" stroke="#888"/>',
        f'<text x="{_MARGIN}" y="{_HEIGHT - 20}">{_format(x.least)}</text>',
        f'<text x="{_WIDTH - _MARGIN}" y="{_HEIGHT - 20}" text-anchor="end">{_format(x.most)} {escape(across)}</text>',
        f'<text x="{_MARGIN + 8}" y="{_HEIGHT - _MARGIN - 8}">{_format(y.least)}</text>',
        f'<text x="{_MARGIN}" y="{_MARGIN - 20}">{_format(y.most)} {escape(up)}</text>',
    ]
    for dot in sorted(dots, key=lambda dot: dot.filled):
        center = f'cx="{_MARGIN + x.fraction(dot.x) * wide:.1f}" cy="{_MARGIN + (1 - y.fraction(dot.y)) * high:.1f}"'
        colour = _COLOURS[dot.group % len(_COLOURS)]
        paint = f'fill="{colour}"' if dot.filled else f'fill="none" stroke="{colour}"'
        shapes.append(f'<circle {center} r="5" {paint}><title>{escape(dot.label)}</title></circle>')
    legend = " &nbsp; ".join(
        f'<span style="color:{_COLOURS[index % len(_COLOURS)]}">&#9679;</span> {escape(name)}'
        for index, name in enumerate(groups)
    )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(shapes)}</svg><p>{legend}</p>'


def _format(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:,.3g} million"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@dataclass(frozen=True)
class _Axis:
    """A logarithmic axis from ``least`` to ``most``."""

    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "_Axis":
        return cls(min(values), max(values))

    def fraction(self, value: float) -> float:
        """Position of a value along the axis, 0 to 1."""
        return math.log(value / self.least) / math.log(self.most / self.least) if self.most > self.least else 0.5


def timeline_chart(timeline: Timeline) -> str:
    """One row per pipeline rank, one box per pass; of a long step, the first passes."""
    height, total = 18, timeline.seconds
    per_rank = max(1, _MAX_SHOWN_PASSES // len(timeline.ranks))
    shapes = []
    for rank, passes in enumerate(timeline.ranks):
        for shown in passes[:per_rank]:
            x, width = shown.start / total * _WIDTH, (shown.stop - shown.start) / total * _WIDTH
            box = f'x="{x:.2f}" y="{rank * height}" width="{width:.2f}" height="{height - 3}"'
            paint = f'fill="{PASS_COLOURS[shown.kind]}" stroke="white" stroke-width=".2"'
            label = f"{shown.kind} {shown.micro_batch}, stage {shown.stage}"
            shapes.append(f"<rect {box} {paint}><title>{label}</title></rect>")
    size = len(timeline.ranks) * height
    return f'<svg viewBox="0 0 {_WIDTH} {size}" role="img">{"".join(shapes)}</svg>'
