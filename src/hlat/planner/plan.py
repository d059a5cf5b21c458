"""A training plan: the chosen layout, its prediction, the alternatives, and the assumptions.

PlanRequest -> search -> chosen, alternatives -> TrainingPlan -> JSON, recipe fragment
-> nothing fits -> suggestions -> PlanError that names the nearest clusters and their cost

suggestions: more instances, instances with more memory, fewer bytes per parameter; each with the
layout that a plan would choose

request, layout -> kernels of attention and step times under run.deterministic true and false -> DeterminismCost
recipe, chip, world size -> the same for a run that is about to start -> a sentence
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import yaml

from hlat.config import Recipe
from hlat.hardware import HOST_SHARE, Catalog, Chip, Cluster, load_catalog
from hlat.planner.cost.calibration import INTERVAL_SHARE, load_constants, undecided_ratio
from hlat.planner.cost.goodput import (
    DETECTION_SECONDS,
    HOST_COPY_RATE,
    SOFTWARE_FAILURES_PER_DAY,
    STORE_RATE_LIMIT,
    STORE_RATE_PER_INSTANCE,
    simulate_goodput,
    storage_rate,
)
from hlat.planner.cost.step_counts import exchanged_bytes, executed_flops
from hlat.planner.problem.devices import comparison_note, planned_execution, why_not_runnable
from hlat.planner.problem.layouts import Candidate, parse_layout, recipe_on_chip
from hlat.planner.problem.request import PlanRequest, llama_class
from hlat.planner.search import (
    TIE_TOLERANCE,
    USABLE_MEMORY_SHARE,
    LayoutPrediction,
    SearchResult,
    break_tie,
    predict_layout,
    search,
    step_seconds,
)
from hlat.runtime.backend.base import AttentionKernel
from hlat.runtime.errors import PlanError
from hlat.runtime.quantities import rounded_text
from hlat.runtime.terminal import plural


@dataclass(frozen=True)
class DeterminismCost:
    """Kernels and step times by ``run.deterministic``, on a device where it makes a difference."""

    chosen: bool  # the value that the run has
    kernels: Mapping[bool, AttentionKernel]  # of attention, by value
    seconds: Mapping[bool, float]  # of a step, predicted, by value

    def __str__(self) -> str:
        other = not self.chosen
        share = self.seconds[other] / self.seconds[self.chosen] - 1
        bits = "the bits of one that was never interrupted" if other else "other last bits"
        return (
            f"attention by {self.kernels[self.chosen]}; run.deterministic={str(other).lower()} would take "
            f"{self.kernels[other]}: steps about {abs(share):.0%} {'longer' if share > 0 else 'shorter'} by "
            f"hlat plan's estimate, and a resumed run with {bits}"
        )


def determinism_cost(request: PlanRequest, candidate: Candidate) -> DeterminismCost | None:
    """Predict a step with deterministic kernels and without; None where they are the same."""
    either = {value: replace(request, deterministic=value) for value in (True, False)}
    kernels = {value: planned_execution(asked, candidate).attention for value, asked in either.items()}
    found = {value: kernel for value, kernel in kernels.items() if kernel is not None}
    if len(found) < len(kernels) or found[True] == found[False]:
        return None
    seconds = {value: step_seconds(asked, candidate) for value, asked in either.items()}
    return DeterminismCost(planned_execution(request, candidate).deterministic, found, seconds)


def run_determinism_cost(recipe: Recipe, chip: Chip | None, world: int) -> DeterminismCost | None:
    """Predict ``determinism_cost`` for a run that is about to start, with as many processes as ``world``.

    None where the kernels are the same, the catalog does not have the chip, or the run cannot be predicted.
    """
    try:
        return None if chip is None else determinism_cost(*recipe_on_chip(recipe, chip, world))
    except PlanError:  # a question that only the cost model has; the run itself may be good
        return None


_MAX_INSTANCES = 1 << 12  # where the search for a suggestion ends
_COUNTS_PER_DOUBLING = 8  # counts to try between one that does not fit and twice as many, which fit
_LARGER_INSTANCES = 3  # kinds of instances with more memory to try


def suggestions(request: PlanRequest) -> Iterator[tuple[PlanRequest, LayoutPrediction]]:
    """Yield requests that differ only in cluster or precision and fit, each with its best layout."""
    yield from _more_instances(request)
    yield from _larger_instances(request)
    if request.mode in ("mixed", "fp32"):
        yield from _if_it_fits(replace(request, mode="bf16-sr"))


def _if_it_fits(request: PlanRequest) -> Iterator[tuple[PlanRequest, LayoutPrediction]]:
    ranked = search(request).ranked
    if ranked:
        yield request, break_tie(ranked, request.cluster.domain)


def _more_instances(request: PlanRequest) -> Iterator[tuple[PlanRequest, LayoutPrediction]]:
    """Yield the smallest number of instances that fits, to an eighth of the last doubling."""
    count = request.cluster.count
    while (count := 2 * count) <= _MAX_INSTANCES:
        if found := list(_if_it_fits(_with_count(request, count))):
            step = max(1, count // 2 // _COUNTS_PER_DOUBLING)
            fewer = (_if_it_fits(_with_count(request, less)) for less in range(count // 2 + step, count, step))
            yield next((answer for answers in fewer for answer in answers), found[0])
            return


def _with_count(request: PlanRequest, count: int) -> PlanRequest:
    return replace(request, cluster=replace(request.cluster, count=count))


def _larger_instances(request: PlanRequest) -> Iterator[tuple[PlanRequest, LayoutPrediction]]:
    """Yield the next larger instances, by memory, that have the request's price and fit."""
    catalog: Catalog = load_catalog()
    clusters = []
    for instance in catalog.instances:
        chip = catalog.chip(instance.chip)
        # The suggested command keeps the kind of price, so the other cluster has to have it.
        priced = request.price in instance.prices if request.price else bool(instance.prices)
        if chip is not None and priced and chip.family == request.cluster.chip.family:
            clusters.append(Cluster(instance, chip, request.cluster.count))
    larger = [cluster for cluster in clusters if cluster.memory_bytes > request.cluster.memory_bytes]
    for cluster in sorted(larger, key=lambda cluster: cluster.memory_bytes)[:_LARGER_INSTANCES]:
        if found := list(_if_it_fits(replace(request, cluster=cluster))):
            yield found[0]
            return


