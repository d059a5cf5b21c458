"""Results of a ladder: its design before, a table of its runs, the law that they give, the forecast of the recipe.

LadderPlan --design_lines--> sizes, tokens, planned time
LadderPlan, RungResults --LadderReport--> lines of 80 columns, or JSON values
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hlat.draft import time_text
from hlat.forecast import LADDER_FILE, LEAST_RUNS, SIZE_WORDS, Forecast, Ladder, sizes_of
from hlat.ladder.execution import RungResult, ladder_of
from hlat.ladder.record import LadderPlan
from hlat.runtime.errors import PlanError
from hlat.runtime.quantities import rounded_text, short_count
from hlat.runtime.terminal import listed, plural, wrapped

_NONE = "-"
_TASKS = 3  # whose accuracies are printed
_COLUMNS = 78  # of a terminal, after two blanks


def _time(seconds: float | None) -> str:
    return _NONE if seconds is None else time_text(seconds)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _count(value: float) -> str:
    """Write a count in three digits with its unit, thousands included."""
    return short_count(value) if value >= 1e6 else f"{rounded_text(value / 1e3)}k"


def design_lines(plan: LadderPlan) -> list[str]:
    """Lines of a table of the runs before they are started, and what they cost together."""
    rows = [("run", "parameters", "tokens", "steps", "goes on from", "FLOPs", "time")]
    for run in plan.runs:
        start = _NONE if run.parent is None else f"step {run.first:,}"
        flops = f"{run.own_flops:.2g}"
        rows.append(
            (run.name, _count(run.parameters), _count(run.tokens), f"{run.steps:,}", start, flops, _time(run.seconds))
        )
    without = "" if any(run.validated_tokens for run in plan.runs) else " without validations"
    together = f"{plural(len(plan.runs), 'run')}: {plan.flops:.2g} FLOPs{without}"
    whole = plan.target.recipe
    target = f"for {_count(sizes_of(whole)['total'])} parameters on {_count(whole.total_tokens)} tokens"
    seconds = "" if plan.seconds is None else f", {time_text(plan.seconds)}"
    return [*_table(rows), f"{together}{seconds}; {target}"]


@dataclass(frozen=True)
class LadderReport:
    """A ladder as it stands."""

    plan: LadderPlan
    results: tuple[RungResult, ...]

    @cached_property
    def ladder(self) -> Ladder | None:
        """Its finished runs; None without any."""
        return ladder_of(self.plan, self.results)

    @property
    def missing(self) -> list[str]:
        """Names of runs that have not finished."""
        return [result.run.name for result in self.results if result.loss is None]

    @cached_property
    def _forecast(self) -> Forecast | str:
        ladder, recipe = self.ladder, self.plan.target.recipe
        if ladder is None or len(ladder.runs) < LEAST_RUNS:
            return f"{plural(len(ladder.runs) if ladder else 0, 'finished run')}: a law needs {LEAST_RUNS}"
        try:
            return ladder.forecast_recipe(recipe)  # its length, and what is chosen by it, may be other ones
        except PlanError as error:
            return str(error)

    @property
    def forecast(self) -> Forecast | None:
        """Forecast of the recipe itself; None if the finished runs do not determine it."""
        return None if isinstance(self._forecast, str) else self._forecast

    def _fitted(self) -> dict[str, float]:
        """Losses by the law, by run; empty without a law."""
        if self.ladder is None or self.forecast is None:
            return {}
        law, kind = self.ladder.fit.law, self.ladder.kind
        return {run.name: law.loss(run.sizes[kind], run.tokens) for run in self.ladder.runs}

    def lines(self) -> list[str]:
        """Lines of text: a table of the runs, the law with its range, and the forecast."""
        fitted = self._fitted()
        rows = [("run", "parameters", "tokens", "loss", "fitted", "planned", "actual")]
        for result in self.results:
            run, law = result.run, fitted.get(result.run.name)
            loss = result.state if result.loss is None else f"{result.loss:.4f}"
            planned = None if run.seconds is None else run.seconds - run.outside  # as the record counts
            cells = (loss, _NONE if law is None else f"{law:.4f}", _time(planned), _time(result.seconds))
            rows.append((run.name, _count(run.parameters), _count(run.tokens), *cells))
        return [*_table(rows), *self._law_lines()]

    def _law_lines(self) -> Iterator[str]:
        if self.missing:
            verb = "has" if len(self.missing) == 1 else "have"
            others = (
                ""
                if self.forecast is None
                else f"; the law is from the other {plural(len(self.results) - len(self.missing), 'run')}"
            )
            yield f"{listed(self.missing)} {verb} not finished{others}"
        if self.ladder is None or isinstance(self._forecast, str):
            yield from wrapped(f"no forecast: {self._forecast}", _COLUMNS + 2, 2)
            return
        yield f"loss = E + A / N^alpha + B / D^beta; N: {SIZE_WORDS[self.ladder.kind]}, D: tokens"
        for name, (value, low, high) in self.constants().items():
            yield f"  {name:5} {rounded_text(value)}, 80 % range {rounded_text(low)} to {rounded_text(high)}"
        if seeds := self.ladder.fit.seed_noise:
            yield f"  seeds alone move a loss by {seeds:.2%} (standard deviation)"
        recipe, end = self.plan.target.recipe, self._forecast.end
        size = f"{_count(sizes_of(recipe)['total'])} parameters on {_count(recipe.total_tokens)} tokens"
        yield f"forecast for {size}:"
        yield f"  loss  {end.loss:.4f}, 80 % range {end.low:.4f} to {end.high:.4f}"
        for task, (value, low, high) in list(self._forecast.tasks.items())[:_TASKS]:
            yield f"  {task}  accuracy {value:.3f}, 80 % range {low:.3f} to {high:.3f}"
        if (more_tasks := len(self._forecast.tasks) - _TASKS) > 0:
            yield f"  {more_tasks} more in --json"
        for warning in self._forecast.warnings:
            yield from (f"  {line}" for line in wrapped(warning, _COLUMNS))
        more = self.ladder.next_run(sizes_of(recipe), recipe.total_tokens)
        narrower = f"would make that range {1 - more.narrowing:.0%} narrower"
        yield f"  a further run of N = {_count(more.size)} on {_count(more.tokens)} tokens {narrower}"
        yield f"recorded in {self.plan.folder / LADDER_FILE}"

    def constants(self) -> dict[str, tuple[float, float, float]]:
        """Return the constants of the law by name, each with the 80 % range of fits to resampled runs."""
        if self.ladder is None or self.forecast is None:
            return {}
        fit, found = self.ladder.fit, {}
        for name, field in (("E", "irreducible"), ("A", "a"), ("B", "b"), ("alpha", "alpha"), ("beta", "beta")):
            low, high = np.quantile([getattr(law, field) for law in fit.samples], (0.1, 0.9))
            found[name] = (float(getattr(fit.law, field)), float(low), float(high))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        fitted = self._fitted()
        runs = [
            {
                **asdict(result.run),
                "folder": str(self.plan.folder_of(result.run)),
                "state": result.state,
                "loss": result.loss,
                "fitted_loss": fitted.get(result.run.name),
                "actual_seconds": result.seconds,
                "exit_code": result.exit_code,
            }
            for result in self.results
        ]
        law = {name: dict(zip(("value", "low", "high"), each, strict=True)) for name, each in self.constants().items()}
        return {
            "folder": str(self.plan.folder),
            "runs": runs,
            "missing": self.missing,
            "law": law or None,
            "seed_noise": self.ladder.fit.seed_noise if law and self.ladder else None,
            "forecast": None if self.forecast is None else asdict(self.forecast),
        }
