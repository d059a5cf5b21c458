"""The examination of a start, before any process of a run: ``hlat check`` and ``hlat train`` both are this.

    load the recipe --> its problems ------------------------------+
    START_CHECKS on its valid sections, in a forked process -------+--load_and_check--> one RecipeError, or StartReport:
                                                                                        the recipe and warnings
    packages of hosted trackers are found; a process of its own imports the parts of the user's own
        --check_extensions--> RecipeError or LaunchError with their names

A supervisor stays small: it neither imports libraries of file formats nor torch, and forks the process that trains. So
its checks run in processes of their own, which end at once.
"""

import json
import multiprocessing
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from pydantic_core import to_json

from hlat.config import Problem, Recipe, RecipeError, SettingNote, own_parts
from hlat.hardware import Cluster
from hlat.launch.start_checks import (
    FORECAST_NOTE,
    START_CHECKS,
    TOKENIZER_NOTE,
    VALIDATION_NOTE,
    check_device_memory,
    findings,
    surely_fits,
)
from hlat.launch.start_place import Here, StartPlace, sections_of
from hlat.model import count_parameters, flops_per_token
from hlat.runtime.errors import LaunchError, PlanError
from hlat.runtime.quantities import amount_text, rounded_text, short_count
from hlat.runtime.terminal import plural
from hlat.tracking import check_installed

if TYPE_CHECKING:
    from hlat.data import InputReport


@dataclass(frozen=True)
class StartReport:
    """A start that can begin, and what is odd about it."""

    recipe: Recipe
    # warnings about this machine and the text, in addition to those about the recipe
    notes: tuple[SettingNote, ...] = ()
    stage_inputs: "tuple[InputReport, ...]" = ()  # what was found of each stage's text; () if a forked process looked
    chosen: tuple[str, ...] = ()  # values that the recipe leaves open, each with its reason

    @property
    def before_training(self) -> tuple[SettingNote, ...]:
        """Notes without those that the run gives itself once its text is prepared."""
        exact = {TOKENIZER_NOTE, FORECAST_NOTE} | ({VALIDATION_NOTE} if self.recipe.data.mode == "prepared" else set())
        return tuple(note for note in self.notes if note.rule not in exact)


def load_and_check(load: Callable[[], Recipe], here: Here, *, forked: bool = False) -> StartReport:
    """Load a recipe, and check that it can start here.

    Args:
        load: loads the recipe.
        here: the machine.
        forked: check in a process of its own, if this one can be forked.

    Raises:
        RecipeError: with every problem of the recipe and of the start.
    """
    recipe, refused = None, None
    try:
        recipe = load()
        sections = sections_of(recipe)
    except RecipeError as error:
        if not error.sections:
            raise
        refused, sections = error, dict(error.sections)
    place = StartPlace(sections, recipe, here)
    # A child of a process with threads may wait forever for a lock that one of them held.
    can_fork = "torch" not in sys.modules and threading.active_count() == 1
    # A device that is opened here could not be used by processes that are forked from this one.
    place.opens_device = can_fork or not forked
    forked = forked and can_fork
    problems, notes, chosen = _find_forked(place) if forked else _find(place)
    # One problem per field is enough.
    known = {problem.path for problem in refused.problems} if refused else set()
    found = [problem for problem in problems if problem.path not in known]
    if refused is not None:
        raise RecipeError([*refused.problems, *found], refused.source, refused.sections) from refused
    if found:
        where = "here" if here.cluster is None else f"on {here.cluster.name}"
        raise RecipeError(found, f"the run cannot start {where}")
    assert place.recipe is not None, "a recipe without problems has been loaded"
    inputs = tuple(stage.inputs for stage in place.stages) if here.files and not forked else ()
    return StartReport(place.recipe, tuple(notes), inputs, tuple(chosen))


_Found = tuple[list[Problem], list[SettingNote], list[str]]  # problems, notes, and values that were chosen


def _find(place: StartPlace) -> _Found:
    chosen = place.choose_defaults()
    checks = START_CHECKS if place.here.files else (check_device_memory,)
    found = list(findings(place, checks))
    problems = [finding for finding in found if isinstance(finding, Problem)]
    return problems, [finding for finding in found if isinstance(finding, SettingNote)], chosen


