"""From a question to a ladder that can be trained: its design, drawn within a budget or read from its folder.

recipe, sizes, tokens, budget --plan_ladder--> design.json in the folder, if it has been drawn before
                                           --> else the text is prepared, steps are measured, the design is drawn
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hlat.data import ProgressCallback, prepare_recipe_data
from hlat.draft import time_text
from hlat.ladder.cost import Speed, measure, probe_run
from hlat.ladder.design import Axes, candidates, draw, refuse_undetermined, target_recipe
from hlat.ladder.planned_runs import PlannedRun, Target
from hlat.ladder.record import LadderPlan, read_plan, write_plan
from hlat.runtime.errors import PlanError
from hlat.runtime.quantities import QuantityError, parse_seconds
from hlat.runtime.terminal import plural

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
            name: None if value == AUTO else value.replace(" ", "")
            for name, value in (("sizes", self.sizes), ("tokens", self.tokens))
        }
        return {"budget": self.budget, "flops": self.flops, **lists}


def plan_ladder(
    question: LadderQuestion,
    *,
    options: Sequence[str] = (),
    keep: bool = True,
    found_only: bool = False,
    say: Callable[[str], None] = lambda text: None,
    progress: ProgressCallback | None = None,
) -> LadderPlan:
    """Return the ladder of a folder, or draw one.

    Args:
        question: recipe, overrides and options.
        options: options of ``hlat train``, such as ("--nproc", "2"), for the steps that are measured.
        keep: prepare the text and write the design into the folder, so that the runs can be trained.
        found_only: draw none.
        say: shows a message to the user.
        progress: called while text is prepared.

    Raises:
        RecipeError: the recipe has mistakes, or there is no ladder of it; with every problem.
        PlanError: an option is wrong, the budget is too small, the runs would determine no law, the folder has
            another ladder, or none with ``found_only``.
        LaunchError: steps were to be measured, and their run failed.
    """
    axes = Axes.parse(question.sizes, question.tokens)
    target = target_recipe(question.recipe, question.words)
    folder = Path(question.to or Path("runs") / f"{target.recipe.run.name}-ladder")
    if (found := read_plan(target, folder, question.asked)) is not None:
        if keep and not found_only:
            _prepare(found, progress)  # it may have been deleted since
        return found
    if found_only:
        raise PlanError(f"no ladder in {folder}")
    seconds, flops = _budgets(question)

    def drawn(known: Target) -> list[PlannedRun]:
        return draw(candidates(known, axes), lambda run: run.own_flops, flops, "--flops", "{:.2g} FLOPs".format)

    def plan_of(runs: Sequence[PlannedRun]) -> LadderPlan:
        return LadderPlan(target, folder, tuple(runs), target.conditions)

    # What cannot be done is said before text is prepared, without the FLOPs of validations.
    plan = plan_of(drawn(target))
    refuse_undetermined(plan)
    if keep or seconds is not None:
        say("preparing text")
        # Here, once: elements of a job array would prepare it at the same time.
        known = replace(target, validation_tokens=_prepare(plan, progress))
        plan = plan_of(drawn(known) if seconds is None else _timed(known, axes, folder, seconds, options, say))
        refuse_undetermined(plan)
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


def _prepare(plan: LadderPlan, progress: ProgressCallback | None) -> int:
    """Prepare the text that all runs share, unless it is there; return the tokens of one validation."""
    recipe = plan.recipe_of(plan.runs[0])
    tokens = prepare_recipe_data(recipe, progress=progress).validation_tokens
    sequences = recipe.evaluation.sequences
    return tokens if sequences is None else min(tokens, sequences * recipe.data.sequence_length)


def _timed(
    target: Target, axes: Axes, folder: Path, budget: float, options: Sequence[str], say: Callable[[str], None]
) -> list[PlannedRun]:
    """Draw a design whose runs take at most a time, by steps measured on the way."""

    def probe(run: PlannedRun) -> Speed:
        width, layers = run.size.split("x")
        say(f"timing a few steps of a model of width {width}, {plural(int(layers), 'layer')}")
        return probe_run(target, run, folder, options)

    def choose(cost: Callable[[PlannedRun], float]) -> list[PlannedRun]:
        return draw(candidates(target, axes), cost, budget, "--budget", time_text)

    cheapest = min(candidates(target, axes), key=lambda runs: sum(run.own_flops for run in runs))
    speeds = measure(choose, probe, cheapest)
    return [
        replace(run, seconds=speeds.seconds(run), outside=speeds.at(run.flops).outside)
        for run in choose(speeds.seconds)
    ]
