"""HTML report of plans, without scripts or external references: tables, Pareto front, memory, pipeline timeline.

plans -> charts (hlat.page, svg.py) -> text of one page, which a browser opens from a file, offline
"""

from collections.abc import Callable, Sequence

from hlat.page import Dot, Html, bar_chart, duration, grid, page, paragraph, scatter_chart, section, table
from hlat.planner.problem.runnable import comparison_note
from hlat.planner.report.comparison import comparison_lines, pareto_front_of_plans
from hlat.planner.report.energy import energy_sentence, energy_text
from hlat.planner.report.explain import expectation, explain, interval_text
from hlat.planner.report.saves import storage_sentence
from hlat.planner.report.svg import timeline_chart
from hlat.planner.report.trace import step_timeline
from hlat.planner.search.plan import TrainingPlan, layout_json
from hlat.planner.search.search import LayoutPrediction

_GIB = 1 << 30
# Median error over 117 published readings of sources that were not looked at for the rules: docs/notebook/memory.md.
_MEMORY_ERROR = 0.16


def html_page(plans: Sequence[TrainingPlan]) -> Html:
    """The complete page: the comparison of clusters, then each plan."""
    names = ", ".join(plan.request.cluster.name for plan in plans)
    contents = [*map(paragraph, comparison_lines(plans)), _front(plans)]
    for plan in plans:
        title = plan.request.cluster.name if len(plans) > 1 else "The plan"
        contents.append(section(title, _sections(plan)))
    return page(f"{plans[0].request.name} on {names}", contents)


def _sections(plan: TrainingPlan) -> list[Html]:
    """HTML elements of one plan."""
    chosen = plan.chosen
    step = bar_chart(
        f"A step of {duration(chosen.step_seconds)}",
        chosen.components,
        duration,
        unit="seconds; the whisker is where 4 of 5 runs are expected",
        spread=chosen.interval.of(chosen.step_seconds),
    )
    note = comparison_note(plan.request)
    elements = [
        *([paragraph(f"This plan is {note}.")] if note else []),
        *map(paragraph, explain(plan)),
        paragraph(
            f"Expect {expectation(chosen)}. Energy: {energy_sentence(plan.request, chosen)}. Saves: "
            f"{storage_sentence(plan.request, chosen)}. Memory: published readings of other programs, which nothing "
            f"was fitted to, are {_MEMORY_ERROR:.0%} off in the median; hlat's own processes are within 8 % on CPUs, "
            "and were never measured on accelerators."
        ),
        section("Layouts", [_table(plan)], level=3),
        section("Memory of a device, by pipeline rank", [_memory(plan)], level=3),
        section("Time of a step", [grid([step])], level=3),
    ]
    if chosen.candidate.pipeline > 1:
        chart = timeline_chart("Passes of a step, by pipeline rank", step_timeline(plan))
        elements.append(section("The pipeline", [chart], level=3))
    return [*elements, section("Assumptions", [_assumptions(plan)], level=3)]


def _front(plans: Sequence[TrainingPlan]) -> Html:
    """Scatter charts of all layouts: time and memory; time and cost if several clusters have prices."""
    front = {id(prediction) for _, prediction in pareto_front_of_plans(plans)}
    every = [
        (cluster, plan, prediction)
        for cluster, plan in enumerate(plans)
        for prediction in (plan.chosen, *plan.alternatives)
    ]
    if len(every) < 2:
        return ""
    clusters = [plan.request.cluster.name for plan in plans]

    def dots(height: Callable[[LayoutPrediction], float], ends: tuple[float, float] | None = None) -> list[Dot]:
        return [
            Dot(
                prediction.days,
                height(prediction),
                id(prediction) in front,
                cluster,
                f"{plan.request.cluster.name}: {prediction.candidate}",
                prediction is plan.chosen,
                prediction.interval.of(1),
                ends or prediction.interval.of(1),
            )
            for cluster, plan, prediction in every
        ]

    memory = dots(lambda prediction: prediction.peak_memory / _GIB, (1 - _MEMORY_ERROR, 1 + _MEMORY_ERROR))
    charts = [scatter_chart("Time and memory", memory, clusters, "days", "GiB per device")]
    if len(plans) > 1 and all(prediction.cost_usd is not None for *_, prediction in every):
        cost = dots(lambda prediction: prediction.cost_usd or 0.0)
        charts.append(scatter_chart("Time and cost", cost, clusters, "days", "USD"))
    note = "One dot per layout. Filled: no other is better in time, cost and memory at once. Ring: chosen."
    return section("Time, cost, memory", [paragraph(note), grid(charts)])


def _table(plan: TrainingPlan) -> Html:
    names = (
        "layout",
        "step, s",
        "tokens/s per chip",
        "MFU",
        "GiB",
        "days",
        "4 of 5 runs",
        "USD",
        "energy",
        "goodput",
        "may be fastest",
    )
    rows = [_row(plan, prediction) for prediction in (plan.chosen, *plan.alternatives)]
    rows[0] = (f"{rows[0][0]} (chosen)", *rows[0][1:])
    return table(names, rows, caption="Layouts, the chosen one first", marked=0)


def _row(plan: TrainingPlan, prediction: LayoutPrediction) -> tuple[str, ...]:
    content = layout_json(plan.request, prediction)
    tied = len(plan.ranked) > 1 and plan.may_be_fastest(prediction)
    return (
        str(prediction.candidate),
        f"{prediction.step_seconds:.2f}",
        f"{content['tokens_per_second_per_chip']:,.0f}",
        f"{prediction.mfu:.1%}",
        f"{content['memory_gib']:.1f}",
        f"{prediction.days:,.1f}",
        interval_text(prediction, prediction.days),
        "" if prediction.cost_usd is None else f"{prediction.cost_usd:,.0f}",
        energy_text(prediction.kwh),
        f"{prediction.goodput:.1%}",
        "yes" if tied else "",
    )


def _memory(plan: TrainingPlan) -> Html:
    limit = plan.request.cluster.memory_bytes
    return grid(
        bar_chart(
            f"Rank {rank}: {memory.total / _GIB:.1f} of {limit / _GIB:.0f} GiB",
            memory.components(),
            lambda size: f"{size / _GIB:.2f} GiB",
            unit="GiB; the upright line is the memory of a device, the whisker the median error of published readings",
            scale=_GIB,
            limit=limit,
            spread=(memory.total * (1 - _MEMORY_ERROR), memory.total * (1 + _MEMORY_ERROR)),
        )
        for rank, memory in plan.chosen.memory.items()
    )


def _assumptions(plan: TrainingPlan) -> Html:
    rows = [
        (name.replace("_", " "), _format(value)) for name, value in plan.assumptions().items() if name != "constants"
    ]
    return table(("assumption", "value"), rows, caption="Assumptions")


def _format(value: object) -> str:
    if isinstance(value, list):
        return "; ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