def _find_forked(place: StartPlace) -> _Found:
    """Find in a forked process; if it ends without an answer, find here, where the error shows itself."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or both processes would write the buffered text
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(place, sender), daemon=True)
    process.start()
    sender.close()  # or the pipe would not end with the child
    try:
        return TypeAdapter(_Found).validate_json(receiver.recv_bytes())
    except EOFError:
        place.opens_device = False
        return _find(place)
    finally:
        process.join()


def _answer(place: StartPlace, sender: Connection) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)  # the process that waits says that it was ended
    found = to_json(_find(place), fallback=str)  # str: not every value is of JSON
    with suppress(BrokenPipeError):  # the process that waits was ended
        sender.send_bytes(found)


_SHOWN_ERROR = 1000  # last characters of what a failing import printed


def check_extensions(recipe: Recipe, world: int) -> None:
    """Check hosted trackers and the parts of the user's own.

    Raises:
        LaunchError: the package of a hosted tracker is not installed, or importing a part ended the process.
        RecipeError: parts are not there, or cannot be imported, or do not fit; lists all problems.
    """
    check_installed(recipe.tracking)
    if not recipe.own_parts:
        return
    # Its messages name the folders that this process searches.
    asked = f"import_parts({world}, {own_parts.search_folders()!r})"
    program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import import_parts; {asked}"
    done = subprocess.run(
        [sys.executable, "-c", program], input=recipe.model_dump_json(), capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise LaunchError(
            f"importing {', '.join(recipe.own_parts)} ended its process with exit code {done.returncode}: "
            f"{done.stderr[-_SHOWN_ERROR:].strip()}"
        )
    if problems := json.loads(lines[-1]):  # a package may print when it is imported
        raise RecipeError([Problem(**problem) for problem in problems], "parts of your own")


def import_parts(world: int, folders: Sequence[str]) -> None:
    """Import the own parts of the recipe on standard input; print their problems as a line of JSON.

    ``folders`` are searched for modules.
    """
    from hlat.training import check_own_parts  # noqa: PLC0415  (imports torch)

    for folder in folders:
        own_parts.search_beside(Path(folder) / "recipe.yaml")
    problems: list[dict[str, Any]] = []
    try:
        check_own_parts(Recipe.model_validate_json(sys.stdin.read()), world)
    except RecipeError as error:
        told = ("path", "reason", "remedy", "value", "has_value")
        problems = [{name: getattr(each, name) for name in told} for each in error.problems]
    # A package may have printed half a line.
    print("\n" + json.dumps(problems, default=str))  # noqa: T201


_GIB = 1 << 30
_SHORT = 2e13  # FLOPs: minutes on any machine; to know its rate, a CPU is measured, for which torch is imported


def summary_lines(report: StartReport, here: Here) -> Iterator[tuple[str, str]]:
    """Yield name and text of each line: data, memory, time, and the values that were chosen."""
    recipe = report.recipe
    if inputs := list(report.stage_inputs):
        yield from (("data", line) for line in recipe.by_stage(lambda stage: _data(stage, inputs.pop(0))))
    if here.cluster is not None:
        for name, describe in (("memory", _memory), ("time", _planned_time)):
            about = partial(describe, cluster=here.cluster, world=here.world)
            yield from ((name, line) for line in recipe.by_stage(about))
    elif time := _time_here(recipe, here):
        yield "time", time
    for line in report.chosen:
        yield "chosen", line


def _data(recipe: Recipe, inputs: "InputReport") -> str:
    """Describe the files of a recipe, their tokens and the passes over them, as far as these are known."""
    about = "" if inputs.is_prepared else "about "
    words = [f"{plural(inputs.files, 'file')}, {amount_text(inputs.text_bytes, 'B')}"] * bool(inputs.files)
    if (tokens := inputs.training_tokens) is not None:
        words.append(f"{about}{short_count(tokens)} training tokens")
        weighted = recipe.data.phases or any(source.weight is not None for source in recipe.data.sources)
        # With weights each source has passes of its own, which the run says when it has counted them.
        words += [] if weighted else [f"{rounded_text(recipe.corpus_tokens / max(tokens, 1), 2)} passes"]
    return "; ".join(words)


def _memory(recipe: Recipe, cluster: Cluster, world: int | None) -> str:
    if surely_fits(recipe, cluster):
        return f"surely less than half of the {cluster.memory_bytes / _GIB:.0f} GiB of a device"
    from hlat.planner import recipe_fit  # noqa: PLC0415 - imports torch

    return str(recipe_fit(recipe, cluster, world))


def _planned_time(recipe: Recipe, cluster: Cluster, world: int | None) -> str:
    from hlat.planner import days_text, likely, predict_recipe  # noqa: PLC0415 - imports torch

    try:
        found = predict_recipe(recipe, cluster, world)
    except PlanError:  # a recipe that fits, and that the cost model does not cover
        return ""
    return f"{days_text(likely(found))}, at {found.step_seconds:.3g} s a step by the plan"


def _time_here(recipe: Recipe, here: Here) -> str:
    flops = sum(
        flops_per_token(stage.model, stage.data.sequence_length) * stage.stage_tokens for stage in recipe.each_stage()
    )
    if here.processes is None:
        return ""
    if flops < _SHORT:
        return f"minutes or less: {flops:.1e} FLOPs"
    from hlat.draft import look_at_machine, reached, time_text  # noqa: PLC0415 - imports torch

    try:
        machine = look_at_machine(recipe.run.device)
    except LaunchError:  # a check of the start has said that there is no such device
        return ""
    devices = 1 if machine.is_host else here.world or 1
    share = reached(count_parameters(recipe.model).total, is_host=machine.is_host)
    seconds = flops / (share * machine.peak * devices)
    return f"about {time_text(seconds)}, if steps reach {share:.0%} of the peak of {machine.name}"
