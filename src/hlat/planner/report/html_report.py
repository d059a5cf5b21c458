"""Plans as an HTML page, and a simulated step as a trace.

plan  --answers-----> days, dollars, memory, MFU, energy, layout: what a reader sees first
      --assumptions-> what the reader could change, and the option that does it
plans --html_page---> both, the charts of hlat.page, a table of layouts, reasons: one page that opens offline
plan --step_timeline--> passes of each pipeline rank --chrome_trace--> events for chrome://tracing or Perfetto
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hlat.page import (
    Dot,
    Html,
    Span,
    bar_chart,
    details,
    duration,
    grid,
    headline,
    joined,
    page,
    paragraph,
    scatter_chart,
    section,
    table,
    tabs,
    timeline_chart,
)
from hlat.planner.cost.goodput import storage_rate
from hlat.planner.cost.step_time import Timeline
from hlat.planner.expected import days_text, energy_words, usd_words
from hlat.planner.plan import TrainingPlan, layout_json
from hlat.planner.problem.devices import comparison_note
from hlat.planner.problem.layouts import layout_text
from hlat.planner.report.comparison import comparison_lines, pareto_front_of_plans, pareto_indices
from hlat.planner.report.explanation import COMPONENT_NAMES, explain, plan_facts, price_sentence, recipe_sentence
from hlat.planner.report.terminal import OF_THE_PAGE, stage_rows, summary
from hlat.planner.search import LayoutPrediction, timeline
from hlat.runtime.quantities import amount_text, short_count
from hlat.runtime.terminal import plural

_GIB = 1 << 30


def html_page(plans: Sequence[TrainingPlan], refused: Iterable[str] = ()) -> Html:
    """The complete page: the comparison of several clusters, then each plan; ``refused`` says why others have none."""
    names = [plan.request.cluster.name for plan in plans]
    charts = [*_time_and_memory(plans), *_cost_and_time(plans)]
    contents = [paragraph(line) for line in (*comparison_lines(plans), *refused)]
    if len(plans) > 1:
        heads, *rows = summary(plans)
        choices = table(heads, rows, caption="The choice on each cluster")
        each = tabs((name, _plan(plan, [], 3)) for name, plan in zip(names, plans, strict=True))
        contents += [section("Clusters compared", [choices, *charts]), section("Each cluster", [each])]
    else:
        contents.append(_plan(plans[0], charts, 2))
    return page(f"{plans[0].request.name} on {', '.join(names)}", contents)


def _plan(plan: TrainingPlan, charts: Iterable[Html], level: int) -> Html:
    """A plan from its answers to what they rest on; ``level`` is that of its headings."""
    if plan.stages:
        return _staged_plan(plan, charts, level)
    note, recipe = comparison_note(plan.request), recipe_sentence(plan)
    fullest, *others = sorted(plan.chosen.memory, key=lambda rank: -plan.chosen.memory[rank].total)
    return joined(
        [
            headline(answers(plan)),
            *([paragraph(f"This plan is {note}.")] if note else []),
            *([paragraph(f"It {recipe}.")] if recipe else []),
            *charts,
            grid([_memory(plan, [fullest]), _step(plan)]),
            details("Memory of other pipeline ranks", _memory(plan, others) if others else Html()),
            details("Passes of a step", _passes(plan) if plan.chosen.candidate.pipeline > 1 else Html()),
            section("Layouts", [_layouts(plan)], level=level),
            section(
                "Assumptions that you can change", [table(_HEADS, assumptions(plan), caption=_FROM_YOU)], level=level
            ),
            details("Why this layout", joined(map(paragraph, explain(plan)))),
            details("What the numbers rest on", table(("of", "what"), _facts(plan), caption="Known and assumed")),
        ]
    )


def _staged_plan(plan: TrainingPlan, charts: Iterable[Html], level: int) -> Html:
    """The plan of a run with stages: a row for each, then the plan of each."""
    heads, *rows = stage_rows(plan)
    each = tabs((name, _plan(stage, [], level + 1)) for name, stage in plan.stages.items())
    stages = table(heads, rows, caption="The stages of the run, each with its layout, and all of them")
    return joined([headline(answers(plan)), *charts, stages, section("Each stage", [each], level=level)])


def answers(plan: TrainingPlan) -> list[tuple[str, str, str]]:
    """The plan in some numbers, as the command line has them: name, value, range or meaning."""
    request, chosen, loss = plan.request, plan.chosen, plan.request.loss
    said = layout_json(request, chosen)
    value, _, loss_range = str(loss or "").partition(", ")
    days, _, days_range = days_text(chosen).partition(", ")
    usd, _, usd_range = usd_words(chosen).partition(", ")
    energy, _, energy_range = energy_words(chosen).partition(", ")
    limit = request.cluster.memory_bytes / _GIB
    fits = "fits into memory" if said["fits"] else "does not fit"
    return [
        ("time", days, f"{days_range} in 4 of 5 runs"),
        ("cost", usd or "not known", usd_range or "--price states a price"),
        (fits, f"{said['memory_gib']:.1f} of {limit:.0f} GiB", "on the fullest device"),
        *([("loss", value, f"{loss_range} in 4 of 5 runs")] if loss else []),
        ("MFU", f"{chosen.mfu:.1%}", f"of peak speed; {said['tokens_per_second_per_chip']:,.0f} tokens/s per chip"),
        (
            "energy",
            energy or "not known",
            f"{energy_range}, at full power" if energy else "no published power limit",
        ),
        ("stages", str(len(plan.stages)), "each has a layout of its own")
        if plan.stages
        else ("chosen layout", _name(chosen), str(chosen.candidate)),
    ]


_HEADS = ("assumption", "value", "stated by", "option that changes it")
_FROM_YOU = "Stated by you, by your recipe, by the catalog of machines, or else a default of hlat"


def assumptions(plan: TrainingPlan) -> list[tuple[str, str, str, str]]:
    """Assumptions that the reader could change: subject, value in words, who says so, the options that change it."""
    request, asked = plan.request, plan.request.asked
    cluster, site, instance = request.cluster, request.site, request.cluster.instance
    run = "default" if request.recipe is None else "recipe"
    batch = f"{request.global_batch:,} sequences, {short_count(request.tokens_per_step)} tokens"
    rate = f"{amount_text(storage_rate(cluster, site.storage), 'B/s')} for all instances together"
    fails = f"one in {1 / instance.failures.per_day:,.0f} days on each instance, " if instance.failures.per_day else ""
    fails += f"one in {plan.chosen.reliability.mtbf / 3600:,.0f} hours on all of them"
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
    # Over 117 readings of sources that were not looked at for the rules: docs/notebook/memory.md.
    error = (
        "published readings of other programs, which nothing was fitted to, are 16 % off in the median; hlat's own "
        "processes are within 8 % on CPUs, and were never measured on accelerators"
    )
    return [*plan_facts(plan), ("memory", error)]


def _layouts(plan: TrainingPlan) -> Html:
    """The table of all layouts, with the columns of the command line."""
    front = {id(planned) for _, planned in pareto_front_of_plans([plan])}
    rows = []
    for planned in (plan.chosen, *plan.alternatives):
        said = layout_json(plan.request, planned)
        marks = (id(planned) in front, len(plan.ranked) > 1 and plan.may_be_fastest(planned))
        cells = [cell(planned, said) for cell in OF_THE_PAGE.values()]
        rows.append([_name(planned), *cells, *("yes" if mark else "" for mark in marks)])
    heads = ("layout", *OF_THE_PAGE, "best trade-off", "may be fastest")
    caption = "The choice first, as --layout takes them; 4 of 5: the range of days of four in five runs"
    return joined([table(heads, rows, caption=caption, marked=0), paragraph(_ABBREVIATIONS)])


_ABBREVIATIONS = (
    "tp, pp, cp: tensor, pipeline and context parallelism; vpp: stages of a pipeline rank; zero: what is sharded over "
    "data-parallel ranks, as in ZeRO; rep: copies of these shards; mbs: sequences of a micro-batch; recompute: "
    "activations that the backward pass computes again; gather=never: inputs are kept instead of gathered again."
)


_FARTHEST = 1.5  # times the fastest layout of the slowest cluster: where the first view ends


def _time_and_memory(plans: Sequence[TrainingPlan]) -> Iterator[Html]:
    """Yield the chart of every layout by days and memory, with the Pareto frontier of each cluster, and its meaning."""
    dots, names = list[Dot](), [plan.request.cluster.name for plan in plans]
    for group, plan in enumerate(plans):
        every = [plan.chosen, *plan.alternatives]
        points = [(one.days, one.peak_memory / _GIB) for one in every]
        best = pareto_indices(points)
        dots += [
            Dot(*point, group, _name(one), _says(names[group], one), place in best, one is plan.chosen)
            for place, (point, one) in enumerate(zip(points, every, strict=True))
        ]
    if len(dots) < 2:
        return
    last = _FARTHEST * max(min(dot.x for dot in dots if dot.group == group) for group in range(len(plans)))
    yield scatter_chart("Time and memory of every layout", dots, names, "days", "memory of a device, GiB", until=last)
    hidden = sum(dot.x > last for dot in dots)
    more = f" {plural(hidden, 'slower layout')} lie further right: Reset shows all." if hidden else ""
    yield paragraph(f"The star is the choice. No layout is both faster and smaller than a filled dot.{more}")


def _cost_and_time(plans: Sequence[TrainingPlan]) -> Iterator[Html]:
    """Yield the chart of each cluster's choice by days and cost, if there are two prices, and its meaning."""
    names, chosen = [plan.request.cluster.name for plan in plans], [plan.chosen for plan in plans]
    dots = [
        Dot(one.days, one.cost_usd, group, name, _says(name, one), chosen=True, spread=one.interval.around(1))
        for group, (name, one) in enumerate(zip(names, chosen, strict=True))
        if one.cost_usd is not None
    ]
    if len(dots) > 1:
        yield scatter_chart("Cost against the deadline", dots, names, "days of training", "USD", height=360)
        yield paragraph(
            "A line is the range of four in five runs. If it ends before your deadline, nine in ten keep it."
        )


