"""A training plan: the chosen layout, its prediction, the alternatives, and the assumptions.

PlanRequest -> search -> chosen, alternatives -> TrainingPlan -> JSON, recipe fragment
-> nothing fits -> PlanError with suggestions (suggestions.py)

plan of a recipe -> the settings of the recipe that it changes
plan of several instances -> the best layout at a half and a quarter of their network, if nobody stated its rate

request, layout -> kernels of attention and step times under run.deterministic true and false -> DeterminismCost
recipe, chip, world size -> the same for a run that is about to start -> a sentence
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from textwrap import indent
from typing import Any

import yaml

from hlat.config import Recipe
from hlat.hardware import HOST_SHARE, Chip
from hlat.planner.cost.calibration import INTERVAL_SHARE, load_constants, sources_of_chip, undecided_ratio
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
from hlat.planner.defaults import CHOSEN, resolve_defaults
from hlat.planner.expected import likely, whole_run
from hlat.planner.problem.devices import comparison_note, planned_execution, why_not_runnable
from hlat.planner.problem.layouts import (
    Candidate,
    layout_text,
    parse_layout,
    possible,
    recipe_on_chip,
    recipe_step,
)
from hlat.planner.problem.loss_law import forecast_json
from hlat.planner.problem.request import PlanRequest
from hlat.planner.problem.shapes import llama_class
from hlat.planner.search import (
    TIE_TOLERANCE,
    USABLE_MEMORY_SHARE,
    LayoutPrediction,
    SearchResult,
    break_tie,
    predict_layout,
    rank_again,
    search,
    step_seconds,
)
from hlat.planner.suggestions import nothing_fits
from hlat.precision import AUTO
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
    # Plans of the recipe's stages, by name. The plan is then of the whole run: its layout is that of the stage which
    # needs most memory, its days, cost, energy and MFU are of all of them.
    stages: Mapping[str, "TrainingPlan"] = field(default_factory=dict)

    @cached_property
    def determinism(self) -> DeterminismCost | None:
        """None where deterministic kernels are the same as others."""
        return None if self.stages else determinism_cost(self.request, self.chosen.candidate)

    @cached_property
    def at_slower_networks(self) -> tuple["AtNetwork", ...]:
        """The choice at a half and a quarter of a network that nobody stated; empty for a given layout."""
        if self.found is None or not self.request.network_is_assumed:
            return ()
        return tuple(_at_network(self.request, self.chosen.candidate, self.found, share) for share in (0.5, 0.25))

    @property
    def changes(self) -> dict[str, tuple[Any, Any]]:
        """Settings of the recipe that the plan changes: by field, what the recipe says and what the plan has."""
        if self.stages:
            pairs = [(name, plan.changes) for name, plan in self.stages.items()]
            return {f"{name}: {path}": values for name, changes in pairs for path, values in changes.items()}
        return {} if self.request.recipe is None else _changes(self.request, self.request.recipe, self.chosen.candidate)

    @property
    def alternatives(self) -> list[LayoutPrediction]:
        return [prediction for prediction in self.ranked if prediction is not self.chosen]

    def may_be_fastest(self, prediction: LayoutPrediction) -> bool:
        """True if the layout is the fastest, or too close to it for the model to tell."""
        fastest = min(one.step_seconds for one in (self.chosen, *self.ranked))
        return prediction.step_seconds < fastest * undecided_ratio()

    def fragment(self) -> str:
        """The layout as YAML sections that a recipe can include, or those of each of its stages."""
        request, fits_in = self.request, fits(self.request, self.chosen)
        if not self.stages:
            return recipe_fragment(request, self.chosen.candidate, fits_in=fits_in)
        sections = {name: _layout_sections(one.request, one.chosen.candidate) for name, one in self.stages.items()}
        stages = (f"  - name: {name}\n{indent(text, '    ')}" for name, text in sections.items())
        return f"{_fragment_head(request, fits_in)}stages:\n{''.join(stages)}"

    def to_dict(self) -> dict[str, Any]:
        """The plan under its documented keys (docs/planning.md), as JSON values."""
        stages = [{"stage": name, **plan.to_dict()} for name, plan in self.stages.items()]
        return {
            "model": self.request.name,
            "cluster": self.request.cluster.name,
            "for_comparison": why_not_runnable(self.request.cluster.chip, self.request.mode) or None,
            "chosen": self._layout(self.chosen),
            "alternatives": [self._layout(other) for other in self.alternatives],
            **forecast_json(self.request.loss),
            "would_change": {name: {"recipe": old, "plan": new} for name, (old, new) in self.changes.items()},
            "slower_networks": [one.to_dict() for one in self.at_slower_networks],
            "assumptions": self.assumptions(),
            **({"stages": stages} if stages else {}),
        }

    def _layout(self, prediction: LayoutPrediction) -> dict[str, Any]:
        said = layout_json(self.request, prediction)
        if self.stages:
            return {name: said[name] for name in _OF_A_RUN}
        return said | {"may_be_fastest": self.may_be_fastest(prediction)}

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
            "network_bytes_per_second": request.cluster.network_rate,
            "network_assumed": request.network_is_assumed,
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
            "median_over_predicted": self.chosen.interval.median,
            "interval_sources": self.chosen.interval.sources,
            "interval_sources_of_chip": sources_of_chip(request.cluster.chip.name),
            "undecided_ratio": undecided_ratio(),
            "constants": {"/".join(key): value for key, value in load_constants().values.items()},
            **search_statistics,
        }


@dataclass(frozen=True)
class AtNetwork:
    """The choice of layout if the instances' network has a share of the catalog's rate."""

    share: float
    layout: Candidate  # the best one there
    faster: float  # share by which its step is shorter than that of the plan's layout there; 0 if it is that
    days: float  # of a run in it there, median

    def to_dict(self) -> dict[str, Any]:
        """The choice under its documented keys (docs/planning.md), as JSON values."""
        faster, days = round(self.faster, 4), round(self.days, 3)
        return {"share": self.share, "layout": layout_text(self.layout), "faster": faster, "days": days}


def _at_network(request: PlanRequest, chosen: Candidate, found: SearchResult, share: float) -> AtNetwork:
    instance = request.cluster.instance
    slower = instance.model_copy(update={"network": share * instance.network})
    there = replace(request, cluster=replace(request.cluster, instance=slower))
    kept = predict_layout(there, chosen)
    best = break_tie(there, [kept, *rank_again(there, found)])
    if best.step_seconds >= kept.step_seconds:
        best = kept
    faster = 1 - best.step_seconds / kept.step_seconds
    return AtNetwork(share, best.candidate, faster, likely(best).days)


def _changes(request: PlanRequest, recipe: Recipe, candidate: Candidate) -> dict[str, tuple[Any, Any]]:
    """Fields of a recipe that a plan would change, with both values."""
    pairs = {
        f"parallel.{name}": (getattr(recipe.parallel, name), getattr(candidate.parallel, name))
        for name in type(recipe.parallel).model_fields
    }
    pairs |= {
        "batch.global_batch": (recipe.batch.global_batch, request.global_batch),
        "batch.micro_batch": (recipe.batch.micro_batch, candidate.micro_batch),
        "data.sequence_length": (recipe.data.sequence_length, request.sequence),
        "memory.activation_checkpointing": (recipe.memory.activation_checkpointing, candidate.recompute),
    }
    if recipe.precision.mode != AUTO:  # whose resolved mode is no change
        pairs["precision.mode"] = (recipe.precision.mode, request.mode)
    # What the recipe leaves open is chosen at the start, and is no change.
    is_open = {name for name in CHOSEN if not recipe.gives(name)}
    return {name: values for name, values in pairs.items() if values[0] != values[1] and name not in is_open}


def layout_json(request: PlanRequest, prediction: LayoutPrediction) -> dict[str, Any]:
    """A predicted layout under its documented keys (docs/planning.md)."""
    layout, interval = prediction.candidate, prediction.interval
    execution = planned_execution(request, layout)
    usd = prediction.cost_usd
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
        "step_seconds_interval": list(interval.of(prediction.step_seconds)),
        "step_parts_seconds": prediction.components,
        "tokens_per_second": prediction.tokens_per_second,
        "tokens_per_second_per_chip": prediction.tokens_per_second / request.cluster.chips,
        "mfu": prediction.mfu,
        "cost_usd": usd,
        "usd_per_billion_tokens": None if usd is None else usd / request.tokens * 1e9,
        "cost_usd_interval": None if usd is None else list(interval.around(usd)),
        "energy_kwh": prediction.kwh,
        "energy_kwh_interval": None if prediction.kwh is None else list(interval.around(prediction.kwh)),
        "days": prediction.days,
        "days_interval": list(interval.around(prediction.days)),
        "goodput": prediction.goodput,
    }


def make_plan(request: PlanRequest, layout: str | None = None) -> TrainingPlan:
    """Plan a run in the best layout, or in a given one.

    A given ``layout``, as in ``tp=8,pp=1``, or "recipe" for the recipe's own, is predicted even if it does not fit.

    Raises:
        PlanError: no layout is possible or fits into memory; the message suggests what would.
    """
    if request.stages:
        return _staged_plan(request, layout)
    if layout is not None:
        candidate = _own_layout(request) if layout == _OWN else parse_layout(layout, request)
        given = likely(predict_layout(request, candidate))
        return TrainingPlan(request, given, (), None, _simulated_goodput(request, given))
    found = search(request)
    if not found.ranked:
        raise PlanError(nothing_fits(request, found))
    ranked = [likely(one) for one in found.ranked]
    chosen = break_tie(request, ranked)
    return TrainingPlan(request, chosen, tuple(ranked), found, _simulated_goodput(request, chosen))


_OWN = "recipe"  # as a layout: that of the recipe


def _own_layout(request: PlanRequest) -> Candidate:
    """Return the layout of the recipe; what it leaves open is chosen as at the start of a run."""
    recipe, devices, words = request.recipe, request.cluster.devices, f"--layout {_OWN}"
    if recipe is None:
        raise PlanError(f"{words}: {request.name} is no recipe")
    if devices % (ranks := recipe.parallel.model_ranks):
        raise PlanError(f"{words}: a copy of the model takes {ranks} devices, which do not divide {devices}")
    resolved, _ = resolve_defaults(recipe.in_mode(request.mode), devices, request.cluster)
    return possible(recipe_step(resolved, request.cluster)[1], request, words)


def _staged_plan(request: PlanRequest, layout: str | None) -> TrainingPlan:
    """Plan each stage of a run, and the run; PlanError with the problems of all stages."""
    plans, problems = dict[str, TrainingPlan](), list[str]()
    for name, asked in request.stages.items():
        try:
            plans[name] = make_plan(asked, layout)
        except PlanError as error:
            problems.append(f"stage {name}: {error}")
    if problems:
        raise PlanError("\n".join(problems))
    fullest = max(plans.values(), key=lambda plan: plan.chosen.peak_memory)
    run = replace(fullest.request, tokens=request.tokens, recipe=request.recipe, asked=request.asked, ramp=())
    chosen = whole_run([plan.chosen for plan in plans.values()])
    return TrainingPlan(run, chosen, (), None, fullest.goodput_simulated, plans)


_OF_A_RUN = (
    *("memory_gib", "fits", "mfu", "tokens_per_second", "tokens_per_second_per_chip", "precision", "goodput"),
    *("days", "days_interval", "cost_usd", "cost_usd_interval", "usd_per_billion_tokens"),
    *("energy_kwh", "energy_kwh_interval"),
)
"""Numbers of a layout that a run with stages has as a whole."""


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
    return simulate_goodput(prediction.reliability, seconds, random.Random(_FAILURE_SEED))


def _model_section(request: PlanRequest) -> str:
    """YAML of the model for a shape that no preset or recipe has, and for sequences beyond its context."""
    section = llama_class(request.name) or {}
    context = request.model.max_sequence_length
    if context is not None and context < request.sequence:
        section = {**section, "max_sequence_length": request.sequence}
    return yaml.safe_dump({"model": section}, sort_keys=False) if section else ""


def recipe_fragment(request: PlanRequest, candidate: Candidate, *, fits_in: bool = True) -> str:
    """The layout as YAML sections that a recipe can include."""
    sections = f"{_model_section(request)}{_layout_sections(request, candidate)}"
    return f"{_fragment_head(request, fits_in)}{sections}precision:\n  mode: {request.mode}\n"


def _fragment_head(request: PlanRequest, fits_in: bool) -> str:
    note = "" if fits_in else "# It does not fit into the memory of these devices.\n"
    if compared := comparison_note(request):
        note += f"# Does not run as planned, {compared}.\n"
    processes = plural(request.cluster.devices, "process")
    return f"# {request.name} on {request.cluster.name}, by hlat plan: {processes}.\n{note}"


def _layout_sections(request: PlanRequest, candidate: Candidate) -> str:
    virtual = f"\n  virtual_stages: {candidate.virtual}" if candidate.virtual > 1 else ""
    gather = f"  gather_again: {candidate.parallel.gather_again}\n" if candidate.tensor > 1 else ""
    copies = f"  replicas: {candidate.replicas}\n" if candidate.replicas > 1 else ""
    return (
        f"parallel:\n"
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
    )
