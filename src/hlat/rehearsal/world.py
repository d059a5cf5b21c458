"""A whole run rehearsed: some of its ranks, one after another or side by side, and everything that they find wrong.

recipe, world -> first, middle, last and fullest rank of a pipeline -> a process or two on this machine -> Rehearsal
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch

from hlat.config import Problem, Recipe, RecipeError
from hlat.parallel.mesh import Coordinates, Layout
from hlat.parallel.stages import Cut, fullest_rank
from hlat.precision import resolved_mode
from hlat.rehearsal.rank import RankReport, rehearse_rank
from hlat.runtime import LaunchError
from hlat.runtime.backend import has_fast_bf16
from hlat.runtime.distributed import fake_rank


@dataclass(frozen=True)
class Rehearsal:
    """What was found.

    Attributes:
        recipe: as it was rehearsed, its precision mode resolved.
        layout: of all ranks.
        ranks: those that were rehearsed, ascending.
    """

    recipe: Recipe
    layout: Layout
    ranks: tuple[RankReport, ...]


def default_ranks(recipe: Recipe, world: int) -> list[int]:
    """The first, a middle and the last rank of a pipeline, as far as there are so many, and one that needs most memory.

    Which one that is is counted as for the split into stages (``hlat.parallel.stages.fullest_rank``).
    """
    cut = Cut.of(recipe, world)
    layout = cut.layout
    places = {0, layout.pipeline // 2, layout.pipeline - 1, fullest_rank(cut)}
    return sorted(layout.rank(Coordinates(place, 0, 0, 0)) for place in places)


def rehearse(
    recipe: Recipe,
    world: int,
    ranks: Sequence[int] | None = None,
    processes: int = 1,
    done: Callable[[RankReport], None] = lambda report: None,
) -> Rehearsal:
    """Take some ranks of a run through a step, on this machine, with fake tensors and fake collectives.

    Args:
        recipe: validated for ``world`` processes.
        world: processes of the run.
        ranks: which of them; None for ``default_ranks``.
        processes: of this machine that share the work; 1 for this one alone.
        done: told of every rank when it is known, in the order of ranks.

    Raises:
        LaunchError: no such rank, or what the recipe asks for cannot be rehearsed on a CPU.
        RecipeError: everything that is wrong with the recipe on any of these ranks.
    """
    recipe = _resolved(recipe)
    layout = Layout.of(recipe.parallel, world)
    chosen = default_ranks(recipe, world) if ranks is None else sorted(set(ranks))
    wrong = [rank for rank in chosen if not 0 <= rank < world]
    if wrong:
        raise LaunchError(f"no rank {wrong[0]} in a world of {world}. The ranks are 0 to {world - 1}.")
    eager = recipe.model_copy(update={"run": recipe.run.model_copy(update={"compile": "none"})})
    reports: list[RankReport] = []
    problems: dict[str, Problem] = {}
    for outcome in _outcomes(eager, world, chosen, processes):
        if isinstance(outcome, RankReport):
            reports.append(outcome)
            done(outcome)
        else:
            problems |= {str(problem): problem for problem in outcome}
    if problems:
        raise RecipeError(list(problems.values()))
    return Rehearsal(recipe, layout, tuple(reports))


def _resolved(recipe: Recipe) -> Recipe:
    """With a mode that has dtypes; ``auto`` as on an accelerator, where the recipe does not ask for the CPU."""
    fast = recipe.run.device != "cpu" or has_fast_bf16(torch.device("cpu"))
    return recipe.in_mode(resolved_mode(recipe.precision.mode, fast))


Outcome = RankReport | tuple[Problem, ...]


def _outcomes(recipe: Recipe, world: int, ranks: Sequence[int], processes: int) -> Iterator[Outcome]:
    if min(processes, len(ranks)) == 1:
        yield from (_outcome(recipe, world, rank) for rank in ranks)
        return
    with ProcessPoolExecutor(min(processes, len(ranks)), multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_outcome, [recipe] * len(ranks), [world] * len(ranks), ranks)


def _outcome(recipe: Recipe, world: int, rank: int) -> Outcome:
    """The report of a rank, or what is wrong with the recipe there."""
    try:
        with fake_rank(rank, world) as runtime:
            return rehearse_rank(recipe, runtime)
    except RecipeError as error:
        return error.problems
