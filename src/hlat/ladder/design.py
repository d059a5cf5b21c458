"""The design of a ladder: which sizes of a recipe's model are trained, and on how many tokens.

    recipe --target_recipe--> Target, or all reasons why there can be no ladder of it
    sizes from 1/100 to 1/3 of its blocks, 5 to 40 tokens per parameter --candidates--> designs, the most wanted first
    what a run costs, budget --draw--> the first design that the budget pays for

The law has a term for size and one for tokens. To tell them apart, every size gets the same tokens per parameter, so
that sizes are compared at equal tokens and tokens at equal size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, log

from hlat.config import Problem, Recipe, RecipeError, load_recipe
from hlat.forecast import LEAST_RUNS, Observation, check_design, sizes_of
from hlat.ladder.planned_runs import PlannedRun, Target, before_decay, has_trunk, repeated, runs_of_size
from hlat.ladder.record import LadderPlan
from hlat.ladder.shapes import Shape, block_parameters, nearest, smaller_shapes
from hlat.model import count_parameters
from hlat.planner import resolve_defaults
from hlat.runtime.errors import PlanError
from hlat.runtime.quantities import QuantityError, parse_whole, short_count

LEAST_STEPS = 100
"""Steps below which a run of the recipe's batch says little about longer ones."""
_GRIDS = ((5, 4), (4, 4), (4, 3), (3, 3), (3, 2))  # sizes, token counts: the most wanted first
_LEAST_SIZES = 3
_LEAST_RATIO, _MOST_RATIO, _RATIOS = 5.0, 160.0, 8.0  # tokens per parameter; least factor between few and many
_SMALLEST, _LARGEST = 1 / 100, 1 / 3  # of the target's blocks
_SPREAD = 8.0  # least ratio of the largest size to the smallest
_FARTHEST, _NAMED = 1.5, 3  # factor up to which a model is of a user's size; nearest ones that a message names
_SMALLER = 0.8  # times the largest size, where a design costs too much


@dataclass(frozen=True)
class Axes:
    """Sizes and token counts of a ladder; None leaves them to the budget."""

    sizes: tuple[str, ...] | None = None  # parameters, as in 10M, or widths, as in w512
    ratios: tuple[float, ...] | None = None  # tokens per parameter

    @classmethod
    def parse(cls, sizes: str, tokens: str) -> "Axes":
        """Read the options of a user, auto or a list each; PlanError names everything that is wrong."""
        problems = list[str]()
        chosen, ratios = tuple(sizes.replace(" ", "").split(",")), list[float]()
        for word in chosen if sizes != "auto" else ():
            reason = "is no size"
            try:
                known = parse_whole(word.removeprefix("w"))
            except QuantityError as error:
                known, reason = None, f"is none: {error}"
            if not known:
                problems.append(f"--sizes: {word} {reason}. Write parameters or widths, as in 1M,3M,10M or w128,w256.")
        for word in tokens.replace(" ", "").split(",") if tokens != "auto" else ():
            try:
                ratios.append(float(word))
            except ValueError:
                ratios.append(0.0)
            if not 0 < ratios[-1] < float("inf"):
                problems.append(f"--tokens: {word} is no number of tokens per parameter. Write them as in 5,10,20,40.")
        if len(set(ratios)) == 1:
            # Tokens would be a multiple of the size, so that the law's two terms could not be told apart.
            problems.append("--tokens: sizes at one token count are too few runs. Give two counts of --tokens or more.")
        if problems:
            raise PlanError("\n".join(problems))
        return cls(None if sizes == "auto" else chosen, tuple(sorted(set(ratios))) or None)


def target_recipe(source: str, words: Sequence[str]) -> Target:
    """Read the recipe of a ladder; RecipeError has everything that stands in the way of one."""
    given = load_recipe(source, words)
    if problems := list(_problems(given)):
        raise RecipeError(problems, source)
    recipe, choices = resolve_defaults(given, here=False)
    return Target(recipe, source, tuple(words), frozenset(path for choice in choices for path in choice.values))


