"""Plans as a table for a terminal: the choice of each cluster first and marked, its alternatives below.

Several clusters have a table of their choices first, a row each. A wide terminal shows each degree of a layout in a
column of its own; a narrow one, 80 columns, the layout as ``--layout`` takes it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hlat.planner.cost.ratio_interval import undecided_ratio
from hlat.planner.problem.layout_text import layout_text
from hlat.planner.problem.runnable import comparison_note
from hlat.planner.report.comparison import pareto_front_of_plans
from hlat.planner.report.energy import energy_text
from hlat.planner.report.explain import interval_text
from hlat.planner.report.text_table import table_lines, wrapped
from hlat.planner.search.plan import TrainingPlan, format_number, layout_json
from hlat.planner.search.search import LayoutPrediction
from hlat.planner.search.tie_break import TIE_TOLERANCE

WIDE = 140
"""Columns of a terminal from which on the wide table is printed."""

_SCHEDULES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved-1f1b": "interleaved",
    "interleaved-zero-bubble": "zero bubble",
    "zbv": "zbv",
}

Cell = Callable[[LayoutPrediction, dict[str, Any]], str]


def _of(key: str) -> Cell:
    return lambda planned, said: str(said[key])


_LAYOUT: dict[str, Cell] = {
    "tp": _of("tensor"),
    "pp": _of("pipeline"),
    "dp": _of("data"),
    "cp": _of("context"),
    "v": _of("virtual_stages"),
    "schedule": lambda planned, said: _SCHEDULES[said["schedule"]] if said["pipeline"] > 1 else "",
    "zero": lambda planned, said: f"{said['zero']}" + (f" x{said['replicas']}" if said["replicas"] > 1 else ""),
    "mbs": _of("micro_batch"),
    "acc": _of("accumulation"),
    "recompute": _of("activation_checkpointing"),
}
_GIB: dict[str, Cell] = {"GiB": lambda planned, said: f"{said['memory_gib']:.1f}"}
_STEP: dict[str, Cell] = {"step s": lambda planned, said: format_number(planned.step_seconds)}
_SPEED: dict[str, Cell] = {"tok/s/chip": lambda planned, said: f"{said['tokens_per_second_per_chip']:,.0f}"}
_RUN: dict[str, Cell] = {
    "MFU": lambda planned, said: f"{planned.mfu:.1%}",
    "days": lambda planned, said: format_number(planned.days),
    "USD": lambda planned, said: "" if planned.cost_usd is None else format_number(planned.cost_usd, 0),
}
_LIKELY: dict[str, Cell] = {"days, 4 of 5": lambda planned, said: interval_text(planned, planned.days)}
_GOODPUT: dict[str, Cell] = {"goodput": lambda planned, said: f"{planned.goodput:.1%}"}
_ENERGY: dict[str, Cell] = {"energy": lambda planned, said: energy_text(planned.kwh)}
_SHORT: dict[str, Cell] = {"layout": lambda planned, said: layout_text(planned.candidate)}

_WIDE = _LAYOUT | _GIB | _STEP | _SPEED | _RUN | _LIKELY | _GOODPUT
_NARROW = _GIB | _STEP | _RUN | _SHORT
_SUMMARY: dict[str, Cell] = {
    "days": _RUN["days"],
    "4 of 5": _LIKELY["days, 4 of 5"],
    "USD": _RUN["USD"],
    **_ENERGY,
    **_SHORT,
}


def plan_lines(plans: Sequence[TrainingPlan], columns: int, *, layouts: bool = True) -> Iterator[str]:
    """Yield the table of some plans, and the meaning of its marks.

    Args:
        plans: the plans.
        columns: width of the terminal.
        layouts: False for the table of clusters alone.
    """
    front = {id(planned) for _, planned in pareto_front_of_plans(list(plans))}
    if len(plans) > 1:
        yield from table_lines(list(_summary(plans)), columns)
        yield from [""] if layouts else []
    if not layouts:
        for mark in _notes(plans):
            yield from wrapped(mark, columns, 2)
        return
    if columns >= WIDE:
        rows = [row for plan in plans for row in _rows(plan, _WIDE, front, named=True)]
        yield from table_lines([["", "cluster", *_WIDE], *rows], columns)
    else:
        for plan in plans:
            yield plan.request.cluster.name
            yield from table_lines([["", *_NARROW], *_rows(plan, _NARROW, front, named=False)], columns)
    yield ""
    for mark in [*_notes(plans), *_marks(plans, len(front))]:
        yield from wrapped(mark, columns, 2)


def _summary(plans: Sequence[TrainingPlan]) -> Iterator[list[str]]:
    """Yield the heads and a row for each cluster: its choice."""
    yield ["cluster", "chips", *_SUMMARY]
    for plan in plans:
        planned, said = plan.chosen, layout_json(plan.request, plan.chosen)
        cells = [cell(planned, said) for cell in _SUMMARY.values()]
        yield [plan.request.cluster.name, f"{plan.request.cluster.chips:,}", *cells]


def _rows(plan: TrainingPlan, cells: dict[str, Cell], front: set[int], *, named: bool) -> Iterator[list[str]]:
    """Yield the rows of a plan; with the cluster's name in the second column of its first one if it is named."""
    for planned in (plan.chosen, *plan.alternatives):
        chosen = planned is plan.chosen
        tied = len(plan.ranked) > 1 and plan.may_be_fastest(planned)
        marks = f"{'>' if chosen else ' '}{'*' if id(planned) in front else ' '}{'~' if tied else ' '}"
        name = [plan.request.cluster.name if chosen else ""] if named else []
        said = layout_json(plan.request, planned)
        yield [marks, *name, *(cell(planned, said) for cell in cells.values())]


def _notes(plans: Sequence[TrainingPlan]) -> Iterator[str]:
    for plan in plans:
        if note := comparison_note(plan.request):
            yield f"! {plan.request.cluster.name}: {note}"


def _marks(plans: Sequence[TrainingPlan], front: int) -> Iterator[str]:
    searched = [plan for plan in plans if plan.ranked]
    tied = [plan for plan in searched if plan.chosen is not plan.ranked[0]]
    if tied:
        yield f"> the choice: the plainest layout that is within {TIE_TOLERANCE:.0%} of the fastest"
    elif searched:
        yield "> the choice: the fastest layout"
    if searched:
        apart = undecided_ratio() - 1
        yield f"~ may be the fastest: below {apart:.0%}, the model often names the wrong one"
    if front > 1:
        yield "* no other row is better in time, cost and memory at once"
