"""Timeline of a pipeline as SVG, which browsers draw without scripts: one row per pipeline rank.

passes of each rank -> boxes by time, numbered rows, an axis in seconds, a legend
"""

from hlat.page import Html, colour, format_tick, make_axis, text
from hlat.planner.cost.pipeline_sim import Timeline

_PASSES = {"forward": 0, "backward": 2, "input": 5, "weight": 4}
"""Number of the colour of each kind of pass."""
_WIDTH, _LEFT, _ROW = 960, 40, 18
_MAX_SHOWN_PASSES = 6000


def timeline_chart(title: str, timeline: Timeline) -> Html:
    """Draw one row per pipeline rank, one box per pass; of a long step, the first passes."""
    wide, total = _WIDTH - _LEFT - 1, timeline.seconds
    per_rank = max(1, _MAX_SHOWN_PASSES // len(timeline.ranks))
    shapes = []
    for rank, passes in enumerate(timeline.ranks):
        y = rank * _ROW
        shapes.append(f'<text x="{_LEFT - 6}" y="{y + 13}" text-anchor="end">{rank}</text>')
        for shown in passes[:per_rank]:
            x, width = _LEFT + shown.start / total * wide, (shown.stop - shown.start) / total * wide
            box = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 3}"'
            label = f"{shown.kind} {shown.micro_batch}, stage {shown.stage}"
            shapes.append(f'<rect class="edge" {box} fill="{_colour(shown.kind)}"><title>{text(label)}</title></rect>')
    bottom = len(timeline.ranks) * _ROW
    axis = make_axis((0.0, total), count=8)
    for tick in axis.ticks:
        place = _LEFT + tick / total * wide
        if place <= _WIDTH - 1:
            shapes.append(f'<path class="axis" d="M{place:.1f},{bottom}v5"/>')
            anchor = "end" if place > _WIDTH - 20 else "middle"
            where = f'x="{place:.1f}" y="{bottom + 18}" text-anchor="{anchor}"'
            shapes.append(f'<text class="tick" {where}>{format_tick(tick)}</text>')
    kinds = sorted({each.kind for rank in timeline.ranks for each in rank}, key=list(_PASSES).index)
    legend = "".join(
        f'<li><svg viewBox="0 0 16 8" aria-hidden="true"><rect width="16" height="8" fill="{_colour(kind)}"/></svg> '
        f"{text(_NAMES[kind])}</li>"
        for kind in kinds
    )
    summary = f"{title}: {len(timeline.ranks)} pipeline ranks, {format_tick(total)} seconds"
    name = text(title)
    return (
        f'<figure class="timeline"><figcaption>{name}</figcaption><div class="scroll" tabindex="0" role="region" '
        f'aria-label="{name}"><svg class="wide" viewBox="0 0 {_WIDTH} {bottom + 24}" role="img" '
        f'aria-label="{text(summary)}"><title>{name}</title>{"".join(shapes)}</svg></div>'
        f'<ul class="legend">{legend}<li>empty: waiting; axis in seconds</li></ul></figure>'
    )


_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "input": "backward, gradients of inputs",
    "weight": "backward, gradients of weights",
}


def _colour(kind: str) -> str:
    return colour(_PASSES[kind])
