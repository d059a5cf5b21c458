"""A fork: a new run that goes on from a checkpoint of another one, its parent, with another recipe.

    RUN@STEP --> checkpoint of the parent --its recipe, overrides--> recipe of the fork, or an error
    parent    checkpoints/step-N/KEPT-<token>     the folder of the fork: pruning leaves this checkpoint alone
    beside    .fork-NEW-<token>/                  checkpoints/step-N: the parent's tensors, metadata with the new recipe
                                                  recipe.yaml, .run-id; events.jsonl: parent, step, changed fields
              rename to NEW                       the commit point: a fork is whole, or does not exist

Files of tensors are never changed once written, so parent and forks share them: by hard link, else by reference
(FICLONE, as on XFS and Btrfs), else as a copy. Only small files are written. Prepared data is read where the parent has
it. The position in the data is part of the checkpoint.

The parent may be training. A checkpoint that it removes at this very moment is either kept, or the fork fails and may
be made again.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hlat.checkpoint.format.filesystem import (
    NEW_FOLDER_REMEDY,
    Disk,
    FileRecord,
    check_new_folder,
    copy_file,
    make_folders,
    storage_errors,
    write_file,
)
from hlat.checkpoint.format.format_1 import META_NAME
from hlat.checkpoint.inventory import find_checkpoints_folder, is_checkpoint, list_checkpoints
from hlat.checkpoint.protocol.reader import (
    Checkpoint,
    CheckpointManifest,
    open_checkpoint,
    step_folder_name,
    write_manifest,
)
from hlat.checkpoint.run_id import RunId
from hlat.checkpoint.saved_run import RecipeChange, check_fork, find_saved_recipe, read_saved_run
from hlat.config import Recipe, parse_recipe
from hlat.optim import placed, rate_at
from hlat.runtime.errors import CheckpointError
from hlat.runtime.storage.run_folder import KEPT_PREFIX, read_run_id, write_recipe
from hlat.runtime.urls import is_url
from hlat.tracking import EventLog

_NEAR = 4  # steps that a message names
_OWN = ("run.name", "run.dir", "data.prepared_dir")  # fields that name places: no differences of the training
_WAYS = ("hard link", "reference copy", "copy")


ForkCheck = Callable[[Recipe, Checkpoint], tuple[Mapping[str, Any], int]]
"""Function of a fork's recipe and of its checkpoint. It returns the metadata that the checkpoint of the fork has
instead of the parent's, and the batch of the next step, which is not its number if the parent has skipped some."""


@dataclass(frozen=True)
class Fork:
    """A run that was forked, before its first step."""

    folder: Path
    parent: Path
    step: int
    recipe: Recipe
    changes: tuple[RecipeChange, ...]  # fields in which its recipe differs from the parent's
    way: str  # that the state was taken in: hard link, reference copy or copy
    shared_bytes: int  # of files that parent and fork have in common, or that were copied
    rates: tuple[float, float]  # learning rate of the next step in the parent's schedule, and in its own


def fork_run(
    run: str,
    to: Path,
    overrides: Sequence[str] = (),
    disk: Disk | None = None,
    check: ForkCheck = lambda recipe, checkpoint: ({}, checkpoint.step),
) -> Fork:
    """Make a run in the folder ``to`` from RUN@STEP, or from the newest checkpoint of RUN.

    ``check`` refuses a recipe that cannot go on from the checkpoint, by an error of its own.

    Raises:
        CheckpointError: there is no such checkpoint, ``to`` exists, or a change is not possible in a fork.
        RecipeError: the recipe with these overrides has mistakes.
        StorageError: a file-system operation failed; there is no fork then.
    """
    check_new_folder(to)
    parent, checkpoint = _find(run)
    saved = checkpoint.meta.get("run_recipe") or read_saved_run(checkpoint)[0]
    source = f"the recipe of {parent}@{checkpoint.step}"
    before = parse_recipe(_without_length(saved), source)
    content = _content(parent, saved, to, before)
    gets_stages = any(override.startswith("stages") for override in overrides)
    recipe = parse_recipe(_without_length(content, gets_stages), source, overrides)
    changes = tuple(each for each in check_fork(saved, recipe) if each.path not in _OWN)
    _refuse(before, recipe, checkpoint.step, to)
    meta, batch = check(recipe, checkpoint)
    step, disk = checkpoint.step, disk or Disk()
    folder = to.resolve()
    with storage_errors("cannot fork the run", to.parent, remedy=NEW_FOLDER_REMEDY):
        _keep(disk, checkpoint, folder)
        way = _write(disk, checkpoint, folder, parent, recipe, changes, meta)
    size = sum(checkpoint.manifest.file_bytes.values())
    return Fork(to, parent, step, recipe, changes, way, size, (_rate(before, step, batch), _rate(recipe, step, batch)))


