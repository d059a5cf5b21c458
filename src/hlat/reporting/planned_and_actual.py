"""Sections of a report that show what was planned beside what happened: plan and cost, and the data mixture.

recipe, INSTANCE:N -> TrainingPlan of the run's own layout: memory, step time, days, dollars       (predicted)
metrics, events    -> medians, time so far, tokens left                                            (actual)

data section, samples consumed -> Mixture.counts -> tokens of each source, asked and delivered
prepared data without weights  -> manifest       -> tokens of each source in an epoch
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from hlat.config import Recipe
from hlat.data import Mixture, is_weighted, phase_weights, read_data_manifest
from hlat.hardware import Cluster, load_catalog, parse_cluster
from hlat.page import Html, bar_chart, duration, format_value, joined, paragraph, table
from hlat.planner import (
    LayoutPrediction,
    PlanQuestion,
    days_text,
    make_plan,
    price_kind,
    resolve_request,
    usd_words,
    whole_run,
)
from hlat.reporting.run_record import RunRecord, active_seconds, shown
from hlat.runtime.errors import DataError, HlatError
from hlat.runtime.quantities import rounded_text, usd_text

_GIB = 1 << 30
_MOST_SOURCES = 8  # bars of a chart, and rows of a table
_DAY, _HOUR = 86400.0, 3600.0


@dataclass(frozen=True)
class Machines:
    """Machines that a run was trained on, for its plan and its price."""

    cluster: str  # INSTANCE:N
    price: str | None = None  # kind of price; None for the first known one
    hardware: str | None = None  # catalog on top of the one that ships with hlat

    def resolve(self) -> tuple[Cluster, tuple[str, float] | None]:
        """Return the cluster, and its kind of price with USD per hour or None; HardwareError, PlanError."""
        cluster = parse_cluster(self.cluster, load_catalog(self.hardware))
        return cluster, cluster.price(price_kind(self.price, [cluster]))


def plan_section(run: RunRecord, machines: Machines | None) -> Html:
    """Show what the plan predicts for the run's layout beside what was measured; empty without ``machines``.

    Raises:
        HardwareError, PlanError: as ``Machines.resolve``.
    """
    if machines is None:
        return Html()
    cluster, priced = machines.resolve()
    words = "no price is known" if priced is None else f"{usd_text(priced[1], 4)} per hour, {priced[0]}"
    contents, predicted = [paragraph(f"Machines: {cluster.name}, {words}.")], None
    try:
        predicted = _predict_run(run, machines)
    except HlatError as error:
        # What was measured is shown nevertheless.
        contents.append(paragraph(f"The plan cannot be made: {error}"))
    rows = _plan_rows(run, predicted, None if priced is None else priced[1])
    return joined([*contents, table(("quantity", "plan", "actual"), rows, caption="Plan beside actual")])


def _predict_run(run: RunRecord, machines: Machines) -> LayoutPrediction | None:
    if run.recipe is None:
        return None
    cluster, _ = machines.resolve()
    # The planner reads recipes from files.
    with TemporaryDirectory(prefix="hlat-report-") as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(json.dumps(run.recipe.model_dump(mode="json")), encoding="utf-8")
        request = resolve_request(PlanQuestion(file), cluster, price_kind(machines.price, [cluster]))
        # Each stage has a layout of its own.
        parts = request.stages.values() or [request]
        plans = [make_plan(*each).chosen for each in zip(parts, map(_layout_words, run.each_stage), strict=True)]
        return whole_run(plans) if request.stages else plans[0]


def _layout_words(recipe: Recipe) -> str:
    """Write the layout of a recipe as the planner reads it."""
    parallel = recipe.parallel
    values: dict[str, int | str] = {
        "tp": parallel.tensor,
        "pp": parallel.pipeline,
        "cp": parallel.context,
        "zero": parallel.zero,
        "mbs": recipe.batch.micro_batch,
        "recompute": recipe.memory.activation_checkpointing,
    }
    if parallel.pipeline > 1:
        values["schedule"] = parallel.schedule
        if parallel.virtual_stages is not None:
            values["vpp"] = parallel.virtual_stages
    return ",".join(f"{name}={value}" for name, value in values.items())


def _plan_rows(run: RunRecord, plan: LayoutPrediction | None, price: float | None) -> list[tuple[str, str, str]]:
    progress = measure_progress(run)
    elapsed, left, whole = progress.elapsed, progress.left, progress.whole
    planned: dict[str, float | None] = {}
    said: dict[str, str] = {}  # medians with their ranges
    if plan is not None:
        said = {"days of the whole run": days_text(plan), "USD of the whole run": usd_words(plan)}
        planned = {
            "time of a step": plan.step_seconds,
            "tokens per second": plan.tokens_per_second,
            "MFU": plan.mfu,
            "peak memory of a device": plan.peak_memory / _GIB,
        }
    actual: list[tuple[str, float | None, Callable[[float], str]]] = [
        ("time of a step", progress.step_seconds, duration),
        ("tokens per second", progress.rate, format_value),
        ("MFU", median(run, "mfu"), "{:.1%}".format),
        ("peak memory of a device", _divided(run.last("memory_bytes"), _GIB), "{:.2f} GiB".format),
        ("time so far", elapsed, duration),
        ("time to the end", left, duration),
        ("days of the whole run", _divided(whole, _DAY), rounded_text),
    ]
    if price is not None:
        for name, seconds in (("so far", elapsed), ("to the end", left), ("of the whole run", whole)):
            actual.append((f"USD {name}", _divided(seconds, _HOUR, price), usd_text))
    return [
        (name, said.get(name) or shown(planned.get(name), form), shown(value, form, "unknown"))
        for name, value, form in actual
    ]


def _divided(value: float | None, divisor: float, factor: float = 1.0) -> float | None:
    return None if value is None else value / divisor * factor


@dataclass(frozen=True)
class Progress:
    """Progress and pace of a run, measured and extrapolated."""

    rate: float | None  # median tokens per second; None without a timed step
    step_seconds: float | None  # median, after a ramp; None if unknown
    elapsed: float  # seconds that processes of the run were running
    left: float | None  # Expected seconds to the end, at the pace so far including saves and restarts; None if unknown.

    @property
    def whole(self) -> float | None:
        return None if self.left is None else self.elapsed + self.left


def measure_progress(run: RunRecord) -> Progress:
    """Measure the pace of a run, and extrapolate it to the end."""
    rate, recipe, tokens = median(run, "tokens_per_second"), run.recipe, run.last("tokens")
    elapsed = active_seconds(run)
    if recipe is None:
        return Progress(rate, None, elapsed, None)
    left = None
    if tokens and elapsed:
        # At tokens per elapsed second, not at the median rate: saves and restarts will come again.
        left = max(0.0, recipe.total_tokens - tokens) / (tokens / elapsed)
    step_seconds = None if run.stage is None or not rate else run.stage.tokens_per_step / rate
    return Progress(rate, step_seconds, elapsed, left)


def median(run: RunRecord, name: str) -> float | None:
    """Return the median of the finite values of a metric; None without one."""
    values = run.metrics[name][1] if name in run.metrics else np.empty(0)
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else None


def mixture_section(run: RunRecord) -> Html:
    """Show sources with the share asked for and the tokens delivered; empty if nothing is known of them."""
    if run.recipe is None:
        return Html()
    samples = int(run.last("samples") or 0)
    try:
        if len(run.each_stage) > 1:
            return joined(_staged_mixture(run.each_stage, samples))
        if is_weighted(run.recipe.data):
            return joined(_weighted_mixture(run.recipe, samples))
    except (DataError, ValueError) as error:
        return joined([paragraph(f"The mixture cannot be computed: {error}")])
    return joined(_mixture_by_size(run, run.recipe, samples))


def _weighted_mixture(recipe: Recipe, samples: int) -> list[Html]:
    """Compare what was asked until now with what was delivered; the order of samples is a formula."""
    phases = phase_weights(recipe.data)
    delivered = Mixture(phases).counts(samples)
    asked, start = [0.0] * len(recipe.data.sources), 0
    for phase in phases:
        stop = samples if phase.stop is None else min(samples, phase.stop)
        # Weights are whole numbers of samples per period.
        share = max(0, stop - start) / (phase.period or 1)
        asked = [before + weight * share for before, weight in zip(asked, phase.weights, strict=True)]
        start = max(start, stop)
    length, total = recipe.data.sequence_length, samples or 1
    every = list(zip(_source_names(recipe), asked, map(int, delivered), strict=True))
    shown = sorted(every, key=lambda row: -row[2])[: None if len(every) <= _MOST_SOURCES else _MOST_SOURCES]
    rest = [row for row in every if row not in shown]
    # In the order of the recipe; what is not shown is one row.
    parts = [row for row in every if row in shown]
    parts += [(f"{len(rest):,} others", sum(row[1] for row in rest), sum(row[2] for row in rest))] if rest else []
    rows = [
        (name, f"{wanted / total:.3%}", f"{count / total:.3%}", f"{count * length:,}") for name, wanted, count in parts
    ]
    tokens = {name: float(count) * length for name, _, count in parts}
    columns = ("source", "asked until now", "delivered", "tokens delivered")
    return [_token_bars("Tokens delivered", tokens), table(columns, rows, caption="Data mixture, asked and delivered")]


def _staged_mixture(stages: Sequence[Recipe], samples: int) -> list[Html]:
    """Add up what stages have delivered of each source; sources without weights are one."""
    tokens: dict[str, float] = {}
    for stage in stages:
        place = stage.place
        assert place is not None, "the recipe of a stage"
        first, stop = place.batches.first_of(place.first), place.batches.first_of(place.stop)
        # Batches that a run skips are made up for at its end.
        count = max(0, (samples if place.is_last else min(samples, stop)) - first)
        weighted = is_weighted(stage.data)
        names = _source_names(stage) if weighted else [", ".join(_source_names(stage)) or str(stage.data.path)]
        counts = Mixture(phase_weights(stage.data)).counts(count).tolist() if weighted else [count]
        for name, each in zip(names, counts, strict=True):
            tokens[name] = tokens.get(name, 0.0) + float(each) * stage.data.sequence_length
    whole = sum(tokens.values()) or 1.0
    rows = [(name, f"{each / whole:.3%}", f"{each:,.0f}") for name, each in tokens.items()]
    columns = ("source", "share of the tokens", "tokens delivered")
    return [_token_bars("Tokens delivered", tokens), table(columns, rows, caption="Data mixture, over all stages")]


def _mixture_by_size(run: RunRecord, recipe: Recipe, samples: int) -> list[Html]:
    # Without weights the sources are one corpus: each supplies its share of the tokens in every epoch.
    tokens = samples * recipe.data.sequence_length
    try:
        manifest = read_data_manifest(recipe.prepared_dir if recipe.prepared_dir.is_dir() else run.folder / "data")
    except (DataError, OSError):
        manifest = None
    if manifest is None or recipe.data.mode == "online":
        return [paragraph(f"The sources have no weights: they are one corpus, of which {tokens:,} tokens were read.")]
    names = manifest.source_names
    sizes = _largest_sources([(names[each.source], each.tokens) for each in manifest.splits["train"].sources])
    every = sum(size for _, size in sizes) or 1
    note = (
        f"The sources have no weights: they are one corpus, mixed by size. The run has read {tokens:,} tokens, "
        f"{tokens / every:.3g} epochs of it."
    )
    rows = [(name, f"{size / every:.2%}", f"{size:,.0f}", f"{tokens * size / every:,.0f}") for name, size in sizes]
    columns = ("source", "share", "tokens of an epoch", "tokens read, about")
    return [
        paragraph(note),
        _token_bars("Tokens of an epoch", dict(sizes)),
        table(columns, rows, caption="Data mixture"),
    ]


def _source_names(recipe: Recipe) -> list[str]:
    labels = [source.label for source in recipe.data.sources]
    # Equal labels are numbered: they are keys of the chart.
    return [label if labels.count(label) == 1 else f"{label} ({index})" for index, label in enumerate(labels)]


def _largest_sources(sizes: Sequence[tuple[str, int]]) -> list[tuple[str, float]]:
    # A corpus may have thousands of sources: the rest is one bar.
    ordered = sorted(((name, float(size)) for name, size in sizes), key=lambda pair: -pair[1])
    rest = ordered[_MOST_SOURCES:]
    return ordered[:_MOST_SOURCES] + ([(f"{len(rest):,} others", sum(size for _, size in rest))] if rest else [])


def _token_bars(title: str, tokens: dict[str, float]) -> Html:
    return bar_chart(title, {"": tokens}, lambda size: f"{size:,.0f} tokens", unit="million tokens", scale=1e6)
