"""Rehearsal of a run: some of its ranks, and every recipe problem that they find.

recipe, world -> first, middle, last and fullest pipeline rank -> one or more processes on this machine -> Rehearsal
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from hlat.config import Problem, Recipe, RecipeError
from hlat.parallel.mesh import Coordinates, Layout
from hlat.parallel.stages import StepShape, peak_memory_rank
from hlat.precision import resolve_mode
from hlat.rehearsal.rank import RankReport, rehearse_rank
from hlat.rehearsal.report import rehearsal_json
from hlat.runtime import LaunchError
from hlat.runtime.backend import backend_of, has_fast_bf16
from hlat.runtime.distributed import fake_rank


@dataclass(frozen=True)
class Rehearsal:
    """Result of a rehearsal.

    Attributes:
        recipe: rehearsed recipe, with its precision mode resolved.
        layout: layout of all ranks.
        ranks: reports of the rehearsed ranks, in ascending order.
    """

    recipe: Recipe
    layout: Layout
    ranks: tuple[RankReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """All numbers under their documented keys (docs/planning.md), as JSON values."""
        return rehearsal_json(self)


def default_ranks(recipe: Recipe, world: int) -> list[int]:
    """Global ranks rehearsed by default: first, middle and last pipeline rank, and the one that needs most memory.

    The latter is found by the count that also splits the stages (``hlat.parallel.stages.peak_memory_rank``).
    """
    step = StepShape.of(recipe, world)
    layout = step.layout
    pipeline_ranks = {0, layout.pipeline // 2, layout.pipeline - 1, peak_memory_rank(step)}
    return sorted(layout.rank(Coordinates(pipeline_rank, 0, 0, 0)) for pipeline_rank in pipeline_ranks)


def rehearse(
    recipe: Recipe,
    world: int,
    ranks: Sequence[int] | None = None,
    processes: int = 1,
    on_report: Callable[[RankReport], None] = lambda report: None,
) -> Rehearsal:
    """Run one step of some ranks on this machine, with fake tensors and fake collectives.

    Args:
        recipe: recipe, validated for ``world`` processes.
        world: world size of the run.
        ranks: ranks to rehearse; None for ``default_ranks``.
        processes: processes of this machine to use; 1 for the current one.
        on_report: called with each report, in the order of ranks.

    Raises:
        LaunchError: no such rank, or the recipe needs something that cannot be rehearsed on a CPU.
        RecipeError: every problem of the recipe on any of these ranks.
    """
    recipe = _resolved(recipe)
    layout = Layout.of(recipe.parallel, world)
    chosen = default_ranks(recipe, world) if ranks is None else sorted(set(ranks))
    unknown = [rank for rank in chosen if not 0 <= rank < world]
    if unknown:
        raise LaunchError(f"no rank {unknown[0]} in a world of {world}. The ranks are 0 to {world - 1}.")
    eager = recipe.model_copy(update={"run": recipe.run.model_copy(update={"compile": "none"})})
    reports: list[RankReport] = []
    problems: dict[str, Problem] = {}
    for outcome in _outcomes(eager, world, chosen, processes):
        if isinstance(outcome, RankReport):
            reports.append(outcome)
            on_report(outcome)
        else:
            problems |= {str(problem): problem for problem in outcome}
    if problems:
        raise RecipeError(list(problems.values()))
    return Rehearsal(recipe, layout, tuple(reports))


def _resolved(recipe: Recipe) -> Recipe:
    """Resolve ``precision.mode``: ``auto`` as on an accelerator, unless the recipe names the CPU, which is here."""
    named = recipe.run.device
    fast = not backend_of(named).is_everywhere or has_fast_bf16(torch.device(named))
    return recipe.in_mode(resolve_mode(recipe.precision.mode, fast))


Outcome = RankReport | tuple[Problem, ...]


def _outcomes(recipe: Recipe, world: int, ranks: Sequence[int], processes: int) -> Iterator[Outcome]:
    if min(processes, len(ranks)) == 1:
        yield from (_outcome(recipe, world, rank) for rank in ranks)
        return
    with ProcessPoolExecutor(min(processes, len(ranks)), multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_outcome, [recipe] * len(ranks), [world] * len(ranks), ranks)


def _outcome(recipe: Recipe, world: int, rank: int) -> Outcome:
    """The report of a rank, or the problems of the recipe there."""
    try:
        with fake_rank(rank, world) as runtime:
            return rehearse_rank(recipe, runtime)
    except RecipeError as error:
        return error.problems
