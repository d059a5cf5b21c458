"""HTML report of plans, without scripts or external references: tables, Pareto front, memory, pipeline timeline.

plans -> SVG charts (svg.py) -> text of one page, which a browser opens from a file, offline
"""

from collections.abc import Callable, Sequence
from html import escape

from hlat.planner.report.comparison import comparison_lines, pareto_front_of_plans
from hlat.planner.report.explain import explain
from hlat.planner.report.svg import Dot, bar_chart, scatter_chart, timeline_chart
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
    """The complete page: the comparison of clusters, then each plan."""
    names = ", ".join(plan.request.cluster.name for plan in plans)
    title = f"{plans[0].request.name} on {names}"
    elements = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(line)}</p>" for line in comparison_lines(plans))]
    elements += _front(plans)
    for plan in plans:
        elements += [f"<h2>{escape(plan.request.cluster.name)}</h2>"] if len(plans) > 1 else []
        elements += _sections(plan)
    body = "\n".join(elements)
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><link rel="icon" href="data:,"><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _sections(plan: TrainingPlan) -> list[str]:
    """HTML elements of one plan."""
    elements = [
        *(f"<p>{escape(line)}</p>" for line in explain(plan)),
        "<h3>Layouts</h3>",
        _table(plan),
        "<h3>Memory of a device, by pipeline rank</h3>",
        _memory(plan),
        "<h3>A step's time</h3>",
        bar_chart(plan.chosen.components, plan.chosen.step_seconds, "s", 1.0),
    ]
    if plan.chosen.candidate.pipeline > 1:
        note = (
            "One row per pipeline rank. Blue: forward. Green: backward. Yellow: gradients of weights. White: waiting."
        )
        elements += ["<h3>The pipeline</h3>", f"<p>{note}</p>", timeline_chart(step_timeline(plan))]
    return [*elements, "<h3>Assumptions</h3>", _assumptions(plan)]


def _front(plans: Sequence[TrainingPlan]) -> list[str]:
    """Scatter charts of all layouts: time and memory; time and cost if several clusters have prices."""
    front = {id(prediction) for _, prediction in pareto_front_of_plans(plans)}
    every = [
        (cluster, plan, prediction)
        for cluster, plan in enumerate(plans)
        for prediction in (plan.chosen, *plan.alternatives)
    ]
    if len(every) < 2:
        return []
    clusters = [plan.request.cluster.name for plan in plans]

    def dots(height: Callable[[LayoutPrediction], float]) -> list[Dot]:
        return [
            Dot(
                prediction.days,
                height(prediction),
                id(prediction) in front,
                cluster,
                f"{plan.request.cluster.name}: {prediction.candidate}",
            )
            for cluster, plan, prediction in every
        ]

    elements = [
        "<h2>Time, cost, memory</h2>",
        "<p>One dot per layout, logarithmic axes. Filled: no other is better in time, cost and memory at once.</p>",
        scatter_chart(dots(lambda prediction: prediction.peak_memory / _GIB), clusters, "days", "GiB per device"),
    ]
    if len(plans) > 1 and all(prediction.cost_usd is not None for *_, prediction in every):
        elements.append(scatter_chart(dots(lambda prediction: prediction.cost_usd or 0.0), clusters, "days", "USD"))
    return elements


def _table(plan: TrainingPlan) -> str:
    names = ("layout", "step, s", "tokens/s per chip", "MFU", "GiB", "days", "USD", "goodput")
    rows = [_row(plan, plan.chosen, "chosen"), *(_row(plan, prediction, "") for prediction in plan.alternatives)]
    head = "".join(f"<th>{name}</th>" for name in names)
    return f"<table><tr>{head}</tr>\n" + "\n".join(rows) + "</table>"


def _row(plan: TrainingPlan, prediction: LayoutPrediction, kind: str) -> str:
    content = layout_json(plan.request, prediction)
    cost = "" if prediction.cost_usd is None else f"{prediction.cost_usd:,.0f}"
    cells = (
        str(prediction.candidate),
        f"{prediction.step_seconds:.2f}",
        f"{content['tokens_per_second_per_chip']:,.0f}",
        f"{prediction.mfu:.1%}",
        f"{content['memory_gib']:.1f}",
        f"{prediction.days:,.1f}",
        cost,
        f"{prediction.goodput:.1%}",
    )
    return f'<tr class="{kind}">' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _memory(plan: TrainingPlan) -> str:
    limit = plan.request.cluster.memory_bytes
    bars = [
        f"<p>rank {rank}: {memory.total / _GIB:.1f} of {limit / _GIB:.0f} GiB</p>"
        + bar_chart(memory.components(), max(limit, memory.total), "GiB", _GIB)
        for rank, memory in plan.chosen.memory.items()
    ]
    return "\n".join(bars)


def _assumptions(plan: TrainingPlan) -> str:
    rows = [
        f"<tr><td>{escape(name.replace('_', ' '))}</td><td>{escape(_format(value))}</td></tr>"
        for name, value in plan.assumptions().items()
        if name != "constants"
    ]
    return f"<table>{''.join(rows)}</table>"


def _format(value: object) -> str:
    if isinstance(value, list):
        return "; ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
