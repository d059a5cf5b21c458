"""Plans as an HTML page, and a simulated step as a trace.

plan --answers-------> days, dollars, memory, MFU, energy, layout: the first thing that a reader sees
     --assumptions---> what the reader could change, and the option that does
     --_layout_rows--> table of layouts to sort
plans --time_and_memory, cost_by_deadline--> charts of all clusters
all of these --html_page--> text of one page, which a browser opens offline
plan --step_timeline--> passes of each pipeline rank --chrome_trace--> events for chrome://tracing or Perfetto
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hlat.page import (
    Html,
    colour,
    details,
    duration,
    figure,
    grid,
    headline,
    joined,
    page,
    paragraph,
    section,
    table,
    tabs,
)
from hlat.planner.cost.goodput import storage_rate
from hlat.planner.cost.step_time import Timeline
from hlat.planner.expected import days_text, energy_words, median_days, usd_words
from hlat.planner.plan import TrainingPlan, format_number, layout_json
from hlat.planner.problem.devices import comparison_note
from hlat.planner.problem.layouts import layout_text
from hlat.planner.report.comparison import comparison_lines, pareto_front_of_plans, pareto_indices
from hlat.planner.report.explanation import (
    COMPONENT_NAMES,
    explain,
    plan_facts,
    price_sentence,
    recipe_sentence,
)
from hlat.planner.report.terminal import OF_THE_PAGE, summary
from hlat.planner.search import LayoutPrediction, timeline
from hlat.runtime.quantities import amount_text, rounded_text, short_count
from hlat.runtime.terminal import plural

_GIB = 1 << 30
_HOUR, _DAY = 3600.0, 86400.0
# Median error over 117 published readings of sources that were not looked at for the rules: docs/notebook/memory.md.
_MEMORY_ERROR = 0.16


def html_page(plans: Sequence[TrainingPlan], refused: Iterable[str] = ()) -> Html:
    """The complete page: the comparison of several clusters, then each plan; ``refused`` says why others have none."""
    names = ", ".join(plan.request.cluster.name for plan in plans)
    said = [paragraph(line) for line in (*comparison_lines(plans), *refused)]
    compared, charts = [], [time_and_memory(plans), cost_by_deadline(plans)]
    if len(plans) > 1:
        heads, *rows = summary(plans)
        compared = [table(heads, rows, caption="Clusters: the choice on each"), *charts]
        bodies = [tabs([(plan.request.cluster.name, _plan(plan, [])) for plan in plans])]
    else:
        bodies = [_plan(plans[0], charts)]
    return page(f"{plans[0].request.name} on {names}", [*said, *compared, *bodies])


def _plan(plan: TrainingPlan, charts: Iterable[Html]) -> Html:
    """One plan from its answers to what they rest on."""
    note, recipe = comparison_note(plan.request), recipe_sentence(plan)
    fullest, *others = sorted(plan.chosen.memory, key=lambda rank: -plan.chosen.memory[rank].total)
    parts = [
        headline(answers(plan)),
        paragraph(f"This plan is {note}.") if note else "",
        paragraph(f"It {recipe}.") if recipe else "",
        *charts,
        grid([_memory(plan, [fullest]), _step(plan.chosen)]),
        details("Memory of other pipeline ranks", _memory(plan, others)) if others else "",
        section("Layouts", [table(*_layouts(plan), caption="Layouts, the choice first", marked=0)]),
        section("Assumptions that you can change", [table(_HEADS, assumptions(plan), caption="Assumptions")]),
        details("Why this layout", "".join(map(paragraph, explain(plan)))),
        details("What the numbers rest on", table(("of", "known or assumed"), _facts(plan), caption="Facts")),
    ]
    if plan.chosen.candidate.pipeline > 1:
        parts.append(details("The passes of a step, by pipeline rank", _passes(step_timeline(plan))))
    return joined(parts)


def answers(plan: TrainingPlan) -> list[tuple[str, str, str]]:
    """The plan in six numbers, as the command line has them: name, value, range or meaning."""
    request, chosen = plan.request, plan.chosen
    said = layout_json(request, chosen)
    days, _, days_range = days_text(chosen).partition(", ")
    usd, _, usd_range = usd_words(chosen).partition(", ")
    energy, _, energy_range = energy_words(chosen).partition(", ")
    limit = request.cluster.memory_bytes / _GIB
    fits = "fits into memory" if said["fits"] else "does not fit"
    return [
        ("time", days, f"{days_range} in 4 of 5 runs"),
        ("cost", usd or "not known", usd_range or "--price states a price"),
        (fits, f"{said['memory_gib']:.1f} of {limit:.0f} GiB", "on the fullest device"),
        ("MFU", f"{chosen.mfu:.1%}", f"{said['tokens_per_second_per_chip']:,.0f} tokens/s per chip"),
        ("energy", energy or "not known", f"at most; {energy_range}" if energy else "no power limit is published"),
        ("layout", layout_text(chosen.candidate), str(chosen.candidate)),
    ]


_HEADS = ("assumption", "value", "from", "change it with")


def assumptions(plan: TrainingPlan) -> list[tuple[str, str, str, str]]:
    """What the reader could change: subject, value in words, who says so, the options that change it."""
    request, asked = plan.request, plan.request.asked
    cluster, site, instance = request.cluster, request.site, request.cluster.instance
    run = "default" if request.recipe is None else "recipe"
    batch = f"{request.global_batch:,} sequences, {short_count(request.tokens_per_step)} tokens"
    rate = f"{amount_text(storage_rate(cluster, site.storage), 'B/s')} for all instances together"
    fails = f"one in {1 / instance.failures.per_day:,.0f} days of an instance, " if instance.failures.per_day else ""
    fails += f"one in {plan.chosen.reliability.mtbf / _HOUR:,.0f} hours of the run"
    network = f"{amount_text(cluster.network_rate, 'B/s')} from an instance to the others"
    power = f"the building takes {site.pue:g} times the energy of its machines"
    chip = f"{cluster.chip.name}, {cluster.memory_bytes / _GIB:.0f} GiB for each device"
    # Stated by the user, or None; then from where the value is instead.
    rows: list[tuple[str, str, object, str, str]] = [
        ("tokens", short_count(request.tokens), asked.tokens, run, "--tokens"),
        ("sequence", f"{request.sequence:,} tokens", asked.sequence, run, "--sequence-length"),
        ("batch of a step", batch, asked.global_batch, run, "--global-batch"),
        ("precision", request.mode, asked.precision, run, "--precision"),
        ("price", price_sentence(request), asked.price or asked.quotes, "catalog", "--price, --quotes"),
        *[("network", network, asked.network, "catalog", "--network")] * (cluster.count > 1),
        ("file system", rate, asked.storage, "default", "--storage"),
        ("failures", fails, asked.interruptions, "catalog", "--interruptions"),
        ("power", power, asked.pue, "default", "--pue"),
        ("chip", chip, asked.hardware, "catalog", "--hardware"),
    ]
    return [(name, value, source if stated is None else "you", option) for name, value, stated, source, option in rows]


def _facts(plan: TrainingPlan) -> list[tuple[str, str]]:
    error = (
        f"published readings of other programs, which nothing was fitted to, are {_MEMORY_ERROR:.0%} off in the median; "
        "hlat's own processes are within 8 % on CPUs, and were never measured on accelerators"
    )
    return [*plan_facts(plan), ("memory", error)]


def _layouts(plan: TrainingPlan) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of all layouts, with the columns of the command line."""
    front = {id(planned) for _, planned in pareto_front_of_plans([plan])}
    rows = []
    for planned in (plan.chosen, *plan.alternatives):
        said = layout_json(plan.request, planned)
        marks = {
            "chosen": planned is plan.chosen,
            "frontier": id(planned) in front,
            "may be the fastest": len(plan.ranked) > 1 and plan.may_be_fastest(planned),
        }
        words = ", ".join(name for name, holds in marks.items() if holds)
        rows.append([*(cell(planned, said) for cell in OF_THE_PAGE.values()), words])
    return [*OF_THE_PAGE, ""], rows


