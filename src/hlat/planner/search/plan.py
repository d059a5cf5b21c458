"""A plan: the layout to train in, what is predicted of it, what else would do, and what all that assumes.

Question -> search -> chosen, alternatives -> Plan -> JSON, a recipe's fragment
         -> nothing fits -> PlanError that names the nearest clusters and what they cost
"""

import random
from dataclasses import dataclass
from typing import Any

from hlat.planner.cost import (
    COPY_RATE,
    SOFTWARE_PER_DAY,
    STORE_MOST,
    STORE_RATE,
    exchanged_bytes,
    executed_flops,
    load_constants,
    simulate_goodput,
)
from hlat.planner.problem import Candidate, Question, parse_layout
from hlat.planner.search.search import USABLE, Found, Planned, planned, search
from hlat.planner.search.suggestions import nearest
from hlat.planner.search.tie_break import TIE, choose
from hlat.runtime import PlanError

_GIB = 1 << 30
_DAY = 86400.0
_SEED = 12349  # of simulated failures: a plan is the same each time


@dataclass(frozen=True)
class Plan:
    """The answer to a question.

    Attributes:
        question: what was asked.
        chosen: the layout to train in.
        ranked: the best layouts that fit, fastest first, the chosen one among them; empty where a layout was given.
        found: how the search went; None where a layout was given.
        goodput_simulated: share of the time that counts over simulated runs, and in the worst tenth of them.
    """

    question: Question
    chosen: Planned
    ranked: tuple[Planned, ...]
    found: Found | None
    goodput_simulated: tuple[float, float]

    @property
    def alternatives(self) -> list[Planned]:
        """What else fits, fastest first."""
        return [one for one in self.ranked if one is not self.chosen]

    def as_json(self) -> dict[str, Any]:
        """The documented keys (docs/planning.md)."""
        return {
            "model": self.question.name,
            "cluster": self.question.cluster.name,
            "chosen": described(self.question, self.chosen),
            "alternatives": [described(self.question, one) for one in self.alternatives],
            "assumptions": self.assumptions(),
        }

    def assumptions(self) -> dict[str, Any]:
        """What the numbers rest on."""
        question, expected = self.question, self.chosen.reliability
        price = question.cluster.price(question.price)
        searched = {} if self.found is None else {
            "layouts_tried": self.found.tried,
            "layouts_that_fit": self.found.fitting,
            "search_seconds": round(self.found.seconds, 2),
        }  # fmt: skip
        return {
            "tokens": question.tokens,
            "sequence": question.sequence,
            "global_batch": question.global_batch,
            "defaults": list(question.assumed),
            "devices": question.cluster.devices,
            "memory_gib_per_device": round(question.cluster.memory_bytes / _GIB, 2),
            "usable_share_of_memory": USABLE,
            "price_kind": None if price is None else price[0],
            "usd_per_hour": None if price is None else price[1],
            "mean_hours_between_failures": round(expected.mtbf / 3600, 2),
            "failures_per_instance_and_day": question.cluster.instance.failures.per_day,
            "interruptions_by_software_per_day": SOFTWARE_PER_DAY,
            "copy_bytes_per_second_per_device": COPY_RATE,
            "store_bytes_per_second_per_instance": STORE_RATE,
            "store_bytes_per_second": STORE_MOST,
            "save_stall_seconds": round(expected.stall, 2),
            "save_durable_after_seconds": round(expected.writing, 1),
            "restart_seconds": round(expected.restart, 1),
            "checkpoint_every_seconds": round(expected.interval, 1),
            "checkpoint_every_steps": min(question.steps, max(1, round(expected.interval / self.chosen.step_seconds))),
            "goodput_simulated": round(self.goodput_simulated[0], 4),
            "goodput_simulated_worst_tenth": round(self.goodput_simulated[1], 4),
            "tie": TIE,
            "constants": {"/".join(key): value for key, value in load_constants().values.items()},
            **searched,
        }