_GIB = 1 << 30
_DAY = 86400.0
_FAILURE_SEED = 12349  # seed of the simulated failures: the same request gives the same plan


@dataclass(frozen=True)
class TrainingPlan:
    """Plan for one request: a layout, its alternatives and the assumptions."""

    request: PlanRequest
    chosen: LayoutPrediction  # the layout to train in
    # Layouts that fit, fastest first, the chosen one included; empty if the user gave a layout.
    ranked: tuple[LayoutPrediction, ...]
    found: SearchResult | None  # None if the user gave a layout
    goodput_simulated: tuple[float, float]  # mean, and of the worst tenth of runs

    @cached_property
    def determinism(self) -> DeterminismCost | None:
        """None where deterministic kernels are the same as others."""
        return determinism_cost(self.request, self.chosen.candidate)

    @property
    def alternatives(self) -> list[LayoutPrediction]:
        return [prediction for prediction in self.ranked if prediction is not self.chosen]

    def may_be_fastest(self, prediction: LayoutPrediction) -> bool:
        """True if the layout is the fastest, or too close to it for the model to tell."""
        fastest = min(one.step_seconds for one in (self.chosen, *self.ranked))
        return prediction.step_seconds < fastest * undecided_ratio()

    def to_dict(self) -> dict[str, Any]:
        """The plan under its documented keys (docs/planning.md), as JSON values."""
        return {
            "model": self.request.name,
            "cluster": self.request.cluster.name,
            "for_comparison": why_not_runnable(self.request.cluster.chip, self.request.mode) or None,
            "chosen": self._layout(self.chosen),
            "alternatives": [self._layout(other) for other in self.alternatives],
            "assumptions": self.assumptions(),
        }

    def _layout(self, prediction: LayoutPrediction) -> dict[str, Any]:
        return layout_json(self.request, prediction) | {"may_be_fastest": self.may_be_fastest(prediction)}

    def assumptions(self) -> dict[str, Any]:
        """Inputs of the prediction under their documented keys (docs/planning.md)."""
        request, reliability = self.request, self.chosen.reliability
        price = request.cluster.price(request.price)
        search_statistics = {} if self.found is None else {
            "layouts_tried": self.found.tried,
            "layouts_that_fit": self.found.fitting,
            "search_seconds": round(self.found.seconds, 2),
        }  # fmt: skip
        cost = self.determinism
        return {
            "step_seconds_deterministic": None if cost is None else cost.seconds[True],
            "step_seconds_not_deterministic": None if cost is None else cost.seconds[False],
            "tokens": request.tokens,
            "sequence": request.sequence,
            "global_batch": request.global_batch,
            "defaults": list(request.assumed),
            "devices": request.cluster.devices,
            "memory_gib_per_device": round(request.cluster.memory_bytes / _GIB, 2),
            "usable_share_of_memory": USABLE_MEMORY_SHARE,
            "price_kind": None if price is None else price[0],
            "usd_per_hour": None if price is None else price[1],
            "mean_hours_between_failures": round(reliability.mtbf / 3600, 2),
            "failures_per_instance_and_day": request.cluster.instance.failures.per_day,
            "interruptions_by_software_per_day": SOFTWARE_FAILURES_PER_DAY,
            "copy_bytes_per_second_per_device": HOST_COPY_RATE,
            "store_bytes_per_second_per_instance": None if request.site.storage else STORE_RATE_PER_INSTANCE,
            "store_bytes_per_second": None if request.site.storage else STORE_RATE_LIMIT,
            "storage": None if request.site.storage is None else str(request.site.storage),
            "storage_bytes_per_second": storage_rate(request.cluster, request.site.storage),
            "checkpoint_bytes": round(reliability.saved_bytes),
            "failure_noticed_after_seconds": DETECTION_SECONDS,
            "start_up_seconds": reliability.start_up,
            "chip_watts": None if request.cluster.chip.power is None else request.cluster.chip.power.watts,
            "host_share_of_power": HOST_SHARE,
            "pue": request.site.pue,
            "save_stall_seconds": round(reliability.stall, 2),
            "save_durable_after_seconds": round(reliability.writing, 1),
            "restart_seconds": round(reliability.restart, 1),
            "checkpoint_every_seconds": round(reliability.interval, 1),
            "checkpoint_every_steps": min(
                request.steps, max(1, round(reliability.interval / self.chosen.step_seconds))
            ),
            "goodput_simulated": round(self.goodput_simulated[0], 4),
            "goodput_simulated_worst_tenth": round(self.goodput_simulated[1], 4),
            "tie": TIE_TOLERANCE,
            "interval_share": INTERVAL_SHARE,
            "interval_sources": self.chosen.interval.sources,
            "undecided_ratio": undecided_ratio(),
            "constants": {"/".join(key): value for key, value in load_constants().values.items()},
            **search_statistics,
        }


