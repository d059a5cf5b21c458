"""Start of a run: its folder is locked, the attempt is recorded, and the run is announced when its steps begin.

    run_lock -> record_attempt -> (the run is built: ``run_state.py``) -> announce -> the first step

    lock               two writers would interleave metrics and delete each other's checkpoints
    recipe.yaml        resolved recipe; ``hlat train RUN/recipe.yaml`` is the same run
    attempts.jsonl     a line per start: source text and overrides, changed fields, versions, git, host, device, command
    console            model and parameters; data, steps and their tokens; device, precision, layout, folder; then what
                       is unusual; with -v also what was decided. And the event "start" or "resume" with the recipe

What was started is recorded before data is prepared, so that a run that dies early leaves its recipe. Once a run has
begun, a start is recorded when it has been accepted: one that is refused changes nothing. Credentials in URLs are
removed, and no environment variable is recorded.

The commit is read from git's files; the program ``git`` is not started:

    folder --upwards--> .git, a folder or a file that names one --HEAD--> commit, or a branch
                                                                branch --its file, packed-refs--> commit

Git runs programs that a project's configuration names: filters, hooks, monitors of the file system. A run may be
started in a folder from a stranger, and reading HEAD must execute nothing that lies there. Without filters nobody can
say if a file differs from its commit, so the record has the commit only.
"""

import fcntl
import json
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from hlat.checkpoint import software_versions
from hlat.config import Recipe, odd_settings, own_parts, short
from hlat.hardware import device_chip, load_catalog
from hlat.model import count_parameters, deterministic_by_default
from hlat.parallel import decide_compilation
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.join import Runtime
from hlat.runtime.errors import DataError, HlatError, LaunchError, StorageError
from hlat.runtime.process import LAUNCHER_ENV, host_name, is_running
from hlat.runtime.storage.local_files import read_small_file
from hlat.runtime.storage.run_folder import (
    ATTEMPT_ENV,
    ATTEMPTS_NAME,
    LOCK_NAME,
    RECIPE_NAME,
    is_foreign_recipe,
    read_resolved,
    write_recipe,
)
from hlat.runtime.terminal import TABLE_ROWS, first_of, is_verbose, plural
from hlat.runtime.urls import redact, redact_json, redact_value
from hlat.runtime.version import installed_version
from hlat.tracking import EventLog, OtherRankTracker, Tracker, read_valid_records
from hlat.training.interruptions import report_tier_notes
from hlat.training.run_state import RunState, report_damaged
from hlat.training.stages import stage_line

_LOCK_PATIENCE = 900.0  # seconds
_OTHER_HOST = 120.0  # seconds: file servers release the lock of a host that is gone within 90
_EARLIER_ATTEMPT = 15.0  # seconds for the process of an earlier attempt to end
_POLL_EVERY = 0.1  # seconds


def _say_nothing(text: str) -> None:
    """Ignore the message about a wait."""


@contextmanager
def run_lock(
    run_dir: Path, say: Callable[[str], None] = _say_nothing, patience: float = _LOCK_PATIENCE
) -> Iterator[int]:
    """Hold the lock of an existing run directory; yields its file descriptor, which holds the lock until it closes.

    A holder that is about to end is waited for, ``patience`` seconds at most. One on another host is waited for less
    long, because it cannot be looked at. ``say`` is called once with a message before the wait.

    Raises:
        LaunchError: another process holds the lock.
        StorageError: the lock file cannot be written.
    """
    file = _open_lock(run_dir)
    try:
        # A process whose supervisor was killed saves and stops, and a killed one may have left a saver that still
        # writes. A holder of an earlier attempt of this launch may never end, because its host is stopped: its lock
        # file is replaced, and it notices before it writes (RunFolder.check).
        if not _take_lock(file) and not _wait_for_lock(file, run_dir, say, patience):
            file.close()
            file = _replace_lock(run_dir)
        file.truncate(0)
        launcher, attempt = os.environ.get(LAUNCHER_ENV, "none"), os.environ.get(ATTEMPT_ENV, "none")
        file.write(f"pid {os.getpid()} on {socket.gethostname()}, launcher {launcher}, attempt {attempt}")
        file.flush()
        yield file.fileno()
    finally:
        file.close()