_FARTHEST = 1.5  # times the fastest layout of the slowest cluster: where the first view of the chart ends


def time_and_memory(plans: Sequence[TrainingPlan]) -> Html:
    """Every layout by days and memory, with the Pareto frontier of each cluster; empty for a single layout."""
    every = [(plan, one) for plan in plans for one in (plan.chosen, *plan.alternatives)]
    if len(every) < 2:
        return Html("")
    traces: list[dict[str, Any]] = []
    for index, plan in enumerate(plans):
        name, own = plan.request.cluster.name, [one for its, one in every if its is plan]
        points = [(one.days, one.peak_memory / _GIB) for one in own]
        front = sorted(points[place] for place in pareto_indices(points))
        line = {"shape": "hv", "color": colour(index), "width": 2, "dash": "dot"}
        marker = {"size": [18, *[10] * (len(own) - 1)], "symbol": ["star", *["circle"] * (len(own) - 1)]}
        said = {"hovertext": [_hover(plan, one) for one in own], "hoverinfo": "text"}
        traces += [
            _points(f"frontier of {name}", front, index, "line", line=line, mode="lines", hoverinfo="skip"),
            _points(name, points, index, "box", mode="markers", marker=marker | {"color": colour(index)}, **said),
        ]
    last = _FARTHEST * max(min(one.days for one in (plan.chosen, *plan.ranked)) for plan in plans)
    first = min(one.days for _, one in every)
    hidden = sum(one.days > last for _, one in every)
    layout = {
        "xaxis": {"title": {"text": "days"}, "range": [first - 0.05 * (last - first), last]},
        "yaxis": {"title": {"text": "GiB of a device"}, "rangemode": "tozero"},
    }
    note = "Star: chosen. No layout is below and left of a dotted line." + (
        f" Farther right: {plural(hidden, 'slower layout')} (Reset shows all)." if hidden else ""
    )
    heads, rows = (
        ("layout", "cluster", "days", "GiB"),
        [
            (layout_text(one.candidate), plan.request.cluster.name, median_days(one), f"{one.peak_memory / _GIB:.1f}")
            for plan, one in every
        ],
    )
    values = table(heads, rows, caption="Time and memory")
    return joined(
        [
            figure("Time and memory of every layout", note, {"data": traces, "layout": layout}, 480, values),
            paragraph(note),
        ]
    )


