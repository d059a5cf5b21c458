"""A grid of plans: models of several sizes on several numbers of instances, and what decides each layout.

    "1b,7b,70b", clusters or a kind of instance --plan_grid--> PlanGrid: one GridCell per model and cluster
        GridCell: the best layout of a plan, or what is in its way
                  settings that it does not have -> Alternative: how much slower the best layout with them is
    PlanGrid --grid_lines--> degrees by model and number of chips, predictions, alternatives
             --grid_page---> a heat map of the layouts, and the same tables

Reasons are predictions, as the layouts are: a pipeline is due to memory where no layout without one fits, and to the
batch where data parallelism alone would need more sequences than a step has.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import numpy as np

from hlat.hardware import Cluster, PriceKind, parse_cluster
from hlat.model import count_parameters
from hlat.page import Html, heat_map, page, paragraph, section, table
from hlat.planner.cost.calibration import undecided_ratio
from hlat.planner.expected import interval_text, likely, median_days, median_usd
from hlat.planner.plan import format_number, layout_json
from hlat.planner.problem.devices import comparison_note
from hlat.planner.problem.layouts import Candidate, candidates, layout_text
from hlat.planner.problem.loss_law import PlannedLoss, forecast_json
from hlat.planner.problem.question import PlanQuestion
from hlat.planner.problem.request import PlanRequest, has_stages, resolve_request
from hlat.planner.report.terminal import table_lines
from hlat.planner.search import CandidateLayouts, LayoutPrediction, best_layout, fitting_positions, step_seconds
from hlat.runtime.errors import PlanError
from hlat.runtime.quantities import rounded_text, short_count
from hlat.runtime.terminal import listed, wrapped

_TOKENS, _SEQUENCE, _GLOBAL_BATCH = 1_800_000_000_000, 4096, 1024  # HLAT's runs, arXiv 2404.10630
_MOST_CELLS = 64
_MOST_INSTANCES = 1 << 8  # where doubling ends if a model does not fit
_LARGER = 4  # times the instances on which the last model fits: where doubling ends
_COMPARED = 3  # layouts of a setting whose pipelines are simulated
_GIB = 1 << 30
_HEADS = ("model", "chips", "step s", "MFU", "GiB", "days", "4 of 5", "cost", "layout")
_SIZE = re.compile(r"\d+(\.\d+)?[mb]", re.IGNORECASE)
_OPTIONS = {
    *("grid", "cluster", "chips", "per", "tokens", "sequence_length", "global_batch", "precision"),
    *("ladder", "price", "interruptions", "prices_of", "storage", "pue", "as_json", "to", "hardware"),
}

Obstacle = Literal["memory", "batch", "degrees", "failures"]
"""No layout fits; the batch has too few sequences; degrees do not divide; failures leave no progress."""


@dataclass(frozen=True)
class Alternative:
    """The best layout with a setting that the chosen one does not have, or what is in its way."""

    layout: Candidate | None
    slower: float | None  # share by which its step is longer
    obstacle: Obstacle | None = None

    def __str__(self) -> str:
        return self.obstacle or f"{round(self.slower or 0.0, 2) + 0.0:+.0%}"  # never -0%


@dataclass(frozen=True)
class GridCell:
    """One model on one cluster."""

    model: str  # as asked for
    request: PlanRequest
    best: LayoutPrediction | None  # as a plan of the request has it
    obstacle: Obstacle | None  # None with a layout
    instead: Mapping[str, Alternative]  # by setting, those alone that the best layout does not have


@dataclass(frozen=True)
class PlanGrid:
    """Plans of several models, each on the same clusters."""

    cells: tuple[GridCell, ...]  # by model, then by cluster, in the order of the question

    @property
    def rows(self) -> dict[str, list[GridCell]]:
        """Cells by model."""
        return {name: [cell for cell in self.cells if cell.model == name] for name in {c.model: 0 for c in self.cells}}

    def to_dict(self) -> dict[str, Any]:
        """The grid under its documented keys (docs/planning.md), as JSON values."""
        first = self.cells[0].request
        run = {"tokens": first.tokens, "sequence": first.sequence, "global_batch": first.global_batch}
        return {**run, "precision": first.mode, "cells": [_cell_json(cell) for cell in self.cells]}


def check_grid_options(options: Mapping[str, Any]) -> None:
    """Raise PlanError if ``--grid`` is given with an option of another question, or without instances."""
    others = [f"--{name.replace('_', '-')}" for name, value in options.items() if value and name not in _OPTIONS]
    problems = [f"--grid asks for plans of several models; it does not go with {', '.join(others)}"] if others else []
    if bool(options["cluster"]) == bool(options["chips"]):
        problems.append(
            "--grid needs instances, either their numbers, as in --cluster p5.48xlarge:1,8,64, or their kind alone, as "
            "in --chips p5.48xlarge, whose number is then doubled"
        )
    if problems:
        raise PlanError("\n".join(problems))


def plan_grid(models: str, question: PlanQuestion) -> PlanGrid:
    """Plan a run of each model on each cluster, and predict the alternatives that explain its layout.

    Args:
        models: presets, recipes, config.json files or sizes such as 7b, separated by commas.
        question: clusters of one kind of chip, each with one number or several (p5.48xlarge:1,8). Without any,
            ``chips`` is an instance, whose number is doubled from the smallest on which a model fits. Tokens, sequence
            and batch are HLAT's where the question leaves them open.

    Raises:
        PlanError: an unknown model, clusters of several kinds, or more cells than a grid may have.
        HardwareError: a cluster is unknown.
        RecipeError: a recipe or config.json with mistakes.
    """
    question = replace(
        question,
        tokens=question.tokens or _TOKENS,
        sequence=question.sequence or _SEQUENCE,
        global_batch=question.global_batch or _GLOBAL_BATCH,
    )
    names = list(dict.fromkeys(filter(None, (word.strip() for word in models.split(",")))))
    parts = [cluster.rpartition(":") for cluster in question.clusters]
    given = [f"{kind}:{number}" for kind, _, numbers in parts for number in numbers.split(",")]
    clusters = [parse_cluster(text, question.catalog, question.unit) for text in given or [f"{question.chips}:1"]]
    if len({cluster.chip.name for cluster in clusters}) > 1:
        raise PlanError("a grid has one kind of chip: ask for one grid of each")
    if not 0 < len(names) * len(clusters) <= _MOST_CELLS:
        raise PlanError(f"{len(names)} models on {len(clusters)} clusters: a grid has 1 to {_MOST_CELLS} cells")
    price = question.price_kind(clusters)

    def column(cluster: Cluster) -> list[GridCell]:
        return list(map(_cell, names, _requests(names, question, cluster, price)))

    columns = [column(cluster) for cluster in clusters]
    if not given:
        columns = list(_doublings(columns[0], lambda number: column(replace(clusters[0], count=number))))
    if not columns:
        raise PlanError(f"{', '.join(names)}: none fits on up to {_MOST_INSTANCES // 2} instances: {question.chips}")
    return PlanGrid(tuple(cell for row in zip(*columns, strict=True) for cell in row))


def _requests(
    names: Sequence[str], question: PlanQuestion, cluster: Cluster, price: PriceKind | None
) -> list[PlanRequest]:
    """Resolve the request of each model on a cluster; PlanError with the mistakes of all."""
    found, problems = [], []
    for name in names:
        model = f"llama-class-{name}" if _SIZE.fullmatch(name) else name
        try:
            if has_stages(model):
                problems.append(
                    f"{name}: a grid plans every model with the same tokens and step, and each stage has its own. "
                    f"`hlat plan {name}` plans them; or name its preset or size here"
                )
                continue
            found.append(resolve_request(replace(question, model=model), cluster, price))
        except PlanError as error:
            problems += str(error).splitlines()
    if problems:
        raise PlanError("\n".join(dict.fromkeys(problems)))
    return found


def _doublings(first: list[GridCell], cells_of: Callable[[int], list[GridCell]]) -> Iterator[list[GridCell]]:
    """Yield the cells of 1, 2, 4, ... instances: from the first on which a model fits, to 4 times those of the last."""
    number, fitted = 1, dict[str, int]()
    while number < _MOST_INSTANCES and not (len(fitted) == len(first) and number > _LARGER * max(fitted.values())):
        cells = first if number == 1 else cells_of(number)
        fitted = {cell.model: number for cell in cells if cell.best is not None} | fitted
        if fitted:
            yield cells
        number *= 2


def _cell(name: str, request: PlanRequest) -> GridCell:
    listing = CandidateLayouts(request)
    try:
        best = best_layout(request, listing)
    except PlanError:  # failures leave no time to make progress
        return GridCell(name, request, None, "failures", {})
    if best is not None:
        return GridCell(name, request, likely(best), None, dict(_alternatives(request, best, listing)))
    obstacle: Obstacle = (
        "memory" if listing.layouts else "batch" if _would_be_possible(request, lambda one: True) else "degrees"
    )
    return GridCell(name, request, None, obstacle, {})


Setting = Callable[[Candidate], bool]
SETTINGS: dict[str, Setting] = {
    "dp only": lambda one: one.parallel.model_ranks == 1,
    "tp=1": lambda one: one.tensor == 1,
    "pp=1": lambda one: one.pipeline == 1,
    "cp=1": lambda one: one.context == 1,
    "zero<3": lambda one: one.zero < 3,
    "recompute=none": lambda one: one.recompute == "none",
}
"""Settings of simpler layouts."""


def _alternatives(
    request: PlanRequest, best: LayoutPrediction, listing: CandidateLayouts
) -> Iterator[tuple[str, Alternative]]:
    """Yield the best layout of each setting that the chosen one does not have."""
    tried, domain = listing.layouts, request.cluster.domain
    settings = {name: has for name, has in SETTINGS.items() if not has(best.candidate)}
    if 1 < best.candidate.tensor <= domain:
        settings[f"tp>{domain}"] = lambda one: one.tensor > domain  # a group that reaches beyond the fast links
    for name, has in settings.items():
        wanted = [index for index in listing.order if has(tried[index])]
        fitting = [tried[index] for index in islice(fitting_positions(listing, wanted), _COMPARED)]
        if fitting:
            steps = [step_seconds(request, layout) for layout in fitting]
            yield name, Alternative(fitting[int(np.argmin(steps))], min(steps) / best.step_seconds - 1)
        elif wanted:
            yield name, Alternative(None, None, "memory")
        elif _would_be_possible(request, has):
            yield name, Alternative(None, None, "batch")


def _would_be_possible(request: PlanRequest, has: Setting) -> bool:
    """True if a batch that every number of data-parallel ranks divides allows a layout."""
    batch = request.global_batch * request.cluster.devices
    return any(map(has, candidates(replace(request, global_batch=batch, ramp=()))))


def _cell_json(cell: GridCell) -> dict[str, Any]:
    cluster = cell.request.cluster
    return {
        "model": cell.model,
        "parameters": count_parameters(cell.request.model).total,
        "cluster": cluster.name,
        "chips": cluster.chips,
        "devices": cluster.devices,
        **_forecast_json(cell),
        "obstacle": cell.obstacle,
        "layout": None if cell.best is None else layout_json(cell.request, cell.best),
        "instead": {
            name: {"layout": one.layout and layout_text(one.layout), "slower": one.slower, "obstacle": one.obstacle}
            for name, one in cell.instead.items()
        },
    }


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


def _loss(cell: GridCell) -> PlannedLoss | str | None:
    """Loss of a cell's run by a ladder, or why there is none; None without a ladder."""
    try:
        return cell.request.loss
    except PlanError as error:  # of one model: others may be near enough to the ladder
        return str(error)