def _says(cluster: str, one: LayoutPrediction) -> str:
    terms = f"{one.peak_memory / _GIB:.1f} GiB, MFU {one.mfu:.1%}"
    return "\n".join(filter(None, [cluster, days_text(one), usd_words(one), terms]))


def _name(one: LayoutPrediction) -> str:
    """A layout as ``--layout`` takes it, with spaces at which a line may break."""
    return layout_text(one.candidate).replace(",", ", ")


def _memory(plan: TrainingPlan, ranks: Sequence[int]) -> Html:
    """Bars of what fills the memory of a device, for some pipeline ranks."""
    limit, memory = plan.request.cluster.memory_bytes, plan.chosen.memory
    fullest = f": {memory[ranks[0]].total / _GIB:.1f} of {limit / _GIB:.0f} GiB" if len(ranks) == 1 else ""
    return bar_chart(
        f"Memory of a device{fullest}",
        {f"rank {rank}": _sorted(_with_words(memory[rank].components())) for rank in ranks},
        lambda size: f"{size / _GIB:.2f} GiB",
        unit="GiB",
        scale=_GIB,
        limit=limit,
        limit_name=f"{limit / _GIB:.0f} GiB",
    )


def _with_words(memory: Mapping[str, float]) -> dict[str, float]:
    words = {"slack": "fragmentation", "runtime": "driver and libraries", "optimizer": "optimizer state"}
    return {words.get(part, part): size for part, size in memory.items()}