def _open_lock(run_dir: Path) -> TextIOWrapper:
    try:
        return (run_dir / LOCK_NAME).open("a+")
    except OSError as error:
        raise StorageError(f"run.dir {run_dir}: cannot be written: {error.strerror}. Give another run.dir.") from error


def _replace_lock(run_dir: Path) -> TextIOWrapper:
    path = run_dir / f"{LOCK_NAME}.{os.getpid()}"
    file = path.open("a+")
    # Before the rename: nobody can take the new file in between.
    fcntl.flock(file, fcntl.LOCK_EX)
    path.replace(run_dir / LOCK_NAME)
    return file


def _take_lock(file: TextIOWrapper) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for_lock(file: TextIOWrapper, run_dir: Path, say: Callable[[str], None], patience: float) -> bool:
    """Wait for the lock; return False if it has to be replaced, because its holder is of an earlier attempt."""
    begin, reported = time.monotonic(), False
    while not _take_lock(file):
        file.seek(0)
        holder = file.read().strip()
        waited = time.monotonic() - begin
        if _is_of_earlier_attempt(holder):
            if waited > _EARLIER_ATTEMPT:
                return False
        elif waited > min(patience, _lock_patience(holder, patience)):
            message = f"run.dir {run_dir}: another process ({holder}) is training in it."
            raise LaunchError(f"{message} Wait for it, or give another run.name or run.dir.")
        if not reported:
            say(f"run.dir {run_dir}: waiting for the previous run ({holder}) to save and end")
            reported = True
        time.sleep(_POLL_EVERY)
    return True


def _lock_patience(holder: str, longest: float) -> float:
    if not holder:  # it has the lock and is about to write its process id
        return longest
    fields = _lock_fields(holder)
    if fields.get("on") != socket.gethostname():
        return _OTHER_HOST if fields else 0.0
    numbers = (fields.get("pid", ""), fields.get("launcher", ""))
    # A dead writer with a living child, or a dead launcher: the holder is about to end.
    is_ending = any(number.isdigit() and not is_running(int(number)) for number in numbers)
    return longest if is_ending else 0.0


def _is_of_earlier_attempt(holder: str) -> bool:
    """Return True if the holder belongs to an earlier attempt of the launch that this process belongs to."""
    launch, _, number = os.environ.get(ATTEMPT_ENV, "").partition("/")
    its_launch, _, its_number = _lock_fields(holder).get("attempt", "").partition("/")
    return bool(launch) and launch == its_launch and its_number.isdigit() and int(its_number) < int(number)


def _lock_fields(holder: str) -> dict[str, str]:
    """Fields of the text of a lock file; none if it is not such a text."""
    words = holder.replace(",", "").split()
    return dict(zip(words[::2], words[1::2], strict=True)) if len(words) % 2 == 0 and words[:1] == ["pid"] else {}


_PACKAGES = ("numpy", "pyarrow", "safetensors", "tokenizers", "transformers", "triton")


@dataclass(frozen=True)
class RunOrigin:
    """File and overrides of a recipe."""

    source: str  # recipe file, or the name of a shipped recipe
    text: str  # its text; empty if it could not be read
    overrides: tuple[str, ...] = ()  # ``a.b=c`` each


def has_begun(run_dir: Path) -> bool:
    """Return True if an attempt of the run has begun its steps: a start that is refused after that is no attempt."""
    events, _ = read_valid_records(run_dir / "events.jsonl")  # a damaged line is no reason to refuse the run
    return any(event.get("event") != "error" for event in events)


