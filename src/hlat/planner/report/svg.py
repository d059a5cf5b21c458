"""Pictures of a plan, as SVG that any browser draws without a script.

parts of a whole -> a bar | days, GiB of layouts -> the front | passes -> a row per pipeline rank
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
_HEIGHT, _MARGIN = 360, 50  # of the picture of the front
_SHOWN_PASSES = 6000


def bar(parts: dict[str, float], whole: float, unit: str, scale: float) -> str:
    """Parts side by side, to scale, with a legend."""
    x, shapes, legend = 0.0, [], []
    for index, (name, size) in enumerate(parts.items()):
        if size <= 0:
            continue
        colour, width = _COLOURS[index % len(_COLOURS)], size / whole * _WIDTH
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
    """A point of a picture, both numbers positive; ``group`` gives its colour."""

    x: float
    y: float
    filled: bool
    group: int
    label: str


def scatter(dots: Sequence[Dot], groups: Sequence[str], across: str, up: str) -> str:
    """Dots between logarithmic axes, the filled ones on top, and what the colours mean."""
    x, y = _Axis.of([dot.x for dot in dots]), _Axis.of([dot.y for dot in dots])
    wide, high = _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN
    shapes = [
        f'<path d="M{_MARGIN},{_MARGIN} V{_HEIGHT - _MARGIN} H{_WIDTH - _MARGIN}" fill="none" stroke="#888"/>',
        f'<text x="{_MARGIN}" y="{_HEIGHT - 20}">{_written(x.least)}</text>',
        f'<text x="{_WIDTH - _MARGIN}" y="{_HEIGHT - 20}" text-anchor="end">{_written(x.most)} {escape(across)}</text>',
        f'<text x="{_MARGIN + 8}" y="{_HEIGHT - _MARGIN - 8}">{_written(y.least)}</text>',
        f'<text x="{_MARGIN}" y="{_MARGIN - 20}">{_written(y.most)} {escape(up)}</text>',
    ]
    for dot in sorted(dots, key=lambda dot: dot.filled):
        place = f'cx="{_MARGIN + x.share(dot.x) * wide:.1f}" cy="{_MARGIN + (1 - y.share(dot.y)) * high:.1f}"'
        colour = _COLOURS[dot.group % len(_COLOURS)]
        paint = f'fill="{colour}"' if dot.filled else f'fill="none" stroke="{colour}"'
        shapes.append(f'<circle {place} r="5" {paint}><title>{escape(dot.label)}</title></circle>')
    legend = " &nbsp; ".join(
        f'<span style="color:{_COLOURS[index % len(_COLOURS)]}">&#9679;</span> {escape(name)}'
        for index, name in enumerate(groups)
    )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(shapes)}</svg><p>{legend}</p>'


def _written(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:,.3g} million"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@dataclass(frozen=True)
class _Axis:
    """Logarithmic."""

    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "_Axis":
        return cls(min(values), max(values))

    def share(self, value: float) -> float:
        """How far along it a value lies."""
        return math.log(value / self.least) / math.log(self.most / self.least) if self.most > self.least else 0.5


def timeline_picture(line: Timeline) -> str:
    """A row per pipeline rank, a box per pass."""
    height, total = 18, line.seconds
    each = max(1, _SHOWN_PASSES // len(line.ranks))
    shapes = []
    for rank, passes in enumerate(line.ranks):
        for one in passes[:each]:
            x, width = one.start / total * _WIDTH, (one.stop - one.start) / total * _WIDTH
            place = f'x="{x:.2f}" y="{rank * height}" width="{width:.2f}" height="{height - 3}"'
            paint = f'fill="{PASS_COLOURS[one.kind]}" stroke="white" stroke-width=".2"'
            what = f"{one.kind} {one.micro_batch}, stage {one.stage}"
            shapes.append(f"<rect {place} {paint}><title>{what}</title></rect>")
    size = len(line.ranks) * height
    return f'<svg viewBox="0 0 {_WIDTH} {size}" role="img">{"".join(shapes)}</svg>'