def _step(plan: TrainingPlan) -> Html:
    parts = {COMPONENT_NAMES[name]: seconds for name, seconds in plan.chosen.components.items()}
    total = plan.chosen.step_seconds
    return bar_chart(f"Time of a step: {duration(total)}", {"": _sorted(parts)}, duration, unit="seconds")


def _sorted(parts: Mapping[str, float]) -> dict[str, float]:
    """The parts of a bar, largest first, and the sum of those too small to be told apart."""
    least = _LEAST_PART * sum(parts.values())
    large = sorted((name for name, size in parts.items() if size >= least), key=lambda name: -parts[name])
    return {name: parts[name] for name in large} | {"other": sum(size for size in parts.values() if size < least)}


_LEAST_PART = 0.03  # of a bar


def _passes(plan: TrainingPlan) -> Html:
    """The passes of a step by pipeline rank; of a long step, the first ones."""
    ranks = step_timeline(plan).ranks
    first = max(1, _MOST_DRAWN_PASSES // len(ranks))
    spans = [
        Span(f"rank {one.rank}", one.kind, one.start, one.stop, f"micro-batch {one.micro_batch}, stage {one.stage}")
        for passes in ranks
        for one in passes[:first]
    ]
    return timeline_chart("Passes of a step; of a long one, the first", spans, "seconds")


_MOST_DRAWN_PASSES = 3000
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
    """Complete events of the trace event format, in microseconds; each stage of a recipe is a process there."""
    stages = plan.stages.values() or (plan,)
    events = [event for number, one in enumerate(stages) for event in _step_events(one, number)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _step_events(plan: TrainingPlan, process: int) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for rank, passes in enumerate(step_timeline(plan).ranks):
        name = {"name": f"pipeline rank {rank}"}
        events.append({"name": "thread_name", "ph": "M", "pid": process, "tid": rank, "args": name})
        for each in passes:
            events.append(
                {
                    "name": f"{each.kind} {each.micro_batch}",
                    "cat": each.kind,
                    "ph": "X",
                    "pid": process,
                    "tid": rank,
                    "ts": each.start * 1e6,
                    "dur": (each.stop - each.start) * 1e6,
                    "args": {"stage": each.stage, "micro_batch": each.micro_batch},
                }
            )
    return events