def cost_by_deadline(plans: Sequence[TrainingPlan]) -> Html:
    """Days and cost of each cluster's choice, a line over the range of 4 of 5 runs; empty with less than two prices."""
    priced = [(plan, plan.chosen.cost_usd) for plan in plans if plan.chosen.cost_usd is not None]
    if len(priced) < 2:
        return Html("")
    traces = []
    for index, (plan, usd) in enumerate(priced):
        planned, name = plan.chosen, plan.request.cluster.name
        (soon, late), (low, high) = planned.interval.around(planned.days), planned.interval.around(usd)
        style = {"marker": {"size": [1, 14, 1], "color": colour(index)}, "line": {"color": colour(index), "width": 3}}
        said = {"hovertext": [_hover(plan, planned)] * 3, "hoverinfo": "text", "mode": "lines+markers"}
        traces.append(_points(name, [(soon, low), (planned.days, usd), (late, high)], index, "line", **style, **said))
    layout = {
        "xaxis": {"title": {"text": "days until the deadline"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "USD"}, "rangemode": "tozero", "tickprefix": "$"},
    }
    note = "Dot: median. Line: range of 4 of 5 runs. A line that ends left of your deadline most likely keeps it."
    rows = [(plan.request.cluster.name, days_text(plan.chosen), usd_words(plan.chosen)) for plan, _ in priced]
    values = table(("cluster", "days", "cost"), rows, caption="Cost against a deadline")
    return joined(
        [figure("Cost against a deadline", note, {"data": traces, "layout": layout}, 380, values), paragraph(note)]
    )


def _points(name: str, points: Sequence[tuple[float, float]], index: int, form: str, **more: Any) -> dict[str, Any]:
    """Make a trace of x and y, with its entry in the legend."""
    xs, ys = zip(*points, strict=True)
    legend = {"legend_form": form, "legend_colour": colour(index)}
    return {"type": "scatter", "name": name, "x": list(xs), "y": list(ys), **legend, **more}


def _hover(plan: TrainingPlan, one: LayoutPrediction) -> str:
    terms = f"{one.peak_memory / _GIB:.1f} GiB, MFU {one.mfu:.1%}, step {format_number(one.step_seconds)} s"
    lines = [f"<b>{layout_text(one.candidate)}</b>", plan.request.cluster.name, days_text(one), usd_words(one), terms]
    return "<br>".join(filter(None, lines))


