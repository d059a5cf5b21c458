"""A plan as one HTML page without any script or outside reference: tables, memory per rank, the pipeline's timeline.

Plan -> SVG drawn here -> text of a page that opens from a file, offline
"""

from html import escape

from hlat.planner.explain import explain
from hlat.planner.plan import Plan, described
from hlat.planner.search import Planned
from hlat.planner.trace import step_timeline

_GIB = 1 << 30
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#222255", "#cc6633",
            "#999933", "#117733", "#882255", "#44aa99")  # fmt: skip
_WIDTH = 960
_SHOWN_PASSES = 6000

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .2rem .7rem; text-align: right; }
th { border-bottom: 1px solid #888; } td:first-child, th:first-child { text-align: left; }
svg { display: block; margin: 1rem 0; max-width: 100%; } .chosen { font-weight: 600; }
"""


def page(plan: Plan) -> str:
    """The whole page."""
    title = f"{plan.question.name} on {plan.question.cluster.name}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in explain(plan)),
        "<h2>Layouts</h2>",
        _table(plan),
        "<h2>Memory of a device, by pipeline rank</h2>",
        _memory(plan),
        "<h2>A step's time</h2>",
        _bar(plan.chosen.parts, plan.chosen.step_seconds, "s", 1.0),
    ]
    if plan.chosen.candidate.pipeline > 1:
        parts += ["<h2>The pipeline</h2>", _timeline(plan)]
    parts += ["<h2>Assumptions</h2>", _assumptions(plan)]
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><link rel="icon" href="data:,"><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _table(plan: Plan) -> str:
    names = ("layout", "step, s", "tokens/s per chip", "MFU", "GiB", "days", "USD", "goodput")
    rows = [_row(plan, plan.chosen, "chosen"), *(_row(plan, one, "") for one in plan.alternatives)]
    head = "".join(f"<th>{name}</th>" for name in names)
    return f"<table><tr>{head}</tr>\n" + "\n".join(rows) + "</table>"


def _row(plan: Plan, one: Planned, kind: str) -> str:
    said = described(plan.question, one)
    cost = "" if one.cost_usd is None else f"{one.cost_usd:,.0f}"
    cells = (
        str(one.candidate),
        f"{one.step_seconds:.2f}",
        f"{said['tokens_per_second_per_chip']:,.0f}",
        f"{one.mfu:.1%}",
        f"{said['memory_gib']:.1f}",
        f"{one.days:,.1f}",
        cost,
        f"{one.goodput:.1%}",
    )
    return f'<tr class="{kind}">' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _memory(plan: Plan) -> str:
    limit = plan.question.cluster.memory_bytes
    bars = [
        f"<p>rank {rank}: {memory.total / _GIB:.1f} of {limit / _GIB:.0f} GiB</p>"
        + _bar(memory.parts(), max(limit, memory.total), "GiB", _GIB)
        for rank, memory in plan.chosen.memory.items()
    ]
    return "\n".join(bars)


def _bar(parts: dict[str, float], whole: float, unit: str, scale: float) -> str:
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


def _timeline(plan: Plan) -> str:
    line = step_timeline(plan)
    height, total = 18, line.seconds
    each = max(1, _SHOWN_PASSES // len(line.ranks))
    shapes = []
    for rank, passes in enumerate(line.ranks):
        for one in passes[:each]:
            x, width = one.start / total * _WIDTH, (one.stop - one.start) / total * _WIDTH
            colour = "#4477aa" if one.forward else "#228833"
            what = f"{'forward' if one.forward else 'backward'} {one.micro_batch}, stage {one.stage}"
            shapes.append(
                f'<rect x="{x:.2f}" y="{rank * height}" width="{width:.2f}" height="{height - 3}" fill="{colour}" '
                f'stroke="white" stroke-width=".2"><title>{what}</title></rect>'
            )
    size = len(line.ranks) * height
    note = "<p>A row per pipeline rank; forward passes blue, backward passes green, white is waiting.</p>"
    return f'{note}<svg viewBox="0 0 {_WIDTH} {size}" role="img">{"".join(shapes)}</svg>'


def _assumptions(plan: Plan) -> str:
    rows = [
        f"<tr><td>{escape(name.replace('_', ' '))}</td><td>{escape(_written(value))}</td></tr>"
        for name, value in plan.assumptions().items()
        if name != "constants"
    ]
    return f"<table>{''.join(rows)}</table>"


def _written(value: object) -> str:
    if isinstance(value, list):
        return "; ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