def layout_json(request: PlanRequest, prediction: LayoutPrediction) -> dict[str, Any]:
    """A predicted layout under its documented keys (docs/planning.md)."""
    layout = prediction.candidate
    execution = planned_execution(request, layout)
    return {
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "data": layout.data,
        "context": layout.context,
        "virtual_stages": layout.virtual,
        "schedule": layout.schedule,
        "zero": layout.zero,
        "replicas": layout.replicas,
        "micro_batch": layout.micro_batch,
        "accumulation": layout.accumulation(request.global_batch),
        "sequence_parallel": layout.tensor > 1,
        "gather_again": layout.parallel.gathers_again,
        "activation_checkpointing": layout.recompute,
        "precision": request.mode,
        "attention": None if execution.attention is None else str(execution.attention),
        "compiled": execution.compiled,
        "deterministic": execution.deterministic,
        "memory_gib": round(prediction.peak_memory / _GIB, 3),
        "fits": fits(request, prediction),
        "memory_parts_gib": {
            str(rank): {name: round(size / _GIB, 3) for name, size in memory.components().items()}
            for rank, memory in prediction.memory.items()
        },
        "exchanged_gib_per_step": {
            str(rank): {axis: round(size / _GIB, 3) for axis, size in exchanged_bytes(request, layout, rank).items()}
            for rank in prediction.memory
        },
        "executed_tflop_per_step": {
            str(rank): round(executed_flops(request, layout, rank) / 1e12, 3) for rank in prediction.memory
        },
        "step_seconds": prediction.step_seconds,
        "step_seconds_interval": list(prediction.interval.of(prediction.step_seconds)),
        "step_parts_seconds": prediction.components,
        "tokens_per_second": prediction.tokens_per_second,
        "tokens_per_second_per_chip": prediction.tokens_per_second / request.cluster.chips,
        "mfu": prediction.mfu,
        "cost_usd": prediction.cost_usd,
        "usd_per_billion_tokens": None if prediction.cost_usd is None else prediction.cost_usd / request.tokens * 1e9,
        "cost_usd_interval": None if prediction.cost_usd is None else list(prediction.interval.of(prediction.cost_usd)),
        "energy_kwh": prediction.kwh,
        "days": prediction.days,
        "days_interval": list(prediction.interval.of(prediction.days)),
        "goodput": prediction.goodput,
    }


