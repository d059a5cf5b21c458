"""Plans as one HTML page without any script or outside reference: tables, the front, memory, the pipeline's timeline.

Plans -> SVG drawn here (pictures.py) -> text of a page that opens from a file, offline
"""

from collections.abc import Callable, Sequence
from html import escape

from hlat.planner.report.comparison import comparison_lines, pareto_front_of_plans
from hlat.planner.report.explain import explain
from hlat.planner.report.svg import Dot, bar, scatter, timeline_picture
from hlat.planner.report.trace import step_timeline
from hlat.planner.search import LayoutPrediction, TrainingPlan, layout_json

_GIB = 1 << 30

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .2rem .7rem; text-align: right; }
th { border-bottom: 1px solid #888; } td:first-child, th:first-child { text-align: left; }
svg { display: block; margin: 1rem 0; max-width: 100%; } .chosen { font-weight: 600; }
"""


def html_page(plans: Sequence[TrainingPlan]) -> str:
    """The whole page: what several clusters differ in, then each plan."""
    names = ", ".join(plan.request.cluster.name for plan in plans)
    title = f"{plans[0].request.name} on {names}"
    parts = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(line)}</p>" for line in comparison_lines(plans))]
    parts += _front(plans)
    for plan in plans:
        parts += [f"<h2>{escape(plan.request.cluster.name)}</h2>"] if len(plans) > 1 else []
        parts += _sections(plan)
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><link rel="icon" href="data:,"><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _sections(plan: TrainingPlan) -> list[str]:
    """What is said and drawn of one plan."""
    parts = [
        *(f"<p>{escape(line)}</p>" for line in explain(plan)),
        "<h3>Layouts</h3>",
        _table(plan),
        "<h3>Memory of a device, by pipeline rank</h3>",
        _memory(plan),
        "<h3>A step's time</h3>",
        bar(plan.chosen.parts, plan.chosen.step_seconds, "s", 1.0),
    ]
    if plan.chosen.candidate.pipeline > 1:
        note = "A row per pipeline rank; forward passes blue, backward green, weights apart yellow, white is waiting."
        parts += ["<h3>The pipeline</h3>", f"<p>{note}</p>", timeline_picture(step_timeline(plan))]
    return [*parts, "<h3>Assumptions</h3>", _assumptions(plan)]


def _front(plans: Sequence[TrainingPlan]) -> list[str]:
    """Time against memory, and where it is known against cost; filled is what nothing beats in all three."""
    front = {id(one) for _, one in pareto_front_of_plans(plans)}
    every = [(place, plan, one) for place, plan in enumerate(plans) for one in (plan.chosen, *plan.alternatives)]
    if len(every) < 2:
        return []
    clusters = [plan.request.cluster.name for plan in plans]

    def dots(height: Callable[[LayoutPrediction], float]) -> list[Dot]:
        return [
            Dot(one.days, height(one), id(one) in front, place, f"{plan.request.cluster.name}: {one.candidate}")
            for place, plan, one in every
        ]

    parts = [
        "<h2>Time, cost, memory</h2>",
        "<p>A dot per layout, axes logarithmic; filled where no other is better in time, cost and memory at once.</p>",
        scatter(dots(lambda one: one.peak_memory / _GIB), clusters, "days", "GiB per device"),
    ]
    if len(plans) > 1 and all(one.cost_usd is not None for *_, one in every):
        parts.append(scatter(dots(lambda one: one.cost_usd or 0.0), clusters, "days", "USD"))
    return parts


def _table(plan: TrainingPlan) -> str:
    names = ("layout", "step, s", "tokens/s per chip", "MFU", "GiB", "days", "USD", "goodput")
    rows = [_row(plan, plan.chosen, "chosen"), *(_row(plan, one, "") for one in plan.alternatives)]
    head = "".join(f"<th>{name}</th>" for name in names)
    return f"<table><tr>{head}</tr>\n" + "\n".join(rows) + "</table>"


def _row(plan: TrainingPlan, one: LayoutPrediction, kind: str) -> str:
    said = layout_json(plan.request, one)
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


def _memory(plan: TrainingPlan) -> str:
    limit = plan.request.cluster.memory_bytes
    bars = [
        f"<p>rank {rank}: {memory.total / _GIB:.1f} of {limit / _GIB:.0f} GiB</p>"
        + bar(memory.parts(), max(limit, memory.total), "GiB", _GIB)
        for rank, memory in plan.chosen.memory.items()
    ]
    return "\n".join(bars)


def _assumptions(plan: TrainingPlan) -> str:
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
