"""Memory of a recipe's step beside that of a device, and the nearest changes with which it fits.

    recipe, cluster, processes --recipe_fit--> bytes of the fullest rank --> MemoryFit; fit_here: of this machine
    PlanRequest, Candidate --remedies--> changes of the fewest fields with which it fits, each counted again

A rehearsal counts the tensors of the program itself, and asks for the same remedies. A test compares the verdicts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch

from hlat.config import Problem, Recipe, changeable
from hlat.hardware import Cluster, device_chip, load_catalog
from hlat.parallel import StepShape
from hlat.planner.memory import FURTHEST_ESTIMATE, RankMemory, estimated_ranks, pipeline_memory
from hlat.planner.problem.layouts import Candidate, layout_violations, machines_with, recipe_step
from hlat.planner.problem.request import PlanRequest
from hlat.planner.problem.workload import RECOMPUTE_POLICIES
from hlat.planner.search import USABLE_MEMORY_SHARE, LayoutPrediction, predict_layout
from hlat.runtime.backend.device import choose_device
from hlat.runtime.backend.table import backend_of
from hlat.runtime.process import RankInfo

_GIB = 1 << 30
_MOST_CHANGES = 3  # fields of one remedy
_SHOWN = 3  # remedies of one message


@dataclass(frozen=True)
class MemoryRemedy:
    """Changes of a recipe with which it fits, by the plan."""

    override: str  # the changes, as arguments of a command
    needed: float  # bytes of the fullest rank
    step_seconds: float


@dataclass(frozen=True)
class MemoryFit:
    """Memory of the rank that needs most, beside that of a device."""

    ranks: Sequence[RankMemory]  # planned, of each pipeline rank
    memory: float  # bytes of a device
    cluster: str  # name of the machines, as plans take it
    device: str  # words for a device
    remedies: tuple[MemoryRemedy, ...] = ()  # the fastest first; empty if it fits, or nothing near helps

    @property
    def needed(self) -> float:
        return max(rank.total for rank in self.ranks)

    @property
    def usable(self) -> float:
        return USABLE_MEMORY_SHARE * self.memory

    @property
    def fits(self) -> bool:
        return self.needed <= self.usable

    def __str__(self) -> str:
        """The two numbers in words."""
        return (
            f"the fullest rank needs {self.needed / _GIB:.1f} GiB by the planner's estimate, and {self.device} "
            f"has {self.memory / _GIB:.1f} GiB, of which {self.usable / _GIB:.1f} can be used"
        )

    @property
    def remedy(self) -> str:
        """Changes that would work, in words."""
        if not self.remedies:
            return (
                f"`hlat plan --model RECIPE --cluster {self.cluster} --search` looks for a layout, or for more devices."
            )
        shown = [f"`{one.override}` ({one.needed / _GIB:.1f} GiB)" for one in self.remedies[:_SHOWN]]
        return f"It fits with {', or '.join(shown)}."

    def problem(self, recipe: Recipe) -> Problem:
        return Problem("batch.micro_batch", f"{self}.", self.remedy, recipe.batch.micro_batch, True)


def recipe_fit(recipe: Recipe, cluster: Cluster, world: int | None = None, device: str | None = None) -> MemoryFit:
    """Estimate the memory of a recipe, as it is written, on a cluster; ``device`` is what to call one of its devices.

    ``world`` is the number of processes; None for one on each device.
    """
    # A memory budget is counted as it is; changes of it are not predicted.
    plans = recipe.memory.activation_checkpointing in RECOMPUTE_POLICIES
    plain = recipe if plans else recipe.model_copy(update={"memory": type(recipe.memory)()})
    request, candidate = recipe_step(plain, cluster, world)
    ranks = pipeline_memory(request, StepShape.of(recipe.in_mode(request.mode), candidate.world))
    found = MemoryFit(ranks, cluster.memory_bytes, cluster.name, device or f"a device of {cluster.name}")
    if found.fits or not plans:
        return found
    sends = cluster.chip.device is None or backend_of(cluster.chip.device).sends
    return replace(found, remedies=tuple(remedies(request, candidate, sends)))


def predict_recipe(recipe: Recipe, cluster: Cluster, world: int | None = None) -> LayoutPrediction:
    """Predict the steps of a recipe, as it is written, on a cluster; PlanError if the cost model does not cover it."""
    return predict_layout(*recipe_step(recipe, cluster, world))


def fit_here(recipe: Recipe, world: int, device: torch.device | None = None) -> MemoryFit | None:
    """Estimate the memory of a recipe on machines as this one, whose device is opened; None without an accelerator."""
    device = device or choose_device(recipe.run.device, RankInfo())
    backend, catalog = backend_of(device), load_catalog()
    if backend.is_shared:
        return None
    # Of a device that the catalog does not have, only its memory matters: any chip of its type stands for the rest.
    alike = (one for one in catalog.chips if one.device and one.can_be_planned and backend_of(one.device) is backend)
    if (chip := device_chip(device, catalog) or next(alike, None)) is None or chip.memory is None:
        return None
    gib = backend.memory_bytes(device) * chip.devices / _GIB
    real = chip.model_copy(update={"memory": chip.memory.model_copy(update={"gib": gib})})
    return recipe_fit(recipe, machines_with(real, world), world, backend.describe(device))


def remedies(request: PlanRequest, candidate: Candidate, can_send: bool) -> list[MemoryRemedy]:
    """Find changes of the fewest fields with which a layout fits, the fastest first; empty if none helps.

    Another precision is proposed only if nothing else helps: it computes other numbers. ``can_send``: pipelines run
    on the devices.
    """
    possible = list(_changes(request, candidate, can_send))
    for changes in ([one for one in possible if one[0] != "precision.mode"], possible):
        for count in range(1, _MOST_CHANGES + 1):
            found = [each for several in combinations(changes, count) for each in _try(request, candidate, several)]
            if found:
                return sorted(found, key=lambda one: one.step_seconds)
    return []


_Change = tuple[str, Any]  # field, value


def _changes(request: PlanRequest, candidate: Candidate, can_send: bool) -> Iterator[_Change]:
    """Yield changes of one field that lower the memory of a rank."""
    for policy in RECOMPUTE_POLICIES[RECOMPUTE_POLICIES.index(candidate.recompute) + 1 :]:
        yield "memory.activation_checkpointing", policy
    size = candidate.micro_batch
    while (size := size // 2) > 0:
        yield "batch.micro_batch", size
    for zero in (1, 3):
        if zero > candidate.zero:
            yield "parallel.zero", zero
    if candidate.tensor > 1 and not candidate.parallel.gathers_again:
        yield "parallel.gather_again", "auto"
    if 2 * candidate.tensor <= request.cluster.domain:
        yield "parallel.tensor", 2 * candidate.tensor
    if can_send and candidate.parallel.split is None:
        yield "parallel.pipeline", 2 * candidate.pipeline
    if request.mode in ("mixed", "fp32"):
        yield "precision.mode", "bf16-sr"


def _of_stage(request: PlanRequest, name: str) -> str:
    """Name a field as an override changes it: of a later stage, in that stage."""
    place = None if request.recipe is None else request.recipe.place
    return f"stages.{place.index}.{name}" if place is not None and place.index and changeable(name) else name


def _try(request: PlanRequest, candidate: Candidate, changes: Sequence[_Change]) -> Iterator[MemoryRemedy]:
    """Yield the remedy of some changes, if they are possible together and the layout then fits."""
    values = dict(changes)
    if len(values) < len(changes):  # two values of one field
        return
    sections = {name.removeprefix("parallel."): value for name, value in changes if name.startswith("parallel.")}
    parallel = candidate.parallel.model_copy(update=sections)
    data, rest = divmod(candidate.world, parallel.model_ranks)
    if rest or not data or data % parallel.replicas:
        return
    changed = Candidate(
        parallel,
        data,
        values.get("batch.micro_batch", candidate.micro_batch),
        values.get("memory.activation_checkpointing", candidate.recompute),
    )
    asked = replace(request, mode=values.get("precision.mode", request.mode))
    limit = USABLE_MEMORY_SHARE * request.cluster.memory_bytes
    most = FURTHEST_ESTIMATE * limit
    # The estimate first: most combinations are far from fitting.
    if layout_violations(asked, changed) or max(estimated_ranks(asked, changed, most)) > most:
        return
    prediction = predict_layout(asked, changed)
    if prediction.peak_memory <= limit:
        override = " ".join(f"{_of_stage(request, name)}={value}" for name, value in changes)
        yield MemoryRemedy(override, prediction.peak_memory, prediction.step_seconds)