def _forecast_json(cell: GridCell) -> dict[str, Any]:
    loss = _loss(cell)
    return {"forecast": None, "no_forecast": loss} if isinstance(loss, str) else forecast_json(loss)


def _losses(planned: PlanGrid) -> tuple[str, list[list[str]]]:
    """Caption, heads and a row for each model of the losses that a ladder forecasts; empty without one."""
    losses = {cell.model: loss for cell in planned.cells if (loss := _loss(cell))}
    known = {name: loss for name, loss in losses.items() if not isinstance(loss, str)}
    rows = [[name, *str(one).split(", "), rounded_text(one.beyond, 2)] for name, one in known.items()]
    captions = [f"Loss by {one.ladder}; FLOPs as times those of the largest" for one in [*known.values()][:1]]
    refused = [loss for loss in losses.values() if isinstance(loss, str)]
    captions += [f"No loss: {listed(refused, between=' ')}"] if refused else []
    return ". ".join(captions), [["model", "loss", "4 of 5 runs", "FLOPs"], *rows] if rows else []


def _reasons(planned: PlanGrid) -> list[list[str]]:
    """Rows of the alternatives of each cell that has any."""
    found = {name for cell in planned.cells for name in cell.instead}
    used = [*(name for name in SETTINGS if name in found), *sorted(found - SETTINGS.keys())]
    rows = [["model", "chips", *used]]
    for cell in planned.cells:
        said = [str(cell.instead[name]) if name in cell.instead else "" for name in used]
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