def record_attempt(recipe: Recipe, runtime: Runtime, origin: RunOrigin | None) -> None:
    """Write the resolved recipe to the run's folder, and append this attempt. For rank 0, in an existing folder.

    The recipe is as it was loaded; ``precision.mode`` may still be auto. ``origin`` is None if a program made it.

    Raises:
        StorageError: a file cannot be written, or would replace a recipe of the user's.
    """
    settings = redact_json(recipe.model_dump(mode="json"))
    file = recipe.run_dir / RECIPE_NAME
    if is_foreign_recipe(recipe.run_dir):
        raise StorageError(
            f"run.dir {recipe.run_dir}: {RECIPE_NAME} there was not written by a run, and the run's own recipe would "
            "replace it. Rename that file, or choose another run.dir."
        )
    before = read_resolved(recipe.run_dir)
    changes = _changed_fields(before, settings) if before else []
    sources = own_parts.part_sources(recipe.own_parts)
    try:
        write_recipe(recipe.run_dir, settings, recipe.run_dir)
    except OSError as error:
        raise StorageError(f"{file}: cannot write: {error.strerror or error}.") from error
    with closing(EventLog(recipe.run_dir / ATTEMPTS_NAME)) as log:
        log.append(
            "attempt",
            recipe=None if origin is None else redact_value(origin.source),
            text="" if origin is None else redact(origin.text),
            overrides=[] if origin is None else [redact_value(word) for word in origin.overrides],
            changes=changes,
            **({"parts": sources} if sources else {}),
            command=[redact_value(word) for word in sys.argv],
            folder=str(Path.cwd()),
            host=host_name(),
            pid=os.getpid(),
            processes=runtime.world,
            device=backend_of(runtime.device).describe(runtime.device),
            versions=software_versions() | _package_versions(),
            git=_git_record(),
        )


def changed_parts(run_dir: Path) -> list[str]:
    """Return the names of the user's own parts whose source has changed since the attempt before this one."""
    attempts, _ = read_valid_records(run_dir / ATTEMPTS_NAME)
    *earlier, now = [attempt.get("parts", {}) for attempt in attempts] or [{}]
    before = earlier[-1] if earlier else {}
    return [name for name, source in now.items() if name in before and before[name] != source]


def record_early_failure(recipe: Recipe, error: HlatError) -> None:
    """Record why a run could not begin, after earlier attempts' reasons; a run that has begun keeps its events."""
    with suppress(StorageError, DataError):  # the error may be about this very disk
        if not has_begun(recipe.run_dir):
            with closing(EventLog(recipe.run_dir / "events.jsonl")) as log:
                log.append("error", step=0, message=str(error), recipe=redact_json(recipe.model_dump(mode="json")))