def _memory(plan: TrainingPlan, ranks: Sequence[int]) -> Html:
    """A bar for each of some pipeline ranks: what fills the memory of a device."""
    limit, memory = plan.request.cluster.memory_bytes / _GIB, plan.chosen.memory
    parts = {part: [getattr(memory[rank], part) / _GIB for rank in ranks] for part in memory[ranks[0]].components()}
    title = f"Memory: {memory[ranks[0]].total / _GIB:.1f} of {limit:.0f} GiB"
    return _bars(title, [f"rank {rank}" for rank in ranks], parts, "GiB", limit)


def _step(planned: LayoutPrediction) -> Html:
    parts = {COMPONENT_NAMES[name]: [seconds] for name, seconds in planned.components.items()}
    return _bars(f"Time: a step of {duration(planned.step_seconds)}", ["step"], parts, "s")


def _bars(title: str, rows: Sequence[str], parts: Mapping[str, Sequence[float]], unit: str, limit: float = 0.0) -> Html:
    """Bars made of parts, the largest part first; ``limit`` is a line across them."""
    total = max(map(sum, zip(*parts.values(), strict=True)))
    seen = {name: sizes for name, sizes in parts.items() if max(sizes) > _LEAST_PART * total}
    seen = dict(sorted(seen.items(), key=lambda part: -max(part[1])))
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": f"{name}, {rounded_text(sizes[0])} {unit}",
            "x": list(sizes),
            "y": list(rows),
            "marker": {"color": colour(index)},
            "text": [name] * len(rows),
            "textposition": "inside",
            "insidetextanchor": "middle",
            "hovertext": [f"{name}: {rounded_text(size)} {unit}" for size in sizes],
            "hoverinfo": "text",
            "legend_form": "box",
            "legend_colour": colour(index),
        }
        for index, (name, sizes) in enumerate(seen.items())
    ]
    line = {"type": "line", "x0": limit, "x1": limit, "y0": 0, "y1": 1, "yref": "paper", "line": {"dash": "dash"}}
    layout = {
        "barmode": "stack",
        "uniformtext": {"minsize": 10, "mode": "hide"},
        "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "yaxis": {"visible": len(rows) > 1, "type": "category", "autorange": "reversed"},
        "shapes": [line] * (limit > 0),
    }
    values = table(
        ("part", *(f"{row}, {unit}" for row in rows)),
        [(name, *map(rounded_text, sizes)) for name, sizes in parts.items()],
        caption=title,
    )
    return figure(title, title, {"data": traces, "layout": layout}, 90 + 50 * len(rows), values)


_LEAST_PART = 0.003  # of a bar: smaller parts are in its table only


def _passes(steps: Timeline) -> Html:
    """The passes of a step, a row for each pipeline rank; of a long step, the first ones."""
    per_rank = max(1, _MOST_DRAWN_PASSES // len(steps.ranks))
    shown = [one for passes in steps.ranks for one in passes[:per_rank]]
    traces = []
    for kind, name in _PASS_NAMES.items():
        own = [one for one in shown if one.kind == kind]
        number = list(_PASS_NAMES).index(kind)
        traces += [
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "base": [one.start for one in own],
                "x": [one.stop - one.start for one in own],
                "y": [one.rank for one in own],
                "hovertext": [f"{name} {one.micro_batch}, stage {one.stage}" for one in own],
                "hoverinfo": "text",
                "marker": {"color": colour(number)},
                "legend_form": "box",
                "legend_colour": colour(number),
            }
        ] * bool(own)
    layout = {
        "barmode": "overlay",
        "bargap": 0.1,
        "xaxis": {"title": {"text": "seconds"}},
        "yaxis": {"title": {"text": "pipeline rank"}, "autorange": "reversed", "dtick": 1},
    }
    rows = [(rank, f"{steps.busy(rank) / steps.seconds:.1%}") for rank in range(len(steps.ranks))]
    values = table(("rank", "busy"), rows, caption="Share of a step in which a rank computes")
    summary = f"{len(steps.ranks)} pipeline ranks, {rounded_text(steps.seconds)} seconds; empty: waiting"
    return figure("Passes of a step", summary, {"data": traces, "layout": layout}, 120 + 22 * len(steps.ranks), values)


_PASS_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "input": "backward, gradients of inputs",
    "weight": "backward, gradients of weights",
}
_MOST_DRAWN_PASSES = 6000
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
