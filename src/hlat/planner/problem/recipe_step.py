"""Request and layout of a recipe as it is, without a search.

recipe, cluster -> PlanRequest, Candidate | PlanError, if the cost model does not cover it
recipe, chip, world size -> the same, on as many of these chips in the catalog's first machine that has them
"""

from hlat.config import Recipe
from hlat.hardware import Chip, Cluster, load_catalog
from hlat.planner.problem.layouts import Candidate
from hlat.planner.problem.request import PlanRequest, has_fast_bf16
from hlat.planner.problem.workload import RECOMPUTE_POLICIES
from hlat.precision import resolve_mode
from hlat.runtime.errors import PlanError


def recipe_on_chip(recipe: Recipe, chip: Chip, world: int) -> tuple[PlanRequest, Candidate]:
    """Describe the steps of a recipe on some chips, in whatever machine.

    Args:
        recipe: a recipe that is valid for as many processes.
        chip: the chip.
        world: number of processes, one for each device.

    Raises:
        PlanError: as ``recipe_step``; or the catalog has no machine or no figures of the chip.
    """
    instance = next((one for one in load_catalog().instances if one.chip == chip.name), None)
    if instance is None or not chip.can_be_planned:
        raise PlanError(f"the catalog has no machine with {chip.name}, or not its memory and rates")
    chips = -(-world // chip.devices)
    part = instance.with_chips(min(chips, instance.chips))
    cluster = Cluster(part, chip, -(-chips // part.chips))
    return recipe_step(recipe.in_mode(resolve_mode(recipe.precision.mode, has_fast_bf16(chip))), cluster, world)


def recipe_step(recipe: Recipe, cluster: Cluster, world: int | None = None) -> tuple[PlanRequest, Candidate]:
    """Describe the steps of a recipe on a cluster.

    Args:
        recipe: a recipe that is valid for as many processes, with a resolved precision mode.
        cluster: the cluster.
        world: number of processes; None for all devices of the cluster.

    Raises:
        PlanError: the recipe keeps activations by a memory budget, which plans do not predict.
    """
    policies = {policy: policy for policy in RECOMPUTE_POLICIES}
    policy = recipe.memory.activation_checkpointing
    if policy not in policies:
        raise PlanError(f"memory.activation_checkpointing={policy} is not predicted; {', '.join(policies)} are")
    request = PlanRequest(
        recipe.run.name,
        recipe.model,
        cluster,
        recipe.total_tokens,
        recipe.data.sequence_length,
        recipe.batch.global_batch,
        recipe.precision.mode,
        recipe=recipe,
        optimizer=recipe.optimizer,
        ramp=tuple(recipe.batch.ramp),
        deterministic=recipe.run.determinism,
    )
    data = (world or cluster.devices) // recipe.parallel.model_ranks
    return request, Candidate(recipe.parallel, data, recipe.batch.micro_batch, policies[policy])
