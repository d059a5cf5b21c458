"""Plans as tables for a terminal: the choice of each cluster first and marked, its alternatives below.

    plans --plan_lines--> rows of texts, meaning of the marks
    rows of texts, width --table_lines--> lines: columns as wide as their texts, long texts of the last one broken
    words of a command, width --command_lines--> lines

Several clusters have a table of their choices first, a row each. A wide terminal shows each degree of a layout in a
column of its own; a narrow one, 80 columns, the layout as ``--layout`` takes it.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hlat.planner.cost.calibration import undecided_ratio
from hlat.planner.expected import interval_text, median_days, median_energy, median_usd, outlook
from hlat.planner.plan import TrainingPlan, format_number, layout_json
from hlat.planner.problem.devices import comparison_note
from hlat.planner.problem.layouts import layout_text
from hlat.planner.report.comparison import pareto_front_of_plans
from hlat.planner.search import TIE_TOLERANCE, LayoutPrediction
from hlat.runtime.quantities import short_count
from hlat.runtime.terminal import wrapped

WIDE = 140
"""Columns of a terminal from which on the wide table is printed."""

_SHORT_SCHEDULES = {"interleaved-1f1b": "interleaved", "interleaved-zero-bubble": "zero bubble"}

Cell = Callable[[LayoutPrediction, dict[str, Any]], str]


def _value_of(key: str) -> Cell:
    return lambda planned, said: str(said[key])


_CELLS: dict[str, Cell] = {
    "tp": _value_of("tensor"),
    "pp": _value_of("pipeline"),
    "dp": _value_of("data"),
    "cp": _value_of("context"),
    "v": _value_of("virtual_stages"),
    "schedule": lambda planned, said: (
        _SHORT_SCHEDULES.get(planned.candidate.schedule, planned.candidate.schedule) if said["pipeline"] > 1 else ""
    ),
    "zero": lambda planned, said: f"{said['zero']}" + (f" x{said['replicas']}" if said["replicas"] > 1 else ""),
    "mbs": _value_of("micro_batch"),
    "acc": _value_of("accumulation"),
    "recompute": _value_of("activation_checkpointing"),
    "GiB": lambda planned, said: f"{said['memory_gib']:.1f}",
    "step s": lambda planned, said: format_number(planned.step_seconds),
    "tok/s/chip": lambda planned, said: f"{said['tokens_per_second_per_chip']:,.0f}",
    "MFU": lambda planned, said: f"{planned.mfu:.1%}",
    "days": lambda planned, said: median_days(planned),
    "4 of 5": lambda planned, said: interval_text(planned, planned.days),
    "cost": lambda planned, said: median_usd(planned),
    "goodput": lambda planned, said: f"{planned.goodput:.1%}",
    "energy": lambda planned, said: median_energy(planned),
    "layout": lambda planned, said: layout_text(planned.candidate),
}


def _columns(*heads: str) -> dict[str, Cell]:
    return {head: _CELLS[head] for head in heads}


_WIDE = {head: cell for head, cell in _CELLS.items() if head not in ("energy", "layout")}
# The ranges of all layouts are in one ratio to their medians: the headline has that of the choice.
_NARROW = _columns("GiB", "step s", "MFU", "days", "cost", "layout")
_STAGE, _OF_ONE_STAGE = _NARROW, ("step s", "layout")
OF_THE_PAGE = _columns("days", "4 of 5", "cost", "GiB", "step s", "tok/s/chip", "MFU")
"""Columns of a layout on the plan's page; a phone shows the first ones."""
_SUMMARY = _columns("days", "4 of 5", "cost", "energy", "layout")


def plan_lines(plans: Sequence[TrainingPlan], columns: int, *, layouts: bool = True) -> Iterator[str]:
    """Yield the table of some plans, and the meaning of its marks; ``layouts=False``: of clusters alone."""
    # By identity: predictions hold dictionaries, so they have no hash.
    front = {id(planned) for _, planned in pareto_front_of_plans(list(plans))}
    if len(plans) > 1:
        yield from table_lines(list(summary(plans)), columns)
        yield from [""] if layouts else []
    marks = list(_notes(plans))
    if layouts:
        yield from _layout_lines(plans, columns, front)
        marks += [] if plans[0].stages else _marks(plans, len(front))
    for mark in marks:
        yield from wrapped(mark, columns, 2)


def _layout_lines(plans: Sequence[TrainingPlan], columns: int, front: set[int]) -> Iterator[str]:
    """Yield the layouts of each plan, or its stages; in a wide terminal those of all plans in one table."""
    wide, staged = columns >= WIDE, bool(plans[0].stages)
    for plan in plans:
        yield from wrapped(headline(plan), columns, 2)
        if staged:
            yield from table_lines(list(stage_rows(plan)), columns)
        elif not wide:
            yield from table_lines([["", *_NARROW], *_rows(plan, _NARROW, front, named=False)], columns)
    if wide and not staged:
        yield ""
        rows = [row for plan in plans for row in _rows(plan, _WIDE, front, named=True)]
        yield from table_lines([["", "cluster", *_WIDE], *rows], columns)
    if not staged:
        yield ""


