"""A grid of plans as lines for a terminal, and as a page.

PlanGrid --grid_lines--> degrees by model and number of chips, predictions, alternatives
         --grid_page---> the same tables, alternatives with their layouts, and charts
"""

from collections.abc import Callable, Iterator
from typing import Any

from hlat.page import Dot, Html, grid, page, paragraph, scatter_chart, section, table
from hlat.planner.cost.calibration import undecided_ratio
from hlat.planner.expected import interval_text, median_days, median_usd
from hlat.planner.grid import SETTINGS, Alternative, GridCell, PlanGrid
from hlat.planner.plan import format_number
from hlat.planner.problem.devices import comparison_note
from hlat.planner.problem.layouts import layout_text
from hlat.planner.report.terminal import table_lines
from hlat.runtime.quantities import short_count
from hlat.runtime.terminal import wrapped

_GIB = 1 << 30
_HEADS = ("model", "chips", "step s", "MFU", "GiB", "days", "4 of 5", "cost", "layout")


def _degrees(planned: PlanGrid) -> list[list[str]]:
    """Rows of the degrees of each model by number of chips."""
    rows = planned.rows
    heads = [f"{cell.request.cluster.chips:,}" for cell in next(iter(rows.values()))]
    return [["model", *heads], *([name, *map(_degrees_text, cells)] for name, cells in rows.items())]


def _degrees_text(cell: GridCell) -> str:
    if cell.best is None:
        return cell.obstacle or ""
    layout = cell.best.candidate
    axes = [layout.tensor, layout.pipeline, layout.data] + [layout.context] * (layout.context > 1)
    return "x".join(map(str, axes))


def _predictions(planned: PlanGrid) -> Iterator[list[str]]:
    """Yield the row of each cell's prediction."""
    for cell in planned.cells:
        best, row = cell.best, [cell.model, f"{cell.request.cluster.chips:,}"]
        if best is None:
            yield [*row, *[""] * (len(_HEADS) - len(row) - 1), f"none: {cell.obstacle}"]
            continue
        yield [
            *row,
            format_number(best.step_seconds),
            f"{best.mfu:.1%}",
            f"{best.peak_memory / _GIB:.1f}",
            median_days(best),
            interval_text(best, best.days),
            median_usd(best),
            layout_text(best.candidate),
        ]


def _reasons(planned: PlanGrid, form: Callable[[Alternative], str]) -> list[list[str]]:
    """Rows of the alternatives of each cell that has any."""
    found = {name for cell in planned.cells for name in cell.instead}
    used = [*(name for name in SETTINGS if name in found), *sorted(found - SETTINGS.keys())]
    rows = [["model", "chips", *used]]
    for cell in planned.cells:
        said = [form(cell.instead[name]) if name in cell.instead else "" for name in used]
        rows += [[cell.model, f"{cell.request.cluster.chips:,}", *said]] if any(said) else []
    return rows


def _sentences(planned: PlanGrid) -> Iterator[str]:
    """Yield what the run is, and what is to be known of the cluster."""
    first = planned.cells[0].request
    price = first.cluster.price(first.price)
    yield (
        f"{short_count(first.tokens)} tokens in steps of {first.global_batch:,} sequences of {first.sequence:,}, "
        f"precision {first.mode}, {'price unknown' if price is None else f'{price[0]} prices'}; an instance is "
        f"{first.cluster.instance.chips} chips, {first.cluster.devices_per_instance} devices; fast links join "
        f"{max(cell.request.cluster.domain for cell in planned.cells)} devices."
    )
    notes = (f"! {note}" for cell in planned.cells if (note := comparison_note(cell.request)))
    assumed = (f"assumed  {one}" for cell in planned.cells for one in cell.request.assumed)
    yield from dict.fromkeys([*notes, *assumed])


_DEGREES = "Degrees of the best layout: tensor x pipeline x data, by number of chips"
_REASONS = "What decides: the best layout with another setting, by how much its step is longer"


def _meaning() -> str:
    return (
        "memory: none fits; batch: a step has too few sequences for it; dp only: neither tensor nor pipeline nor "
        f"context parallelism; empty: the layout has this setting itself. Below {undecided_ratio() - 1:.0%}, the "
        "model often names the wrong one."
    )


def grid_lines(planned: PlanGrid, columns: int) -> Iterator[str]:
    """Yield the degrees of all layouts, their predictions, and what decides them."""
    for sentence in _sentences(planned):
        yield from wrapped(sentence, columns, 2)
    yield from ("", *wrapped(_DEGREES, columns), *table_lines(_degrees(planned), columns))
    # A layout that ends with its line leaves an empty one.
    yield from ("", *filter(str.strip, table_lines([_HEADS, *_predictions(planned)], columns)))
    reasons = _reasons(planned, str)
    if len(reasons) > 1:
        yield from ("", *wrapped(_REASONS, columns), *table_lines(reasons, columns), *wrapped(_meaning(), columns, 2))


def grid_page(planned: PlanGrid) -> Html:
    """Make the complete page: the same tables, alternatives with their layouts, and charts."""
    names, found = list(planned.rows), [cell for cell in planned.cells if cell.best is not None]
    charts = [
        scatter_chart(
            f"Devices and {what}",
            [
                Dot(cell.request.cluster.devices, value(cell.best), True, names.index(cell.model), cell.model)
                for cell in found
            ],
            names,
            "devices",
            unit,
        )
        for what, unit, value in _CHARTS
        if found
    ]
    degrees, reasons = _degrees(planned), _reasons(planned, _with_layout)
    cluster = planned.cells[0].request.cluster
    contents = [
        *map(paragraph, _sentences(planned)),
        section(_DEGREES, [table(degrees[0], degrees[1:], caption="Degrees"), grid(charts)]),
        section("Predictions", [table(_HEADS, _predictions(planned), caption="Predictions")]),
        section(_REASONS, [table(reasons[0], reasons[1:], caption="Alternatives"), paragraph(_meaning())]),
    ]
    return page(f"{', '.join(names)} on {cluster.instance.name}", contents)


_CHARTS: tuple[tuple[str, str, Callable[[Any], float]], ...] = (
    ("MFU", "percent of the peak", lambda best: 100 * best.mfu),
    ("days", "days of the run", lambda best: best.days),
)


def _with_layout(one: Alternative) -> str:
    return str(one) if one.layout is None else f"{one}: {layout_text(one.layout)}"
