"""Price of deterministic kernels: the same step with them and without.

request, layout -> its kernels of attention and step times under run.deterministic true and false -> DeterminismCost
recipe, chip, world size -> the same for a run that is about to start -> a sentence
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hlat.config import Recipe
from hlat.hardware import Chip
from hlat.planner.problem.execution import planned_execution
from hlat.planner.problem.layouts import Candidate
from hlat.planner.problem.recipe_step import recipe_on_chip
from hlat.planner.problem.request import PlanRequest
from hlat.planner.search.search import step_seconds
from hlat.runtime.backend.base import AttentionKernel
from hlat.runtime.errors import PlanError


@dataclass(frozen=True)
class DeterminismCost:
    """Kernels and step times by ``run.deterministic``, on a device where it makes a difference.

    Attributes:
        chosen: the value that the run has.
        kernels: kernel of attention for each value.
        seconds: predicted seconds of a step for each value.
    """

    chosen: bool
    kernels: Mapping[bool, AttentionKernel]
    seconds: Mapping[bool, float]

    def __str__(self) -> str:
        """Name the kernel, and what the other value would change; an estimate."""
        other = not self.chosen
        share = self.seconds[other] / self.seconds[self.chosen] - 1
        bits = "the bits of one that was never interrupted" if other else "other last bits"
        return (
            f"attention by {self.kernels[self.chosen]}; run.deterministic={str(other).lower()} would take "
            f"{self.kernels[other]}: steps about {abs(share):.0%} {'longer' if share > 0 else 'shorter'} by "
            f"hlat plan's estimate, and a resumed run with {bits}"
        )


def determinism_cost(request: PlanRequest, candidate: Candidate) -> DeterminismCost | None:
    """Predict a step of a layout with deterministic kernels and without; None where they are the same."""
    either = {value: replace(request, deterministic=value) for value in (True, False)}
    kernels = {value: planned_execution(asked, candidate).attention for value, asked in either.items()}
    found = {value: kernel for value, kernel in kernels.items() if kernel is not None}
    if len(found) < len(kernels) or found[True] == found[False]:
        return None
    seconds = {value: step_seconds(asked, candidate) for value, asked in either.items()}
    return DeterminismCost(planned_execution(request, candidate).deterministic, found, seconds)


def run_determinism_cost(recipe: Recipe, chip: Chip | None, world: int) -> DeterminismCost | None:
    """Predict the same for a run that is about to start.

    Args:
        recipe: a recipe that is valid for as many processes.
        chip: chip of the devices; None if the catalog does not have it.
        world: number of processes.

    Returns:
        The prediction; None where the kernels are the same, or if the run cannot be predicted.
    """
    try:
        return None if chip is None else determinism_cost(*recipe_on_chip(recipe, chip, world))
    except PlanError:  # a question that only the cost model has; the run itself may be good
        return None
