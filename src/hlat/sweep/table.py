"""Results of a sweep as a table and as JSON, the best run first."""

from collections.abc import Sequence
from typing import Any

from hlat.sweep.running import SweepResult

_NUMBERS = ("state", "step", "loss", "validation", "tokens/s")


def ranked(results: Sequence[SweepResult]) -> list[SweepResult]:
    """Order the runs by validation loss, or training loss if no run has one; runs without a number come last."""
    by_validation = any(_validation(result) is not None for result in results)
    score = _validation if by_validation else _loss
    return sorted(results, key=lambda result: (score(result) is None, score(result) or 0.0))


def sweep_lines(results: Sequence[SweepResult]) -> list[str]:
    """Return the lines of a table: a column for each field that varies, then what the runs have reached."""
    order = ranked(results)
    fields = list(order[0].run.values)
    rows = [(*fields, *_NUMBERS), *(_cells(result, fields) for result in order)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def sweep_json(results: Sequence[SweepResult]) -> list[dict[str, Any]]:
    """Return the results as JSON values, the best run first."""
    return [
        {
            "name": result.run.name,
            "values": result.run.values,
            "folder": str(result.run.folder),
            "state": _state(result),
            "step": None if result.summary is None else result.summary.step,
            "loss": _loss(result),
            "validation_loss": _validation(result),
            "tokens_per_second": None if result.summary is None else result.summary.tokens_per_second,
            "exit_code": result.exit_code,
        }
        for result in ranked(results)
    ]


def _cells(result: SweepResult, fields: Sequence[str]) -> tuple[str, ...]:
    summary = result.summary
    speed = None if summary is None else summary.tokens_per_second
    numbers = (
        (None if summary is None else summary.step, "{:,}"),
        (_loss(result), "{:.4f}"),
        (_validation(result), "{:.4f}"),
        (speed, "{:,.0f}"),
    )
    shown = ("-" if value is None else pattern.format(value) for value, pattern in numbers)
    return (*(result.run.values[field] for field in fields), _state(result), *shown)


def _state(result: SweepResult) -> str:
    return "not begun" if result.summary is None else result.summary.state


def _loss(result: SweepResult) -> float | None:
    return None if result.summary is None else result.summary.loss


def _validation(result: SweepResult) -> float | None:
    return None if result.summary is None else result.summary.validation_loss