def _problems(recipe: Recipe) -> Iterator[Problem]:
    if recipe.stages:
        yield Problem("stages", "do not scale with the length of a run.", "Make a recipe of the first one.")
    if recipe.batch.ramp:
        yield Problem("batch.ramp", "does not scale with the length of a run.", "Add the override batch.ramp=[].")
    if recipe.data.phases:
        yield Problem("data.phases", "do not scale with the length of a run.", "Give the sources weights instead.")
    if recipe.checkpoint.init_from is not None:
        yield Problem("checkpoint.init_from", "has weights of one size only.", "Leave it out: runs begin at random.")
    if not recipe.data.validation.fraction and recipe.data.validation.path is None:
        remedy = "Set data.validation.fraction=0.01, or data.validation.path=FILE."
        yield Problem("data.validation.fraction", "leaves no text to measure losses on.", remedy, 0, True)
    if has_trunk(recipe) and not before_decay(recipe, LEAST_STEPS):
        remedy = "Use at most 0.9, or schedule.kind=linear."
        yield Problem("schedule.decay_fraction", "leaves a short run no step before its decay.", remedy)
    if len({shape.block_parameters for shape in smaller_shapes(recipe.model)}) < _LEAST_SIZES:
        remedy = f"A ladder needs {_LEAST_SIZES} sizes below half of the target's."
        yield Problem("model", "is too small: there are too few smaller ones with heads of this width.", remedy)


def refuse_undetermined(plan: LadderPlan) -> None:
    """Raise PlanError if the runs of a ladder determine no law, however well they go."""
    sizes = [sizes_of(plan.recipe_of(run)) for run in plan.runs]
    for kind in sizes[0]:
        check_design([Observation(each[kind], run.tokens, 1.0) for each, run in zip(sizes, plan.runs, strict=True)])


def draw(
    designs: Iterator[list[PlannedRun]],
    cost: Callable[[PlannedRun], float],
    budget: float,
    option: str,
    text: Callable[[float], str],
) -> list[PlannedRun]:
    """Return the first design whose cost is within the budget of an option; PlanError if none is.

    ``text`` writes a cost.
    """
    costs = list[float]()
    for runs in designs:
        costs.append(sum(map(cost, runs)))
        if costs[-1] <= budget:
            return runs
    raise PlanError(
        f"{option}: {text(budget)} is too little for the {LEAST_RUNS} runs that determine a law. "
        f"{text(1.1 * min(costs))} would do, or smaller --sizes or --tokens."
    )


def candidates(target: Target, axes: Axes) -> Iterator[list[PlannedRun]]:
    """Yield designs, the most wanted first: those with more runs, and of these the ones with larger models.

    PlanError: there is none, since runs would have too few steps, or sizes are too close.
    """
    found = smaller_shapes(target.recipe.model)
    lists = [axes.ratios] if axes.ratios else [_ratios(target.recipe, count) for count in (4, 3, 2)]
    if axes.sizes is not None:
        grids = [(_chosen(found, axes.sizes), ratios) for ratios in lists]
    else:
        usable = [one for one in found if _steps(target, one, lists[0][0]) >= LEAST_STEPS]
        grids = list(_grids(block_parameters(target.recipe.model), usable, lists)) if usable else []
    known = dict[tuple[str, tuple[float, ...]], list[PlannedRun]]()  # many designs share sizes
    for shapes, ratios in grids:
        for shape in shapes:
            _refuse_few_steps(target, shape, ratios[0])
            if (shape.name, ratios) not in known:
                known[shape.name, ratios] = runs_of_size(target, shape, ratios)
        smallest, *larger = (known[shape.name, ratios] for shape in shapes)
        yield [*smallest, *repeated(target, smallest[0]), *(run for runs in larger for run in runs)]
    if not grids:
        most = min(block_parameters(target.recipe.model) * _LARGEST, found[-1].block_parameters) / _SPREAD
        _refuse_few_steps(target, [found[0], *(one for one in found if one.block_parameters <= most)][-1], lists[0][0])
        raise PlanError(f"{target.source}: no three smaller models are far enough apart. Name some with --sizes.")


