"""The check of all parts of the user's own that a recipe names, before a run has a folder or a second process.

recipe, world size --CHECKS: import, options, what each seam asks of its parts--> RecipeError with all problems
"""

from collections.abc import Callable
from functools import partial

from hlat.config import Recipe, RecipeError, own_parts
from hlat.data import own_format
from hlat.model import architecture_of, loss_terms
from hlat.optim import check_schedule, optimizer_spec
from hlat.tracking import own_trackers
from hlat.training.optional_components import installed_components
from hlat.training.validation.tasks import load_task


def check_own_parts(recipe: Recipe, world: int) -> None:
    """Import the parts that a recipe names; raises RecipeError with every problem of every one."""
    if problems := own_parts.gather_problems(partial(check, recipe, world) for check in CHECKS):
        raise RecipeError(problems)


def _check_optimizer(recipe: Recipe, world: int) -> None:
    parallel, precision = recipe.parallel, recipe.precision
    shards = recipe.data_parallel(world) // parallel.replicas * parallel.context
    sharded = parallel.tensor > 1 or (parallel.zero > 0 and shards > 1)
    spec = optimizer_spec(recipe.optimizer, precision.mode, precision.in_hardware)
    if problems := list(spec.obstacles(sharded)):
        raise RecipeError(problems)


CHECKS: tuple[Callable[[Recipe, int], object], ...] = (
    lambda recipe, world: architecture_of(recipe.model),
    _check_optimizer,
    lambda recipe, world: check_schedule(recipe.schedule, recipe.horizon_steps),
    lambda recipe, world: loss_terms(recipe.training.loss_terms),
    lambda recipe, world: installed_components(recipe),
    lambda recipe, world: [load_task(task) for task in recipe.evaluation.tasks if own_parts.TASKS.has(task)],
    lambda recipe, world: [own_format(name) for name in recipe.data.formats],
    lambda recipe, world: own_trackers(recipe.tracking),
)
"""One of each seam."""
