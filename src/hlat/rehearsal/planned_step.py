"""Prediction of the rehearsed step: the plan's numbers for the recipe's own layout, on all devices of a cluster.

recipe, cluster --> hlat.planner --> PlannedStep: time and memory by the cost model, times of single operations
"""

from dataclasses import dataclass

from hlat.config import Recipe
from hlat.hardware import Cluster
from hlat.planner import (
    LayoutPrediction,
    OperationTimes,
    PlanRequest,
    Timeline,
    predict_layout,
    recipe_step,
    timeline,
    workload_columns,
)
from hlat.runtime.errors import PlanError
from hlat.runtime.terminal_text import plural

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
    """A plan of the rehearsed step.

    Attributes:
        request: model, batch and cluster.
        prediction: the plan's prediction of the layout.
        operations: times of single operations.
        pipeline: all passes of the step by the plan's simulation; None without a pipeline.
    """

    request: PlanRequest
    prediction: LayoutPrediction
    operations: OperationTimes
    pipeline: Timeline | None

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of the step by ``PARTS``."""
        found = self.prediction.components
        return {part: sum(found[name] for name in names) for part, names in PARTS.items()}


def plan_step(recipe: Recipe, cluster: Cluster, world: int) -> PlannedStep:
    """Predict the steps of a recipe.

    Args:
        recipe: the recipe, with a resolved precision mode.
        cluster: the cluster, all of whose devices it runs on.
        world: number of processes.

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