_OF_FIVE = "4 of 5: the range of days of four in five runs"
_DEGREES = "Degrees of the best layout: tensor x pipeline x data, by number of chips"
_REASONS = "What decides: the best layout with another setting, by how much its step is longer"


def _meaning(of_empty: str = "") -> str:
    return (
        "memory: none fits; batch: a step has too few sequences for it; dp only: neither tensor nor pipeline nor "
        f"context parallelism{of_empty}. Below {undecided_ratio() - 1:.0%}, the model often names the wrong one."
    )


def grid_lines(planned: PlanGrid, columns: int) -> Iterator[str]:
    """Yield the degrees of all layouts, their predictions, and what decides them."""
    for sentence in _sentences(planned):
        yield from wrapped(sentence, columns, 2)
    yield from ("", *wrapped(_DEGREES, columns), *table_lines(_degrees(planned), columns))
    # A layout that ends with its line leaves an empty one.
    yield from ("", *filter(str.strip, table_lines([_HEADS, *_predictions(planned)], columns)))
    caption, losses = _losses(planned)
    if caption:
        yield from ("", *wrapped(caption, columns), *(table_lines(losses, columns) if losses else ()))
    reasons = _reasons(planned)
    if len(reasons) > 1:
        meaning = _meaning("; empty: the layout has this setting itself")
        yield from ("", *wrapped(_REASONS, columns), *table_lines(reasons, columns), *wrapped(meaning, columns, 2))


