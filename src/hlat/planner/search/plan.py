"""A plan: the layout to train in, what is predicted of it, what else would do, and what all that assumes.

PlanRequest -> search -> chosen, alternatives -> TrainingPlan -> JSON, a recipe's fragment
         -> nothing fits -> PlanError that names the nearest clusters and what they cost
"""

import random
from dataclasses import dataclass
from typing import Any

from hlat.planner.cost import (
    HOST_COPY_RATE,
    SOFTWARE_FAILURES_PER_DAY,
    STORE_RATE_LIMIT,
    STORE_RATE_PER_INSTANCE,
    exchanged_bytes,
    executed_flops,
    load_constants,
    simulate_goodput,
)
from hlat.planner.problem import Candidate, PlanRequest, parse_layout
from hlat.planner.search.search import USABLE, LayoutPrediction, SearchResult, predict_layout, search
from hlat.planner.search.suggestions import suggestions
from hlat.planner.search.tie_break import TIE_TOLERANCE, break_tie
from hlat.runtime import PlanError

_GIB = 1 << 30
_DAY = 86400.0
_SEED = 12349  # of simulated failures: a plan is the same each time


@dataclass(frozen=True)
class TrainingPlan:
    """The answer to a request.

    Attributes:
        request: what was asked.
        chosen: the layout to train in.
        ranked: the best layouts that fit, fastest first, the chosen one among them; empty where a layout was given.
        found: how the search went; None where a layout was given.
        goodput_simulated: share of the time that counts over simulated runs, and in the worst tenth of them.
    """

    request: PlanRequest
    chosen: LayoutPrediction
    ranked: tuple[LayoutPrediction, ...]
    found: SearchResult | None
    goodput_simulated: tuple[float, float]

    @property
    def alternatives(self) -> list[LayoutPrediction]:
        """What else fits, fastest first."""
        return [one for one in self.ranked if one is not self.chosen]

    def as_json(self) -> dict[str, Any]:
        """The documented keys (docs/planning.md)."""
        return {
            "model": self.request.name,
            "cluster": self.request.cluster.name,
            "chosen": layout_json(self.request, self.chosen),
            "alternatives": [layout_json(self.request, one) for one in self.alternatives],
            "assumptions": self.assumptions(),
        }

    def assumptions(self) -> dict[str, Any]:
        """What the numbers rest on."""
        request, expected = self.request, self.chosen.reliability
        price = request.cluster.price(request.price)
        searched = {} if self.found is None else {
            "layouts_tried": self.found.tried,
            "layouts_that_fit": self.found.fitting,
            "search_seconds": round(self.found.seconds, 2),
        }  # fmt: skip
        return {
            "tokens": request.tokens,
            "sequence": request.sequence,
            "global_batch": request.global_batch,
            "defaults": list(request.assumed),
            "devices": request.cluster.devices,
            "memory_gib_per_device": round(request.cluster.memory_bytes / _GIB, 2),
            "usable_share_of_memory": USABLE,
            "price_kind": None if price is None else price[0],
            "usd_per_hour": None if price is None else price[1],
            "mean_hours_between_failures": round(expected.mtbf / 3600, 2),
            "failures_per_instance_and_day": request.cluster.instance.failures.per_day,
            "interruptions_by_software_per_day": SOFTWARE_FAILURES_PER_DAY,
            "copy_bytes_per_second_per_device": HOST_COPY_RATE,
            "store_bytes_per_second_per_instance": STORE_RATE_PER_INSTANCE,
            "store_bytes_per_second": STORE_RATE_LIMIT,
            "save_stall_seconds": round(expected.stall, 2),
            "save_durable_after_seconds": round(expected.writing, 1),
            "restart_seconds": round(expected.restart, 1),
            "checkpoint_every_seconds": round(expected.interval, 1),
            "checkpoint_every_steps": min(request.steps, max(1, round(expected.interval / self.chosen.step_seconds))),
            "goodput_simulated": round(self.goodput_simulated[0], 4),
            "goodput_simulated_worst_tenth": round(self.goodput_simulated[1], 4),
            "tie": TIE_TOLERANCE,
            "constants": {"/".join(key): value for key, value in load_constants().values.items()},
            **searched,
        }


