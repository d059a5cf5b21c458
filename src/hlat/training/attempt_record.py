"""Record of what was started, in the run's folder before its data is prepared: a run that dies early leaves its recipe.

Once a run has begun, a start is recorded when it has been accepted: one that is refused changes nothing.

    recipe.yaml        resolved recipe; ``hlat train RUN/recipe.yaml`` is the same run
    attempts.jsonl     a line per start: source text and overrides, changed fields, versions, git, host, device, command

Credentials in URLs are removed, and no environment variable is recorded.
"""

import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from hlat.checkpoint import software_versions
from hlat.config import Recipe
from hlat.data import write_atomic
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.join import Runtime
from hlat.runtime.errors import DataError, HlatError, StorageError
from hlat.runtime.rank_env import host_name
from hlat.runtime.storage.run_folder import ATTEMPTS_NAME, RECIPE_HEAD, RECIPE_NAME, is_foreign_recipe
from hlat.runtime.urls import redact, redact_json, redact_value
from hlat.tracking import EventLog, read_valid_records
from hlat.training.git_commit import git_commit

_PACKAGES = ("numpy", "pyarrow", "safetensors", "tokenizers", "transformers", "triton")


@dataclass(frozen=True)
class RunOrigin:
    """Origin of a recipe.

    Attributes:
        source: recipe file, or the name of a shipped recipe.
        text: its text; empty if it could not be read.
        overrides: ``a.b=c`` each.
    """

    source: str
    text: str
    overrides: tuple[str, ...] = ()


def has_begun(run_dir: Path) -> bool:
    """Return True if an attempt of the run has begun its steps: a start that is refused after that is no attempt."""
    events, _ = read_valid_records(run_dir / "events.jsonl")  # a damaged line is no reason to refuse the run
    return any(event.get("event") != "error" for event in events)


def record_attempt(recipe: Recipe, runtime: Runtime, origin: RunOrigin | None) -> None:
    """Write the resolved recipe to the run's folder, and append this attempt. For rank 0, in an existing folder.

    Args:
        recipe: the recipe as it was loaded; ``precision.mode`` may still be auto.
        runtime: processes and device.
        origin: file and overrides; None for a recipe that a program has made.

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
    changes = _changes(_earlier(file), settings)
    text = f"{RECIPE_HEAD} The same run: hlat train {recipe.run_dir}/{RECIPE_NAME}\n"
    try:
        write_atomic(file, (text + yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)).encode())
    except OSError as error:
        raise StorageError(f"{file}: cannot write: {error.strerror or error}.") from error
    log = EventLog(recipe.run_dir / ATTEMPTS_NAME)
    try:
        log.append(
            "attempt",
            recipe=None if origin is None else redact_value(origin.source),
            text="" if origin is None else redact(origin.text),
            overrides=[] if origin is None else [redact_value(word) for word in origin.overrides],
            changes=changes,
            command=[redact_value(word) for word in sys.argv],
            folder=str(Path.cwd()),
            host=host_name(),
            pid=os.getpid(),
            processes=runtime.world,
            device=backend_of(runtime.device).describe(runtime.device),
            versions=software_versions() | _package_versions(),
            git=_git(),
        )
    finally:
        log.close()


def record_early_failure(recipe: Recipe, error: HlatError) -> None:
    """Record why a run could not begin, after earlier attempts' reasons; a run that has begun keeps its events."""
    with suppress(StorageError, DataError):  # the error may be about this very disk
        if not has_begun(recipe.run_dir):
            log = EventLog(recipe.run_dir / "events.jsonl")
            try:
                log.append("error", step=0, message=str(error), recipe=redact_json(recipe.model_dump(mode="json")))
            finally:
                log.close()


def _earlier(file: Path) -> dict[str, Any] | None:
    """Return the recipe of the attempt before; None if there is none that can be read."""
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return found if isinstance(found, dict) else None


def _changes(before: dict[str, Any] | None, now: dict[str, Any], prefix: str = "") -> list[dict[str, Any]]:
    """List the fields in which two recipes differ, by dotted path."""
    if before is None:
        return []
    found: list[dict[str, Any]] = []
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found += _changes(old, new, f"{prefix}{name}.")
        elif json.dumps(old, default=str) != json.dumps(new, default=str):
            found.append({"path": f"{prefix}{name}", "old": old, "new": new})
    return found


def _package_versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _git() -> dict[str, str] | None:
    """Return the commit of the git project of the working folder; None if it is in none."""
    commit = git_commit(Path.cwd())
    return None if commit is None else {"commit": commit}
