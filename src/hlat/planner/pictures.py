"""Pictures of a plan, as SVG that any browser draws without a script.

parts of a whole -> a bar | days, GiB of layouts -> the front | passes -> a row per pipeline rank
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from hlat.planner.pipeline import Timeline

_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#222255", "#cc6633",
            "#999933", "#117733", "#882255", "#44aa99")  # fmt: skip
PASS_COLOURS = {"forward": "#4477aa", "backward": "#228833", "input": "#228833", "weight": "#ccbb44"}
_WIDTH = 960
_HEIGHT, _MARGIN = 300, 45  # of the picture of the front
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
    """A point of a picture."""

    x: float
    y: float
    filled: bool
    label: str


def scatter(dots: Sequence[Dot], across: str, up: str) -> str:
    """Dots between axes that begin at 0, the filled ones on top."""
    most_x, most_y = 1.05 * max(dot.x for dot in dots), 1.05 * max(dot.y for dot in dots)
    shapes = [
        f'<path d="M{_MARGIN},0 V{_HEIGHT - _MARGIN} H{_WIDTH}" fill="none" stroke="#888"/>',
        f'<text x="{_WIDTH}" y="{_HEIGHT - 8}" text-anchor="end">{escape(across)}, 0 to {most_x:,.3g}</text>',
        f'<text x="{_MARGIN + 8}" y="16">{escape(up)}, 0 to {most_y:,.3g}</text>',
    ]
    for dot in sorted(dots, key=lambda dot: dot.filled):
        x = _MARGIN + dot.x / most_x * (_WIDTH - _MARGIN)
        y = (1 - dot.y / most_y) * (_HEIGHT - _MARGIN)
        paint = f'fill="{_COLOURS[0]}"' if dot.filled else 'fill="none" stroke="#888"'
        shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" {paint}><title>{escape(dot.label)}</title></circle>')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(shapes)}</svg>'


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