def layout_json(request: PlanRequest, one: LayoutPrediction) -> dict[str, Any]:
    """The documented keys of a layout."""
    layout = one.candidate
    return {
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "data": layout.data,
        "context": layout.context,
        "virtual_stages": layout.virtual,
        "schedule": layout.schedule,
        "zero": layout.zero,
        "micro_batch": layout.micro_batch,
        "accumulation": layout.accumulation(request.global_batch),
        "sequence_parallel": layout.tensor > 1,
        "activation_checkpointing": layout.recompute,
        "precision": request.mode,
        "memory_gib": round(one.peak_memory / _GIB, 3),
        "fits": fits(request, one),
        "memory_parts_gib": {
            str(rank): {name: round(size / _GIB, 3) for name, size in memory.parts().items()}
            for rank, memory in one.memory.items()
        },
        "exchanged_gib_per_step": {
            str(rank): {axis: round(size / _GIB, 3) for axis, size in exchanged_bytes(request, layout, rank).items()}
            for rank in one.memory
        },
        "executed_tflop_per_step": {
            str(rank): round(executed_flops(request, layout, rank) / 1e12, 3) for rank in one.memory
        },
        "step_seconds": one.step_seconds,
        "step_parts_seconds": one.parts,
        "tokens_per_second": one.tokens_per_second,
        "tokens_per_second_per_chip": one.tokens_per_second / request.cluster.chips,
        "mfu": one.mfu,
        "cost_usd": one.cost_usd,
        "usd_per_billion_tokens": None if one.cost_usd is None else one.cost_usd / request.tokens * 1e9,
        "days": one.days,
        "goodput": one.goodput,
    }


def make_plan(request: PlanRequest, layout: str | None = None) -> TrainingPlan:
    """Answer a request.

    Args:
        layout: predict this one, as in ``tp=8,pp=1``; None searches.

    Raises:
        PlanError: no layout is possible or fits into memory; says what would.
    """
    if layout is not None:
        one = predict_layout(request, parse_layout(layout, request))
        return TrainingPlan(request, one, (), None, _simulated(request, one))
    found = search(request)
    if not found.ranked:
        raise PlanError(_refusal(request, found))
    chosen = break_tie(found.ranked, request.cluster.domain)
    return TrainingPlan(request, chosen, tuple(found.ranked), found, _simulated(request, chosen))


def format_number(value: float, digits: int = 2) -> str:
    """A number for a table: so many digits after the point, or three in all where it is small."""
    return f"{value:,.{digits}f}" if value >= 1 else f"{value:.3g}"


def fits(request: PlanRequest, one: LayoutPrediction) -> bool:
    """Whether a layout leaves of each device what it should."""
    return one.peak_memory <= USABLE * request.cluster.memory_bytes


def _simulated(request: PlanRequest, one: LayoutPrediction) -> tuple[float, float]:
    work = request.steps * one.step_seconds
    # A long run's goodput is that of its parts: ten thousand failures tell no more than a thousand.
    seconds = min(work, 200 * one.reliability.mtbf)
    result = simulate_goodput(one.reliability, seconds, random.Random(_SEED))
    return result.mean, result.worst_tenth


def _refusal(request: PlanRequest, found: SearchResult) -> str:
    cluster = request.cluster
    if found.least_memory is None:
        return (
            f"no layout of {request.name} on the {cluster.devices} devices of {cluster.name} is possible: degrees "
            f"must divide the devices, tensor ranks share out {request.model.heads} heads, and data-parallel ranks "
            f"--global-batch {request.global_batch}. `--layout tp=...,pp=...` says what is wrong with one."
        )
    layout, need = found.least_memory
    lines = [
        f"{request.name} does not fit on {cluster.name}: a device has {cluster.memory_bytes / _GIB:.0f} GiB, of which "
        f"{USABLE:.0%} can be used, and of the {found.tried:,} layouts the one that needs least, {layout}, "
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


def recipe_fragment(request: PlanRequest, one: Candidate, *, fits_in: bool = True) -> str:
    """The chosen layout as the sections of a recipe, to be included by it."""
    virtual = f"\n  virtual_stages: {one.virtual}" if one.virtual > 1 else ""
    note = "" if fits_in else "# It does not fit into the memory of these devices.\n"
    return (
        f"# {request.name} on {request.cluster.name}, by hlat plan: {request.cluster.devices} processes.\n{note}"
        f"parallel:\n"
        f"  tensor: {one.tensor}\n"
        f"  sequence: true\n"
        f"  pipeline: {one.pipeline}\n"
        f"  schedule: {one.schedule}{virtual}\n"
        f"  context: {one.context}\n"
        f"  zero: {one.zero}\n"
        f"batch:\n"
        f"  global_batch: {request.global_batch}\n"
        f"  micro_batch: {one.micro_batch}\n"
        f"memory:\n"
        f"  activation_checkpointing: {one.recompute}\n"
        f"precision:\n"
        f"  mode: {request.mode}\n"
    )
