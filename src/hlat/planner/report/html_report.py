"""Plans as an HTML page, and a simulated step as a trace.

    plans --html_page--> tables, Pareto front, memory, time of a step (hlat.page) -> text of one page
    plan --step_timeline--> passes of each pipeline rank --timeline_chart--> boxes by time, as SVG
                                                         --chrome_trace--> events for chrome://tracing or Perfetto

A browser opens the page from a file, offline: there are no scripts and no external references.
"""

from collections.abc import Callable, Sequence
from typing import Any

from hlat.page import (
    Dot,
    Html,
    bar_chart,
    colour,
    duration,
    format_tick,
    grid,
    make_axis,
    page,
    paragraph,
    scatter_chart,
    section,
    table,
    text,
)
from hlat.planner.cost.step_time import Timeline
from hlat.planner.expected import interval_text, median_days, median_energy, median_usd
from hlat.planner.plan import TrainingPlan, layout_json
from hlat.planner.problem.devices import comparison_note
from hlat.planner.report.comparison import comparison_lines, pareto_front_of_plans
from hlat.planner.report.explanation import (
    cost_sentence,
    energy_sentence,
    expectation,
    explain,
    network_sentence,
    price_sentence,
    recipe_sentence,
    storage_sentence,
)
from hlat.planner.search import LayoutPrediction, timeline

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
        paragraph(f"{expectation(plan.request, chosen)}."),
        *([paragraph(f"This plan is {note}.")] if note else []),
        *(paragraph(f"It {recipe}.") for recipe in [recipe_sentence(plan)] if recipe),
        *(paragraph(f"Network: {network}.") for network in [network_sentence(plan)] if network),
        *map(paragraph, explain(plan)),
        paragraph(
            f"Price: {price_sentence(plan.request)}. "
            f"Cost: {cost_sentence(plan.request, chosen) or 'not known'}. Energy: "
            f"{energy_sentence(plan.request, chosen)}. Saves: {storage_sentence(plan.request, chosen)}. "
            "Memory: published readings of other programs, which nothing "
            f"was fitted to, are {_MEMORY_ERROR:.0%} off in the median; hlat's own processes are within 8 % on CPUs, "
            "and were never measured on accelerators."
        ),
        section("Layouts", [_layout_table(plan)], level=3),
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
                prediction.interval.around(1),
                ends or prediction.interval.around(1),
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


def _layout_table(plan: TrainingPlan) -> Html:
    names = (
        "layout",
        "step, s",
        "tokens/s per chip",
        "MFU",
        "GiB",
        "days",
        "4 of 5 runs",
        "cost",
        "energy",
        "goodput",
        "may be fastest",
    )
    rows = [_layout_row(plan, prediction) for prediction in (plan.chosen, *plan.alternatives)]
    rows[0] = (f"{rows[0][0]} (chosen)", *rows[0][1:])
    return table(names, rows, caption="Layouts, the chosen one first", marked=0)


def _layout_row(plan: TrainingPlan, prediction: LayoutPrediction) -> tuple[str, ...]:
    content = layout_json(plan.request, prediction)
    tied = len(plan.ranked) > 1 and plan.may_be_fastest(prediction)
    return (
        str(prediction.candidate),
        f"{prediction.step_seconds:.2f}",
        f"{content['tokens_per_second_per_chip']:,.0f}",
        f"{prediction.mfu:.1%}",
        f"{content['memory_gib']:.1f}",
        median_days(prediction),
        interval_text(prediction, prediction.days),
        median_usd(prediction),
        median_energy(prediction),
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


_PASS_COLOURS = {"forward": 0, "backward": 2, "input": 5, "weight": 4}
"""Number of the colour of each kind of pass."""
_WIDTH, _LEFT, _ROW = 960, 40, 18
_MOST_DRAWN_PASSES = 6000


def timeline_chart(title: str, timeline: Timeline) -> Html:
    """Draw one row per pipeline rank, one box per pass; of a long step, the first passes."""
    wide, total = _WIDTH - _LEFT - 1, timeline.seconds
    per_rank = max(1, _MOST_DRAWN_PASSES // len(timeline.ranks))
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
    kinds = sorted({each.kind for rank in timeline.ranks for each in rank}, key=list(_PASS_COLOURS).index)
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
    return colour(_PASS_COLOURS[kind])


_MOST_TRACED_PASSES = 20_000  # more than that, viewers do not show


def step_timeline(plan: TrainingPlan) -> Timeline:
    """Passes of one step; of a long step, as many micro-batches from its start as a viewer can show."""
    layout = plan.chosen.candidate
    count = layout.accumulation(plan.request.global_batch)
    limit = max(layout.pipeline, _MOST_TRACED_PASSES // (2 * layout.pipeline * layout.virtual))
    if layout.virtual > 1:
        # Interleaved schedules need equal rounds of micro-batches; multiples of the pipeline ranks always make them.
        limit = limit // layout.pipeline * layout.pipeline
    return timeline(layout, min(count, limit), plan.chosen.stage_times)


def chrome_trace(plan: TrainingPlan) -> dict[str, Any]:
    """Complete events of the trace event format, in microseconds."""
    events: list[dict[str, Any]] = []
    for rank, passes in enumerate(step_timeline(plan).ranks):
        name = {"name": f"pipeline rank {rank}"}
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": name})
        for each in passes:
            events.append(
                {
                    "name": f"{each.kind} {each.micro_batch}",
                    "cat": each.kind,
                    "ph": "X",
                    "pid": 0,
                    "tid": rank,
                    "ts": each.start * 1e6,
                    "dur": (each.stop - each.start) * 1e6,
                    "args": {"stage": each.stage, "micro_batch": each.micro_batch},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