def _rate(recipe: Recipe, step: int, batch: int) -> float:
    """Compute the rate of the step after ``step``, which reads a batch."""
    # Stages are counted in batches, of which the run may have skipped some; a run without stages in steps.
    if not recipe.stages:
        return rate_at(recipe, step + 1)
    stages = recipe.each_stage()
    stage = next((each for each in stages if each.place is not None and batch < each.place.stop), stages[-1])
    return rate_at(placed(stage), batch + 1)


def _without_length(content: Mapping[str, Any], gets_stages: bool = False) -> dict[str, Any]:
    """Leave out the length of a run whose stages give it."""
    if not content.get("stages") and not gets_stages:
        return dict(content)
    return {**content, "training": {**content["training"], "steps": None, "tokens": None}}


def _find(run: str) -> tuple[Path, Checkpoint]:
    """Find the run folder and the checkpoint that RUN@STEP names; of RUN alone, the newest readable one."""
    head, _, last = run.rpartition("@")
    names_step = head and last.isdecimal() and not Path(run).exists()
    name, step = (head, int(last)) if names_step else (run, None)
    if is_url(name):
        raise CheckpointError(
            f"{run}: is in an object store, and a fork is made from a run folder. Copy the folder of the step from "
            "there to RUN/checkpoints/ of a run folder, or train that run with its checkpoint.remote, which fetches "
            "the newest."
        )
    parent = Path(name)
    if is_checkpoint(parent) or (parent.exists() and not (parent / "checkpoints").is_dir()):
        raise CheckpointError(f"{run}: is no run folder. Name that and a step, as in runs/trunk@1200.")
    folder = find_checkpoints_folder(parent)
    entries = list_checkpoints(folder)
    there = {entry.step: Path(entry.location) for entry in entries if entry.state == "committed"}
    wanted = max(there, default=None) if step is None else step
    if wanted in there:
        return parent, open_checkpoint(there[wanted])
    found = next((entry for entry in entries if entry.step == wanted), None)
    reason = "has no readable checkpoint" if step is None else f"has no checkpoint of step {step}"
    if found is not None:
        reason = f"its checkpoint of step {wanted} is {found.state}{f': {found.problem}' if found.problem else ''}"
    near = sorted(sorted(there, key=lambda other: abs(other - (wanted or 0)))[:_NEAR])
    nearest = f" The nearest {'is' if len(near) == 1 else 'are'} {', '.join(map(str, near))}." if near else ""
    remote = _remote_of(find_saved_recipe(parent))
    fetched = (
        f" {remote} may have it: copy {step_folder_name(wanted)} from there to {folder}." if remote and wanted else ""
    )
    raise CheckpointError(f"{parent}: {reason}.{nearest}{fetched}")


def _remote_of(saved: Mapping[str, Any] | None) -> str | None:
    section = (saved or {}).get("checkpoint")
    remote = section.get("remote") if isinstance(section, dict) else None
    return remote if isinstance(remote, str) else None


def _content(parent: Path, saved: Mapping[str, Any], to: Path, before: Recipe) -> dict[str, Any]:
    """Return the recipe of a checkpoint with the fork's name and folder, and with the parent's prepared data."""
    own = {"name": to.resolve().name, "dir": str(to)}
    data = dict(saved["data"])
    if data.get("prepared_dir") is None and (parent / "data").is_dir():
        data["prepared_dir"] = str(parent / "data")
    stages = [dict(stage) for stage in saved.get("stages") or ()]
    for stage, its in zip(stages, before.each_stage(), strict=False):
        if {"path", "sources"} & stage["data"].keys() and its.prepared_dir.is_dir():
            stage["data"] = {**stage["data"], "prepared_dir": str(its.prepared_dir)}
    return {**saved, "run": {**saved["run"], **own}, "data": data, "stages": stages}


def _refuse(before: Recipe, recipe: Recipe, step: int, to: Path) -> None:
    """Raise CheckpointError for what no two runs may share, and for a fork with nothing to train."""
    problems = []
    if recipe.run_dir != to:
        problems.append(f"run.dir: {recipe.run_dir} is not {to}, the folder of the fork. Leave run.dir out.")
    if recipe.checkpoint.remote is not None and recipe.checkpoint.remote == before.checkpoint.remote:
        problems.append(
            f"checkpoint.remote: {recipe.checkpoint.remote} has the parent's checkpoints. Give the fork a URL of its "
            "own, or checkpoint.remote=null."
        )
    export = recipe.checkpoint.export
    if export is not None and export.dir is not None and export == before.checkpoint.export:
        problems.append(
            f"checkpoint.export.dir: {export.dir} has the parent's exports. Give the fork a folder of its own."
        )
    if recipe.total_steps <= step:
        problems.append(
            f"training.steps: the fork would end at step {recipe.total_steps}, and begins after step {step}. Give a "
            "larger training.steps or training.tokens."
        )
    if problems:
        raise CheckpointError("\n  ".join([f"{to}: no fork can have this recipe", *problems]))