def make_plan(request: PlanRequest, layout: str | None = None) -> TrainingPlan:
    """Plan a run in the best layout, or in a given one.

    A given ``layout``, as in ``tp=8,pp=1``, is predicted even if it does not fit.

    Raises:
        PlanError: no layout is possible or fits into memory; the message suggests what would.
    """
    if layout is not None:
        given = predict_layout(request, parse_layout(layout, request))
        return TrainingPlan(request, given, (), None, _simulated_goodput(request, given))
    found = search(request)
    if not found.ranked:
        raise PlanError(_nothing_fits(request, found))
    chosen = break_tie(found.ranked, request.cluster.domain)
    return TrainingPlan(request, chosen, tuple(found.ranked), found, _simulated_goodput(request, chosen))


def format_number(value: float, digits: int = 2) -> str:
    """Format a number for a table: ``digits`` decimals, or three significant digits below 1."""
    return f"{value:,.{digits}f}" if value >= 1 else rounded_text(value)


def fits(request: PlanRequest, prediction: LayoutPrediction) -> bool:
    """True if every device has the memory that the layout needs, and some in reserve."""
    return prediction.peak_memory <= USABLE_MEMORY_SHARE * request.cluster.memory_bytes


def _simulated_goodput(request: PlanRequest, prediction: LayoutPrediction) -> tuple[float, float]:
    """Goodput over simulated runs: mean, and of the worst tenth."""
    work = request.steps * prediction.step_seconds
    # Ten thousand failures of a long run show no more than a few hundred.
    seconds = min(work, 200 * prediction.reliability.mtbf)
    result = simulate_goodput(prediction.reliability, seconds, random.Random(_FAILURE_SEED))
    return result.mean, result.worst_tenth


def _nothing_fits(request: PlanRequest, found: SearchResult) -> str:
    cluster = request.cluster
    if found.least_memory is None:
        return (
            f"no layout of {request.name} on the {plural(cluster.devices, 'device')} of {cluster.name} is possible: "
            f"degrees must divide the devices, tensor must divide the {request.model.heads} heads, and data must "
            f"divide --global-batch {request.global_batch}. `--layout tp=...,pp=...` shows which check a layout fails."
        )
    layout, need = found.least_memory
    lines = [
        f"{request.name} does not fit on {cluster.name}: a device has {cluster.memory_bytes / _GIB:.0f} GiB, of which "
        f"{USABLE_MEMORY_SHARE:.0%} can be used, and of the {found.tried:,} layouts tried the smallest, {layout}, "
        f"needs {need / _GIB:.1f} GiB."
    ]
    for other, best in suggestions(request):
        price = "" if best.cost_usd is None else f", {best.cost_usd:,.0f} USD"
        mode = "" if other.mode == request.mode else f" with --precision {other.mode}"
        lines.append(
            f"It would fit on {other.cluster.name}{mode}: {best.candidate}; {best.peak_memory / _GIB:.1f} GiB, "
            f"{best.days:,.1f} days{price}."
        )
    return "\n".join(lines)


def _model_section(request: PlanRequest) -> str:
    """YAML of the model for a shape that no preset or recipe has, and for sequences beyond its context."""
    section = llama_class(request.name) or {}
    context = request.model.max_sequence_length
    if context is not None and context < request.sequence:
        section = {**section, "max_sequence_length": request.sequence}
    return yaml.safe_dump({"model": section}, sort_keys=False) if section else ""


def recipe_fragment(request: PlanRequest, candidate: Candidate, *, fits_in: bool = True) -> str:
    """The layout as YAML sections that a recipe can include."""
    virtual = f"\n  virtual_stages: {candidate.virtual}" if candidate.virtual > 1 else ""
    gather = f"  gather_again: {candidate.parallel.gather_again}\n" if candidate.tensor > 1 else ""
    copies = f"  replicas: {candidate.replicas}\n" if candidate.replicas > 1 else ""
    note = "" if fits_in else "# It does not fit into the memory of these devices.\n"
    if compared := comparison_note(request):
        note += f"# Does not run as planned, {compared}.\n"
    processes = plural(request.cluster.devices, "process")
    return (
        f"# {request.name} on {request.cluster.name}, by hlat plan: {processes}.\n{note}"
        f"{_model_section(request)}parallel:\n"
        f"  tensor: {candidate.tensor}\n"
        f"  sequence: true\n{gather}"
        f"  pipeline: {candidate.pipeline}\n"
        f"  schedule: {candidate.schedule}{virtual}\n"
        f"  context: {candidate.context}\n"
        f"  zero: {candidate.zero}\n{copies}"
        f"batch:\n"
        f"  global_batch: {request.global_batch}\n"
        f"  micro_batch: {candidate.micro_batch}\n"
        f"memory:\n"
        f"  activation_checkpointing: {candidate.recompute}\n"
        f"precision:\n"
        f"  mode: {request.mode}\n"
    )
