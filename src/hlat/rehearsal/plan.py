"""The planner's view of a rehearsed step: its time and memory, and if the fullest rank fits on the device.

recipe, cluster --> hlat.planner --> PlannedStep: the plan's numbers for the recipe's own layout, on all devices of
the cluster; times of single operations
reports, chip --> tensors + runtime + allocator, by the planner's rule --> FitVerdict, changes that would help
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hlat.config import Recipe
from hlat.hardware import Chip, Cluster
from hlat.planner import (
    USABLE_MEMORY_SHARE,
    LayoutPrediction,
    MemoryRemedy,
    OperationTimes,
    PlanRequest,
    Timeline,
    device_overhead,
    predict_layout,
    recipe_step,
    remedies,
    timeline,
    workload_columns,
)
from hlat.rehearsal.rank import RankReport
from hlat.runtime.errors import PlanError
from hlat.runtime.terminal import plural

PARTS = {
    "compute": ("products", "attention", "pointwise", "gaps", "recomputed", "host", "head"),
    "tensor": ("tensor",),
    "context": ("context",),
    "pipeline": ("bubble", "messages"),
    "data": ("data",),
    "optimizer": ("optimizer",),
    "stragglers": ("stragglers",),
}
"""Parts of a step, each with the components of a plan that it contains. Those of axes are waits for their messages."""


@dataclass(frozen=True)
class PlannedStep:
    """Prediction of the rehearsed step by the planner."""

    request: PlanRequest
    prediction: LayoutPrediction  # of the layout
    operations: OperationTimes
    pipeline: Timeline | None  # passes of the step by the plan's simulation; None without a pipeline

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of the step by ``PARTS``."""
        found = self.prediction.components
        return {part: sum(found[name] for name in names) for part, names in PARTS.items()}


def plan_step(recipe: Recipe, cluster: Cluster, world: int) -> PlannedStep:
    """Predict the steps of a recipe with a resolved precision mode on all devices of a cluster.

    Raises:
        PlanError: there are more or fewer processes than devices, or the cost model does not cover the recipe.
    """
    if world != cluster.devices:
        raise PlanError(f"the run has {plural(world, 'process')}, {cluster.name} {plural(cluster.devices, 'device')}")
    request, candidate = recipe_step(recipe, cluster)
    prediction = predict_layout(request, candidate)
    passes = None
    if candidate.pipeline > 1:
        passes = timeline(candidate, candidate.accumulation(request.global_batch), prediction.stage_times)
    operations = OperationTimes.of(workload_columns(request, [candidate]))
    return PlannedStep(request, prediction, operations, passes)


_TRANSIENT = ("activations", "loss", "communication", "temporaries")  # what an allocator allocates again and again
_SHOWN = 4


@dataclass(frozen=True)
class FitVerdict:
    """Memory of the rehearsed rank that needs most, on a device."""

    rank: int  # the fullest rehearsed one
    pipeline_rank: int
    tensors: float  # bytes at the peak, rehearsed
    runtime: float  # bytes of the device's runtime, as in plans
    slack: float  # bytes of its allocator, as in plans
    memory: float  # bytes of the device
    # Changes with which it fits, the fastest first; empty if it fits or nothing is planned.
    remedies: tuple[MemoryRemedy, ...] = ()

    @property
    def needed(self) -> float:
        return self.tensors + self.runtime + self.slack

    @property
    def usable(self) -> float:
        """Bytes of the device that a run may need; plans keep the rest free."""
        return USABLE_MEMORY_SHARE * self.memory

    @property
    def fits(self) -> bool:
        return self.needed <= self.usable


def judge(
    reports: Sequence[RankReport], chip: Chip, memory: float, plan: PlannedStep | None, can_send: bool
) -> FitVerdict:
    """Compare the fullest rehearsed rank with the bytes of a device.

    Without a plan, no changes that help are looked for. ``can_send``: pipelines run on the device.
    """
    verdict = max((_of_rank(report, chip, memory) for report in reports), key=lambda each: each.needed)
    if verdict.fits or plan is None:
        return verdict
    found = remedies(plan.request, plan.prediction.candidate, can_send)
    return replace(verdict, remedies=tuple(found[:_SHOWN]))


def _of_rank(report: RankReport, chip: Chip, memory: float) -> FitVerdict:
    runtime, slack = device_overhead(chip.family, sum(report.peak[name] for name in _TRANSIENT))
    return FitVerdict(report.rank, report.coordinates.pp, report.peak_bytes, runtime, slack, memory)
