"""From a question to a ladder that can be trained: its design, drawn within a budget or read from its folder.

recipe, sizes, tokens, budget --plan_ladder--> design.json in the folder, if it has been drawn before
                                           --> else the text is prepared, steps are measured, the design is drawn
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hlat.config import load_recipe
from hlat.data import ProgressCallback, prepare_recipe_data
from hlat.draft import time_text
from hlat.ladder.cost import Speed, Speeds, measure, probe_run
from hlat.ladder.design import Axes, candidates, draw, target_recipe
from hlat.ladder.planned_runs import PlannedRun, Target
from hlat.ladder.record import LadderPlan, read_plan, write_plan
from hlat.runtime.errors import PlanError
from hlat.runtime.quantities import QuantityError, parse_seconds

AUTO = "auto"


@dataclass(frozen=True)
class LadderQuestion:
    """A ladder as a user asks for it; the options are texts, as on the command line."""

    recipe: str
    words: tuple[str, ...] = ()  # overrides
    budget: str | None = None  # time on this machine, as in 2h
    flops: str | None = None  # instead of it, as in 1e18
    sizes: str = AUTO
    tokens: str = AUTO
    to: str | None = None  # folder; None for runs/NAME-ladder

    @property
    def asked(self) -> dict[str, str | None]:
        """Options that decide the design; None for those that are left open."""
        lists = {
            name: None if value == AUTO else value for name, value in (("sizes", self.sizes), ("tokens", self.tokens))
        }
        return {"budget": self.budget, "flops": self.flops, **lists}


def plan_ladder(
    question: LadderQuestion,
    *,
    options: Sequence[str] = (),
    keep: bool = True,
    say: Callable[[str], None] = lambda text: None,
    progress: ProgressCallback | None = None,
) -> LadderPlan:
    """Return the ladder of a folder, or draw one.

    Args:
        question: recipe, overrides and options.
        options: options of ``hlat train``, such as ("--nproc", "2"), for the steps that are measured.
        keep: write the design into the folder, so that the runs can be trained.
        say: shows a message to the user.
        progress: called while text is prepared.

    Raises:
        RecipeError: the recipe has mistakes, or there is no ladder of it; with every problem.
        PlanError: an option is wrong, the budget is too small, or the folder has another ladder.
        LaunchError: steps were to be measured, and their run failed.
    """
    axes = Axes.parse(question.sizes, question.tokens)
    target = target_recipe(question.recipe, question.words)
    folder = Path(question.to or Path("runs") / f"{target.recipe.run.name}-ladder")
    if (found := read_plan(target, folder, question.asked)) is not None:
        return found
    seconds, flops = _budgets(question)
    if seconds is None:
        runs = draw(
            candidates(target, axes, folder), lambda run: run.own_tokens * run.flops, flops, "{:.2g} FLOPs".format
        )
    else:
        say("preparing text")
        tokens = _prepare(target, next(candidates(target, axes, folder))[0], progress)
        target = replace(target, validation_tokens=tokens)

        def probe(run: PlannedRun) -> Speed:
            say(f"measuring steps of {run.name.partition('-')[0]}")
            return probe_run(target, run, folder, tokens, options)

        runs, speeds = _within(target, axes, folder, seconds, probe, tokens)
        runs = [replace(run, seconds=speeds.seconds(run)) for run in runs]
    plan = LadderPlan(target, folder, tuple(runs))
    if keep:
        write_plan(plan, question.asked)
    return plan


def _budgets(question: LadderQuestion) -> tuple[float | None, float]:
    """Return the budget in seconds, None for one in FLOPs, which is infinite where both lists are given."""
    problems = list[str]()
    seconds = flops = None
    if question.budget is not None:
        try:
            seconds = parse_seconds(question.budget)
            reason = "is no time"
        except QuantityError as error:
            reason = str(error)
        if not seconds or seconds < 0:
            problems.append(f"--budget: {question.budget}: {reason}. Write it as in 2h, 45min or 3d.")
    if question.flops is not None:
        try:
            flops = float(question.flops)
        except ValueError:
            flops = 0.0
        if not flops > 0:
            problems.append(f"--flops: {question.flops} is no number of FLOPs. Write it as in 1e18.")
    if question.budget is not None and question.flops is not None:
        problems.append("--budget and --flops both limit the ladder. Give one of them.")
    if question.budget is None and question.flops is None and AUTO in (question.sizes, question.tokens):
        problems.append("Give --budget TIME, as in --budget 2h, or --flops N; or both --sizes and --tokens.")
    if problems:
        raise PlanError("\n".join(problems))
    return seconds, float("inf") if flops is None else flops


def _prepare(target: Target, run: PlannedRun, progress: ProgressCallback | None) -> int:
    """Prepare the text that all runs share; return the tokens of one validation."""
    recipe = load_recipe(target.source, [*target.words, *run.overrides])
    tokens = prepare_recipe_data(recipe, progress=progress).validation_tokens
    sequences = recipe.evaluation.sequences
    return tokens if sequences is None else min(tokens, sequences * recipe.data.sequence_length)


def _within(
    target: Target,
    axes: Axes,
    folder: Path,
    budget: float,
    probe: Callable[[PlannedRun], Speed],
    validation_tokens: int,
) -> tuple[list[PlannedRun], Speeds]:
    """Draw a design whose runs take at most a time, by steps measured on the way."""

    def choose(cost: Callable[[PlannedRun], float]) -> list[PlannedRun]:
        return draw(candidates(target, axes, folder), cost, budget, time_text)

    cheapest = min(candidates(target, axes, folder), key=lambda runs: sum(run.own_tokens * run.flops for run in runs))
    speeds = measure(choose, probe, cheapest, validation_tokens)
    return choose(speeds.seconds), speeds