def _keep(disk: Disk, checkpoint: Checkpoint, folder: Path) -> None:
    """Mark a checkpoint as the parent of a fork; CheckpointError if the run is removing it."""
    mark = checkpoint.path / f"{KEPT_PREFIX}{secrets.token_hex(4)}"
    try:
        write_file(disk, mark, f"{folder}\n".encode())
        disk.sync_folder(checkpoint.path)
    except FileNotFoundError:
        raise _gone(checkpoint) from None
    # A removal begins with a rename: one that began before the mark is seen here, a later one sees the mark.
    if not mark.exists():
        raise _gone(checkpoint)


def _gone(checkpoint: Checkpoint) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.path}: the run has just removed it (checkpoint.keep_last). Fork from a newer step, or give the "
        "same command again."
    )


def _write(
    disk: Disk,
    checkpoint: Checkpoint,
    folder: Path,
    parent: Path,
    recipe: Recipe,
    changes: Sequence[RecipeChange],
    meta: Mapping[str, Any],
) -> str:
    """Write the folder of a fork beside its place, then rename it; return the way in which the state was taken."""
    make_folders(disk, folder.parent)
    for left in folder.parent.iterdir():
        if re.fullmatch(re.escape(f".fork-{folder.name}-") + "[0-9a-f]{8}", left.name):
            disk.remove_tree(left)  # of an attempt that was killed
    staging = folder.with_name(f".fork-{folder.name}-{secrets.token_hex(4)}")
    try:
        place = staging / "checkpoints" / step_folder_name(checkpoint.step)
        make_folders(disk, place, inside=folder.parent)
        settings = recipe.model_dump(mode="json")
        origin = {"folder": str(parent.resolve()), "id": read_run_id(parent), "step": checkpoint.step}
        # With stages, the recipe of the checkpoint stays that of the stage that saved it, but for its rates.
        recipes = {"run_recipe": settings} if recipe.stages else {"recipe": settings}
        way = _write_checkpoint(disk, checkpoint, place, {**recipes, **meta, "parent": origin})
        write_recipe(staging, settings, recipe.run_dir)
        with closing(EventLog(staging / "events.jsonl")) as events:
            differing = [asdict(change) for change in changes]
            events.append("fork", step=checkpoint.step, parent=origin, changes=differing, recipe=settings)
        RunId(staging, recipe.run.name, disk).ensure()
        disk.sync_folder(place.parent)
        disk.sync_folder(staging)
        # An empty folder there is replaced; one that another fork has made meanwhile is not.
        disk.rename(staging, folder)
        disk.sync_folder(folder.parent)
    except BaseException:
        disk.discard(staging)
        raise
    return way


def _write_checkpoint(disk: Disk, checkpoint: Checkpoint, to: Path, more: Mapping[str, Any]) -> str:
    """Write a checkpoint with the files of another one, and its metadata with more fields; return the worst way."""
    manifest = checkpoint.manifest
    records, worst = dict(manifest.files), 0
    for name in sorted(records.keys() - {META_NAME}):
        make_folders(disk, (to / name).parent, inside=to)
        try:
            way, is_same = _take(disk, checkpoint.path / name, to / name, records[name])
        except FileNotFoundError:
            raise _gone(checkpoint) from None
        if not is_same:
            raise CheckpointError(f"{checkpoint.path}: {name} is damaged. Fork from another step.")
        worst = max(worst, way)
    meta = json.dumps({**checkpoint.meta, **more}, indent=1, allow_nan=False).encode()
    records[META_NAME] = write_file(disk, to / META_NAME, meta)
    write_manifest(disk, to, CheckpointManifest(manifest.step, records, manifest.version))
    for folder in {(to / name).parent for name in records}:
        disk.sync_folder(folder)
    return _WAYS[worst]


def _take(disk: Disk, source: Path, target: Path, expected: FileRecord) -> tuple[int, bool]:
    """Give a file a second name, else share its bytes, else copy it; return which of ``_WAYS``, and if it is whole."""
    # What is not read here is compared with its checksum when the fork starts.
    whole = source.stat().st_size == expected.bytes
    with suppress(OSError):  # another file system, one without links, or a file of another user
        disk.link(source, target)
        return 0, whole
    with disk.create(target) as file, suppress(OSError):  # most file systems share no bytes
        disk.share(source, file)
        disk.sync_file(file)
        return 1, whole
    disk.remove_file(target)
    return 2, copy_file(disk, source, target) == expected