def headline(plan: TrainingPlan) -> str:
    """The answer of a plan: median and range of its days and cost, and of its loss if a ladder forecasts it."""
    loss = f"; loss {plan.request.loss}" if plan.request.loss else ""
    return f"{plan.request.cluster.name}: {outlook(plan.chosen)}{loss}, in 4 of 5 runs"


def summary(plans: Sequence[TrainingPlan]) -> Iterator[list[str]]:
    """Yield the heads and a row for each cluster: its choice."""
    yield ["cluster", "chips", *_SUMMARY]
    for plan in plans:
        planned, said = plan.chosen, layout_json(plan.request, plan.chosen)
        cells = [cell(planned, said) for cell in _SUMMARY.values()]
        cells[-1] = "each stage its own" if plan.stages else cells[-1]
        yield [plan.request.cluster.name, f"{plan.request.cluster.chips:,}", *cells]


def _rows(plan: TrainingPlan, cells: dict[str, Cell], front: set[int], *, named: bool) -> Iterator[list[str]]:
    """Yield the rows of a plan; if ``named``, the first has the cluster's name."""
    for planned in (plan.chosen, *plan.alternatives):
        chosen = planned is plan.chosen
        tied = len(plan.ranked) > 1 and plan.may_be_fastest(planned)
        marks = f"{'>' if chosen else ' '}{'*' if id(planned) in front else ' '}{'~' if tied else ' '}"
        name = [plan.request.cluster.name if chosen else ""] if named else []
        said = layout_json(plan.request, planned)
        yield [marks, *name, *(cell(planned, said) for cell in cells.values())]


def stage_rows(plan: TrainingPlan) -> Iterator[list[str]]:
    """Yield the heads, a row for each stage of a plan, and one for all of them."""
    yield ["stage", "tokens", "sequence", *_STAGE]
    for name, one in plan.stages.items():
        said = layout_json(one.request, one.chosen)
        cells = [cell(one.chosen, said) for cell in _STAGE.values()]
        yield [name, short_count(one.request.tokens), f"{one.request.sequence:,}", *cells]
    said = layout_json(plan.request, plan.chosen)
    cells = ["" if head in _OF_ONE_STAGE else cell(plan.chosen, said) for head, cell in _STAGE.items()]
    yield ["all", short_count(plan.request.tokens), "", *cells]


def _notes(plans: Sequence[TrainingPlan]) -> Iterator[str]:
    for plan in plans:
        if note := comparison_note(plan.request):
            yield f"! {plan.request.cluster.name}: {note}"


def _marks(plans: Sequence[TrainingPlan], front: int) -> Iterator[str]:
    searched = [plan for plan in plans if plan.ranked]
    if searched:
        plainest = any(plan.chosen is not plan.ranked[0] for plan in searched)
        yield f"> the choice: the {f'plainest within {TIE_TOLERANCE:.0%} of the ' * plainest}fastest layout"
        # The ratio from which on the faster layout is so in 4 of 5 pairs.
        apart = undecided_ratio() - 1
        yield f"~ may be the fastest: below {apart:.0%}, the model often names the wrong one"
    if front > 1:
        yield "* no other row is better in time, cost and memory at once"


LEFT = ("stage", "cluster", "schedule", "recompute", "layout", "model", "best for")
"""Heads of columns of words, which are aligned to the left; numbers are to the right."""

_NARROWEST = 10  # columns of the last cell, however narrow the terminal is


def table_lines(rows: Sequence[Sequence[str]], columns: int) -> Iterator[str]:
    """Yield the lines of a table whose first row has the heads; long texts of the last column are broken."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    before = sum(widths[:-1]) + len(widths) - 1
    last = max(_NARROWEST, columns - before)
    for row in rows:
        cells = [
            text.ljust(width) if head in LEFT else text.rjust(width)
            for head, text, width in zip(rows[0][:-1], row[:-1], widths[:-1], strict=True)
        ]
        if rows[0][-1] not in LEFT:
            yield " ".join([*cells, row[-1].rjust(widths[-1])]).rstrip()
            continue
        first, *more = _broken(row[-1], last)
        yield " ".join([*cells, first]).rstrip()
        yield from (" " * before + text for text in more)


def _broken(text: str, width: int) -> list[str]:
    """Break a text after commas and spaces into pieces of a width; after hyphens too if a word is wider."""
    pieces = [""]
    for word in re.findall(r"[^, -]*[, -]?" if max(map(len, re.split("[, ]", text))) > width else r"[^, ]*[, ]?", text):
        if word.strip() and pieces[-1] and len(pieces[-1]) + len(word.rstrip()) > width:
            pieces.append("")
        pieces[-1] += word
    return [piece.rstrip() for piece in pieces]


def command_lines(words: Sequence[str], columns: int) -> Iterator[str]:
    """Yield a command in lines that a shell takes as one."""
    line = ""
    for word in map(shlex.quote, words):
        if line and len(line) + len(word) + 3 > columns:
            yield f"{line} \\"
            line = "    " + word
        else:
            line = f"{line} {word}" if line else word
    yield line