def grid_page(planned: PlanGrid) -> Html:
    """Make the complete page: a heat map of the best layouts, and what the lines have too."""
    caption, losses = _losses(planned)
    rows, instance = planned.rows, planned.cells[0].request.cluster.instance
    chart = heat_map(
        "Best layouts: degrees, MFU and days",
        _degrees(planned)[0][1:],
        list(rows),
        [[cell.best.mfu if cell.best else None for cell in row] for row in rows.values()],
        [list(map(_cell_text, row)) for row in rows.values()],
        across="number of chips",
        says=[[_layout_of(cell.best.candidate if cell.best else None) for cell in row] for row in rows.values()],
    )
    instead = [
        (cell.model, f"{cell.request.cluster.chips:,}", name, str(one), _layout_of(one.layout))
        for cell in planned.cells
        for name, one in cell.instead.items()
    ]
    decides = table(("model", "chips", "setting", "step", "layout"), instead, caption=_REASONS)
    contents = [
        paragraph("A cell has the tensor x pipeline x data parallelism of its best layout, the MFU, and the days."),
        paragraph("Darker is a higher MFU. Grey cells have no layout, and say why."),
        chart,
        *(paragraph(line.replace("assumed  ", "Assumed: ")) for line in _sentences(planned)),
        section("Predictions", [table(_HEADS, _predictions(planned), caption=_OF_FIVE)]),
        section(
            "Loss", [table(losses[0], losses[1:], caption=caption)] if losses else [paragraph(caption)] * bool(caption)
        ),
        section("What decides", [paragraph(_meaning()), decides] if instead else []),
    ]
    return page(f"{', '.join(rows)} on {instance.name}", contents)


def _cell_text(cell: GridCell) -> str:
    best = cell.best
    if best is None:
        return {"memory": "does not fit", "batch": "batch too small"}.get(cell.obstacle or "", _degrees_text(cell))
    return f"{_degrees_text(cell)}\n{best.mfu:.0%} MFU\n{median_days(best)} days"


def _layout_of(layout: Candidate | None) -> str:
    return layout_text(layout) if layout else ""