def _changed_fields(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found += _changed_fields(old, new, f"{prefix}{name}.")
        # As JSON: a tuple of the recipe is a list in the file.
        elif json.dumps(old, default=str) != json.dumps(new, default=str):
            found.append({"path": f"{prefix}{name}", "old": old, "new": new})
    return found


def _package_versions() -> dict[str, str]:
    return {name: found for name in _PACKAGES if (found := installed_version(name))}


def _git_record() -> dict[str, str] | None:
    commit = git_commit(Path.cwd())
    return None if commit is None else {"commit": commit}


_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_BRANCH = re.compile(r"ref: *(refs/\S+)")
_MOST_GIT_LINKS = 5  # symbolic refs that git follows, too
_LARGEST_PACKED_REFS = 64 << 20  # bytes of packed-refs; a line for each of 800,000 branches and tags


def git_commit(folder: Path) -> str | None:
    """Return the commit of the project that a folder belongs to; None outside of one, or if its files do not say."""
    try:
        own = next((found for above in (folder, *folder.parents) if (found := _git_folder(above / ".git"))), None)
        return None if own is None else _resolve_git_name(own, _shared_git_folder(own), "HEAD", _MOST_GIT_LINKS)
    except (OSError, ValueError):  # unreadable, too large, no text
        return None


def _git_folder(path: Path) -> Path | None:
    """Folder of git's files: ``path``, or the one that it names, as in linked work trees and submodules."""
    if path.is_file():
        name = read_small_file(path).strip().removeprefix("gitdir:").strip()
        return path.parent / name
    return path if (path / "HEAD").is_file() else None


def _shared_git_folder(own: Path) -> Path:
    """Folder with the branches: that of the main work tree if ``own`` belongs to a linked one."""
    link = own / "commondir"
    return own / read_small_file(link).strip() if link.is_file() else own


def _resolve_git_name(own: Path, shared: Path, name: str, links: int) -> str | None:
    text = _git_name_content(own, shared, name)
    branch = _BRANCH.fullmatch(text)
    if branch is None:
        return text if _COMMIT.fullmatch(text) else None  # nothing else of these files comes into the record
    if links == 0 or ".." in Path(branch[1]).parts:
        return None
    return _resolve_git_name(own, shared, branch[1], links - 1)


def _git_name_content(own: Path, shared: Path, name: str) -> str:
    """Content of the file of HEAD or a branch; its packed commit if there is no file; empty if there is none."""
    for folder in (own, shared):
        if (folder / name).is_file():
            return read_small_file(folder / name).strip()
    packed = shared / "packed-refs"
    for line in read_small_file(packed, _LARGEST_PACKED_REFS).splitlines() if packed.is_file() else ():
        commit, _, branch = line.partition(" ")
        if branch == name:
            return commit
    return ""


_LOG = logging.getLogger(__name__)


def announce(state: RunState, tracker: Tracker | OtherRankTracker, *, first: bool = True) -> None:
    """Log model, data, device and plan of the run, and record its start, resume or stage as an event.

    ``first`` is False for further stages in this process: what holds for the whole run is not said again.
    """
    recipe = state.recipe
    parameters = count_parameters(recipe.model).total
    device = backend_of(state.runtime.device).describe(state.runtime.device)
    for line, values in _header(state, parameters, device) if first else ():
        tracker.message(line, **values)
    if recipe.place is not None:
        tracker.message(stage_line(recipe.place), stage=recipe.place.stage.name)
    for line in _decisions(state) if is_verbose() else ():
        tracker.message(line)
    _report_notes(state, tracker)
    recipe_changes = [{"path": c.path, "old": c.old, "new": c.new} for c in state.recipe_changes]
    begins = recipe.checkpoint.init_from is not None and state.saved is None
    loaded = {"init_from": recipe.checkpoint.init_from, "init_sha256": state.initial_weights} if begins else {}
    tracker.event(
        # A run that is killed before its first checkpoint starts again.
        ("resume" if state.step else "start") if first else "stage",
        step=state.step,
        parameters=parameters,
        processes=state.runtime.world,
        device=device,
        **state.arithmetic.names(),
        changes=recipe_changes,
        recipe=state.run_recipe.model_dump(mode="json"),  # reports need it before there is a checkpoint
        **loaded,
        **({} if recipe.place is None else {"stage": recipe.place.stage.name}),
    )


def _header(state: RunState, parameters: int, device: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the lines that every run begins with, narrower than 80 columns where names allow it, and their values."""
    recipe, prepared, run = state.recipe, state.prepared, state.recipe.run_dir
    layout = recipe.parallel.describe(state.model.layout.data) if state.runtime.world > 1 else "1 process"
    training = "" if recipe.data.mode == "online" else f"{prepared.train_tokens:,} tokens, "
    init_from, layers, size = recipe.checkpoint.init_from, recipe.model.layers, recipe.model.vocab_size
    of_model = {"run": recipe.run.name, "parameters": parameters, "layers": layers, "vocab_size": size}
    tokens = {"validation_tokens": prepared.validation_tokens, "tokens_per_step": recipe.tokens_per_step}
    of_data = {"steps": recipe.total_steps, **tokens, **({"train_tokens": prepared.train_tokens} if training else {})}
    of_run = {
        "precision": recipe.precision.mode,
        "device": device,
        "processes": state.runtime.world,
        "folder": str(run),
    }
    head = f"{recipe.run.name}: {parameters:,} parameters, {plural(layers, 'layer')}, "
    lines: list[tuple[str, dict[str, Any]]] = [
        (f"{head}vocabulary {size:,}", of_model),
        (f"data: {training}{prepared.validation_tokens:,} for validation; {recipe.steps_and_tokens}", of_data),
        (f"run: {recipe.precision.mode} on {device}, {layout}; in {run}", of_run | recipe.parallel.model_dump()),
    ]
    if init_from is not None and state.saved is None:
        lines.append((f"weights: loaded from {init_from}", {"init_from": init_from}))
    return lines


def _decisions(state: RunState) -> list[str]:
    """Return what was measured and decided, for those who ask (-v)."""
    recipe, device = state.recipe, state.runtime.device
    new_choice = state.saved is None and state.mode_was_chosen
    chosen = [state.precision_note] if state.precision_note is not None and new_choice else []
    return [
        *chosen,
        f"peak: {state.peak.value / 1e9:,.0f} GFLOP/s ({state.peak.source})",
        "; ".join(f"{subject}: {name}" for subject, name in state.arithmetic.by_subject().items()),
        f"blocks: {decide_compilation(recipe, device, state.runtime.world)}",
    ]


def _report_notes(state: RunState, tracker: Tracker | OtherRankTracker) -> None:
    """Say what is unusual about this run, and what has changed since its checkpoint."""
    recipe, prepared = state.recipe, state.prepared
    was_said = state.mode_was_chosen and (state.saved is None or state.begins_stage)
    if state.precision_note is not None and not was_said:
        tracker.message(state.precision_note)
    if (cost := _determinism_cost(state)) is not None:
        tracker.message(cost)
    if recipe.precision.mode == "bf16":
        tracker.warn(
            "precision.mode=bf16 rounds small updates away: training stalls as the learning rate falls. "
            "It is here for comparison; bf16-sr costs the same memory."
        )
    if recipe.precision.in_hardware:
        tracker.message(
            "precision.rounding=hardware: the device rounds every conversion to bf16 stochastically, with random "
            "numbers that no checkpoint has: a resumed run is not bitwise the one that was not interrupted"
        )
    for warning in odd_settings(recipe):
        tracker.warn(str(warning))
    for note in state.training_data.notes:
        tracker.message(note)
    late = [note for data in (prepared, *state.sets.values()) for note in data.training_notes]
    # What was said when the data was prepared is not repeated at every start.
    for note in [*(prepared.notes if state.saved is None else prepared.opening_notes), *late]:
        tracker.message(f"data: {note}")
    report_damaged(state.damaged, tracker)
    report_tier_notes(state.tiers.events, tracker)
    if state.tiers.warning:
        tracker.warn(state.tiers.warning)
    if state.step > recipe.total_steps:
        tracker.message(
            f"at step {state.step} already, past the {plural(recipe.total_steps, 'step')} of the recipe; to go on, "
            "give a larger training.steps"
        )
    elif state.step and not state.begins_stage:
        text = f"resumed at step {state.step} of {recipe.total_steps}"
        tracker.message(text, step=state.step, total_steps=recipe.total_steps)
    _report_changes(state, tracker)


def _report_changes(state: RunState, tracker: Tracker | OtherRankTracker) -> None:
    """Say what differs from the run that wrote the checkpoint."""
    for note in state.arithmetic.differences(state.saved_arithmetic) if state.saved_arithmetic is not None else ():
        tracker.message(note)
    shown, more = first_of(state.recipe_changes, TABLE_ROWS)
    for change in shown:
        text = f"changed since the checkpoint: {change.path}: {short(change.old)} -> {short(change.new)}"
        tracker.message(text, path=change.path, old=change.old, new=change.new)
    if more:
        tracker.message(f"changed since the checkpoint: {more}")
    report_component_changes(state, tracker)


def _determinism_cost(state: RunState) -> str | None:
    """Say what ``run.deterministic`` changes on this device, and what that costs; None where it changes no kernel."""
    recipe, device = state.recipe, state.runtime.device
    if deterministic_by_default(recipe, device):
        return None
    from hlat.planner import run_determinism_cost  # noqa: PLC0415 - most runs start without the planner

    # The estimate is for the kernels that such a chip usually gets: none if torch has chosen another one here.
    try:
        cost = run_determinism_cost(recipe, device_chip(device, load_catalog()), state.runtime.world)
    except Exception:  # no defect of an estimate may end a run
        _LOG.debug("no estimate of what run.deterministic costs", exc_info=True)
        return None
    return None if cost is None or cost.kernels[cost.chosen].name != state.arithmetic.attention else str(cost)


def report_component_changes(state: RunState, tracker: Tracker | OtherRankTracker) -> None:
    """Say what is different about the user's own parts: their source, and components with and without saved state."""
    for name in changed_parts(state.recipe.run_dir) if state.runtime.ranks.is_first else ():
        tracker.message(f"changed since the last start: the source of {name}; {ATTEMPTS_NAME} has both")
    for name in state.component_changes.begun:
        tracker.event("component_begun", step=state.step, name=name)
        tracker.message(f"{name}: the checkpoint has no state of it; it begins with the weights of step {state.step}")
    for name in state.component_changes.dropped:
        tracker.event("component_dropped", step=state.step, name=name)
        tracker.message(
            f"{name}: the checkpoint has its state, but the recipe does not ask for it: later checkpoints lack it"
        )