_Grid = tuple[list[Shape], tuple[float, ...]]


def _grids(blocks: int, usable: Sequence[Shape], lists: Sequence[tuple[float, ...]]) -> Iterator[_Grid]:
    """Yield sizes and tokens per parameter, the most wanted first."""
    least, largest = usable[0].block_parameters, usable[-1].block_parameters
    for count, tokens in _GRIDS:
        ratios = next((one for one in lists if len(one) == tokens), lists[0])
        top = min(blocks * _LARGEST, largest)
        while top >= _SPREAD * least:
            bottom = max(least, min(blocks * _SMALLEST, top / (1.25 * _SPREAD)))
            wishes = (bottom * (top / bottom) ** (index / (count - 1)) for index in range(count))
            shapes = {one.name: one for one in (nearest(usable, wish) for wish in wishes)}
            if len(shapes) >= _LEAST_SIZES and len(shapes) * len(ratios) >= LEAST_RUNS:
                yield list(shapes.values()), ratios
            top *= _SMALLER


def _ratios(recipe: Recipe, count: int) -> tuple[float, ...]:
    """Tokens per parameter, from few to many, those of the recipe among them."""
    parameters = count_parameters(recipe.model).total
    own = recipe.total_tokens / parameters
    # Few forecasts of runs with fewer tokens per parameter than their ladder were tested, and most were too low
    # (docs/notebook/forecasts.md). But runs of the smallest models are to be out of their first steps.
    possible = 3 * LEAST_STEPS * recipe.tokens_per_step * _SPREAD / _LARGEST / parameters
    least = min(_LEAST_RATIO, max(own, possible))
    most = min(max(own, _RATIOS * least), _MOST_RATIO) if count > 2 else 2 * least
    return tuple(least * (most / least) ** (index / (count - 1)) for index in range(count))


def _chosen(found: Sequence[Shape], sizes: Sequence[str]) -> list[Shape]:
    """Return the shapes that a user's sizes mean, the smallest first."""
    chosen = dict[str, Shape]()
    for word in sizes:
        size = parse_whole(word.removeprefix("w")) or 1
        by_width = [one for one in found if one.fields["hidden_size"] == size] if word.startswith("w") else found
        if not by_width:
            widths = ", ".join(str(width) for width in sorted({one.fields["hidden_size"] for one in found}))
            raise PlanError(f"--sizes: {word}: no smaller model has this width. There are {widths}.")
        if word.startswith("w"):
            shape = min(by_width, key=lambda one: one.distortion)
        else:
            shape = min(found, key=lambda one: abs(log(one.parameters / size)) + 2 * one.distortion)
            if not 1 / _FARTHEST <= shape.parameters / size <= _FARTHEST:
                near = sorted({one.parameters for one in found}, key=lambda count: abs(log(count / size)))[:_NAMED]
                nearest_ones = ", ".join(map(short_count, sorted(near)))
                raise PlanError(f"--sizes: {word}: no smaller model has about this size. The nearest: {nearest_ones}.")
        chosen[shape.name] = shape
    return sorted(chosen.values(), key=lambda one: one.parameters)


def _steps(target: Target, shape: Shape, ratio: float) -> int:
    return ceil(ratio * shape.parameters / target.recipe.tokens_per_step)


def _refuse_few_steps(target: Target, shape: Shape, ratio: float) -> None:
    if (steps := _steps(target, shape, ratio)) < LEAST_STEPS:
        batch = target.recipe.batch.global_batch
        most = int(ratio * shape.parameters / (LEAST_STEPS * target.recipe.data.sequence_length))
        smaller = f"the recipe at most batch.global_batch={most}, or " if most else ""
        raise PlanError(
            f"{target.source}: a model of {short_count(shape.parameters)} parameters on {ratio:g} tokens per parameter "
            f"makes {steps} steps of the recipe's batch.global_batch = {batch}, and fewer than {LEAST_STEPS} say "
            f"little. Give {smaller}the ladder larger --sizes or --tokens."
        )
