"""Request and layout of a recipe as it is, without a search.

recipe, cluster -> PlanRequest, Candidate | PlanError, if the cost model does not cover it
"""

from hlat.config import Recipe
from hlat.hardware import Cluster
from hlat.planner.problem.layouts import Candidate
from hlat.planner.problem.request import PlanRequest
from hlat.planner.problem.workload import RECOMPUTE_POLICIES
from hlat.runtime import PlanError


def recipe_step(recipe: Recipe, cluster: Cluster) -> tuple[PlanRequest, Candidate]:
    """Describe the steps of a recipe on all devices of a cluster.

    Args:
        recipe: a recipe that is valid for as many processes, with a resolved precision mode.
        cluster: the cluster.

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
    )
    data = cluster.devices // recipe.parallel.model_ranks
    return request, Candidate(recipe.parallel, data, recipe.batch.micro_batch, policies[policy])