def described(question: Question, one: Planned) -> dict[str, Any]:
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
        "accumulation": layout.accumulation(question.global_batch),
        "sequence_parallel": layout.tensor > 1,
        "activation_checkpointing": layout.recompute,
        "precision": question.mode,
        "memory_gib": round(one.peak_memory / _GIB, 3),
        "fits": fits(question, one),
        "memory_parts_gib": {
            str(rank): {name: round(size / _GIB, 3) for name, size in memory.parts().items()}
            for rank, memory in one.memory.items()
        },
        "exchanged_gib_per_step": {
            str(rank): {axis: round(size / _GIB, 3) for axis, size in exchanged_bytes(question, layout, rank).items()}
            for rank in one.memory
        },
        "executed_tflop_per_step": {
            str(rank): round(executed_flops(question, layout, rank) / 1e12, 3) for rank in one.memory
        },
        "step_seconds": one.step_seconds,
        "step_parts_seconds": one.parts,
        "tokens_per_second": one.tokens_per_second,
        "tokens_per_second_per_chip": one.tokens_per_second / question.cluster.chips,
        "mfu": one.mfu,
        "cost_usd": one.cost_usd,
        "usd_per_billion_tokens": None if one.cost_usd is None else one.cost_usd / question.tokens * 1e9,
        "days": one.days,
        "goodput": one.goodput,
    }


def plan(question: Question, layout: str | None = None) -> Plan:
    """Answer a question.

    Args:
        layout: predict this one, as in ``tp=8,pp=1``; None searches.

    Raises:
        PlanError: no layout is possible or fits into memory; says what would.
    """
    if layout is not None:
        one = planned(question, parse_layout(layout, question))
        return Plan(question, one, (), None, _simulated(question, one))
    found = search(question)
    if not found.ranked:
        raise PlanError(_refusal(question, found))
    chosen = choose(found.ranked, question.cluster.domain)
    return Plan(question, chosen, tuple(found.ranked), found, _simulated(question, chosen))


def short(value: float, digits: int = 2) -> str:
    """A number for a table: so many digits after the point, or three in all where it is small."""
    return f"{value:,.{digits}f}" if value >= 1 else f"{value:.3g}"


def fits(question: Question, one: Planned) -> bool:
    """Whether a layout leaves of each device what it should."""
    return one.peak_memory <= USABLE * question.cluster.memory_bytes


def _simulated(question: Question, one: Planned) -> tuple[float, float]:
    work = question.steps * one.step_seconds
    # A long run's goodput is that of its parts: ten thousand failures tell no more than a thousand.
    seconds = min(work, 200 * one.reliability.mtbf)
    result = simulate_goodput(one.reliability, seconds, random.Random(_SEED))
    return result.mean, result.worst_tenth


def _refusal(question: Question, found: Found) -> str:
    cluster = question.cluster
    if found.least_memory is None:
        return (
            f"no layout of {question.name} on the {cluster.devices} devices of {cluster.name} is possible: degrees "
            f"must divide the devices, tensor ranks share out {question.model.heads} heads, and data-parallel ranks "
            f"--global-batch {question.global_batch}. `--layout tp=...,pp=...` says what is wrong with one."
        )
    layout, need = found.least_memory
    lines = [
        f"{question.name} does not fit on {cluster.name}: a device has {cluster.memory_bytes / _GIB:.0f} GiB, of which "
        f"{USABLE:.0%} can be used, and of the {found.tried:,} layouts the one that needs least, {layout}, "
        f"needs {need / _GIB:.1f} GiB."
    ]
    for other, best in nearest(question):
        price = "" if best.cost_usd is None else f", {best.cost_usd:,.0f} USD"
        mode = "" if other.mode == question.mode else f" with --precision {other.mode}"
        lines.append(
            f"It would fit on {other.cluster.name}{mode}: {best.candidate}; {best.peak_memory / _GIB:.1f} GiB, "
            f"{best.days:,.1f} days{price}."
        )
    return "\n".join(lines)


def fragment(question: Question, one: Candidate, *, fits_in: bool = True) -> str:
    """The chosen layout as the sections of a recipe, to be included by it."""
    virtual = f"\n  virtual_stages: {one.virtual}" if one.virtual > 1 else ""
    note = "" if fits_in else "# It does not fit into the memory of these devices.\n"
    return (
        f"# {question.name} on {question.cluster.name}, by hlat plan: {question.cluster.devices} processes.\n{note}"
        f"parallel:\n"
        f"  tensor: {one.tensor}\n"
        f"  sequence: true\n"
        f"  pipeline: {one.pipeline}\n"
        f"  schedule: {one.schedule}{virtual}\n"
        f"  context: {one.context}\n"
        f"  zero: {one.zero}\n"
        f"batch:\n"
        f"  global_batch: {question.global_batch}\n"
        f"  micro_batch: {one.micro_batch}\n"
        f"memory:\n"
        f"  activation_checkpointing: {one.recompute}\n"
        f"precision:\n"
        f"  mode: {question.mode}\n"
    )
