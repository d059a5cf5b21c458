"""Run the checks of a start, in this process or in one that is forked for it.

    load the recipe --> its problems --+
    CHECKS on its valid sections ------+--> one RecipeError, or the recipe and warnings

A supervisor stays small: it neither imports libraries of file formats nor torch, and forks the process that trains. So
its checks run in a process of their own, which ends at once.
"""

import json
import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

from hlat.config import Fix, Problem, Recipe, RecipeError, SettingNote
from hlat.launch.start_checks.odd import TOKENIZER_NOTE, VALIDATION_NOTE
from hlat.launch.start_checks.place import Here, StartPlace


@dataclass(frozen=True)
class StartReport:
    """A start that can begin, and what is odd about it.

    Attributes:
        recipe: the recipe.
        notes: warnings about this machine and the text, in addition to those about the recipe.
    """

    recipe: Recipe
    notes: tuple[SettingNote, ...] = ()

    @property
    def before_training(self) -> tuple[SettingNote, ...]:
        """Notes without those that the run gives itself, with exact numbers, once its text is prepared."""
        exact = {TOKENIZER_NOTE} | ({VALIDATION_NOTE} if self.recipe.data.mode == "prepared" else set())
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
        sections: dict[str, Any] = {name: getattr(recipe, name) for name in type(recipe).model_fields}
    except RecipeError as error:
        if not error.sections:
            raise
        refused, sections = error, dict(error.sections)
    place = StartPlace(sections, recipe, here)
    can_fork = "torch" not in sys.modules and threading.active_count() == 1
    problems, notes = _find_forked(place) if forked and can_fork else _find(place)
    known = {problem.path for problem in refused.problems} if refused else set()
    found = [problem for problem in problems if problem.path not in known]
    if refused is not None:
        raise RecipeError([*refused.problems, *found], refused.source, refused.sections) from refused
    if found:
        raise RecipeError(found, "the run cannot start here")
    assert recipe is not None, "a recipe without problems has been loaded"
    return StartReport(recipe, tuple(notes))


def _find(place: StartPlace) -> tuple[list[Problem], list[SettingNote]]:
    from hlat.launch.start_checks.table import CHECKS  # noqa: PLC0415 - they import libraries of file formats

    found = [finding for check in CHECKS for finding in check(place)]
    problems = [finding for finding in found if isinstance(finding, Problem)]
    return problems, [finding for finding in found if isinstance(finding, SettingNote)]


def _find_forked(place: StartPlace) -> tuple[list[Problem], list[SettingNote]]:
    """Find in a forked process; if it ends without an answer, find here, where the error shows itself."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or both processes would write the buffered text
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(place, sender), daemon=True)
    process.start()
    sender.close()
    try:
        answer = json.loads(receiver.recv_bytes())
    except EOFError:
        return _find(place)
    finally:
        process.join()
    problems = [Problem(**{**each, "fixes": tuple(Fix(**fix) for fix in each["fixes"])}) for each in answer["problems"]]
    return problems, [SettingNote(**each) for each in answer["notes"]]


def _answer(place: StartPlace, sender: Connection) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)  # the process that waits says that it was ended
    problems, notes = _find(place)
    answer = {"problems": [asdict(each) for each in problems], "notes": [asdict(each) for each in notes]}
    with suppress(BrokenPipeError):  # the process that waits was ended
        sender.send_bytes(json.dumps(answer, default=str).encode())
