"""The checkpoints folder of one run: save a checkpoint, with retries, find the newest valid one, remove old ones.

    save(step, state) -> step-00000040/            (by the protocol in commit.py)
    newest()          -> the newest valid checkpoint; damaged newer ones are reported and renamed to <name>.bad
    prune()           -> keeps the last k, multiples of n steps and parents of forks for ever, and always a valid one

    save_with_retries:   CheckpointContent --store.save--> SaveResult
                                           --fails-------> FailedAttempt, a pause of 1, 2, 4, ... seconds, next attempt

All ranks of a run share a store. Rank 0 reads, decides, renames and removes; the other ranks get the result. A save
succeeds on all ranks or on none, so every rank sees the same failures and makes the same pauses.
"""

import logging
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlat.checkpoint.format.filesystem import Disk, make_checkpoints_folder, storage_errors
from hlat.checkpoint.format.tensor_files import TensorChunk
from hlat.checkpoint.protocol.commit import CheckpointContent, clean_up, commit, remove_checkpoint
from hlat.checkpoint.protocol.rank_parts import PartCopy
from hlat.checkpoint.protocol.reader import (
    STAGING_PREFIX,
    STEP_FOLDER,
    Checkpoint,
    open_on_all_ranks,
    refuse_newer_format,
    step_folder_name,
    step_folders,
    verify_checkpoint,
)
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.distributed.sendable_types import sendable
from hlat.runtime.errors import CheckpointError, StateLostError, StorageError
from hlat.runtime.progress import blocking_call
from hlat.runtime.storage.run_folder import RunFolder, is_kept
from hlat.runtime.terminal import listed

_LOG = logging.getLogger(__name__)

BAD_SUFFIX = ".bad"

DamageHandler = Callable[[Path | str, list[str]], None]
"""Called with the present location of something damaged, a folder or a URL, and what is wrong with it."""


def log_damage(folder: Path | str, problems: list[str]) -> None:
    """Log a warning about a damaged checkpoint, the default ``DamageHandler``."""
    _LOG.warning("checkpoint %s is damaged and set aside: %s", folder, listed(problems, between="; "))


class CheckpointStore:
    """The checkpoints folder of a run, for the processes of that run. All methods except ``steps`` are collective.

    Opening it removes what an interrupted save or removal left behind, so there must be no other writer: training
    holds the run's lock. To read the checkpoints of a run that is training, use ``resolve`` and ``load_model``.
    """

    def __init__(
        self,
        root: Path,
        keep_last: int,
        keep_every_steps: int | None = None,
        *,
        on_damage: DamageHandler = log_damage,
        disk: Disk | None = None,
        ranks: HostGroup | None = None,
        folder: RunFolder | None = None,
    ) -> None:
        """Open the store; create its folder if it is missing.

        ``prune`` keeps the newest ``keep_last`` checkpoints, and multiples of ``keep_every_steps`` for ever.
        ``on_damage`` is called on rank 0 for each damaged checkpoint that was renamed. Nothing is written once the run
        ``folder`` has disappeared; None for a store outside a run. StorageError if the folder cannot be created or
        cleaned, or if the ranks do not see the same folder.
        """
        self.root = Path(root)
        self.keep_last = keep_last
        self.keep_every_steps = keep_every_steps
        self._on_damage = on_damage
        self._disk = disk or Disk()
        self._ranks = ranks or HostGroup()
        self.folder = folder
        self._verified: set[int] = set()  # steps that this run wrote, or that this process has verified
        self.clean_up()
        if self._ranks.world > 1:
            self._check_shared()

    def clean_up(self) -> None:
        """Remove what an interrupted save or removal left behind; there must be no other writer. Collective."""
        self._ranks.run_on_rank0(self._open)

    def _open(self) -> None:
        with storage_errors("cannot keep checkpoints", self.root):
            make_checkpoints_folder(self._disk, self.root, self.folder)
        clean_up(self._disk, self.root)

    def _check_shared(self) -> None:
        # The path may be local to each machine, so rank 0 creates a folder there, and all have to see it.
        probe = self.root / self._ranks.run_on_rank0(self._make_probe)
        try:
            self._ranks.run_on_all(lambda: self._check_visible(probe))
        finally:
            if self._ranks.is_first:
                self._disk.discard(probe)

    def _make_probe(self) -> str:
        name = f"{STAGING_PREFIX}{secrets.token_hex(8)}"  # a prefix whose leftovers the next opening removes
        with storage_errors("cannot keep checkpoints", self.root):
            self._disk.make_folder(self.root / name)
        return name

    def _check_visible(self, probe: Path) -> None:
        if not probe.is_dir():
            here = f"rank {self._ranks.rank} on {socket.gethostname()}"
            raise StorageError(
                f"{self.root}: {here} does not see what rank 0 writes there. "
                "All processes write to the same checkpoint folder: set run.dir to a folder on a file system that all "
                "machines of the run share, under the same path."
            )

    def save(
        self,
        step: int,
        chunks: Sequence[TensorChunk],
        meta: Mapping[str, Any],
        files: Mapping[str, Path] | None = None,
    ) -> Path:
        """Write the checkpoint of a step, replacing one of the same step, and return its folder.

        ``chunks`` are those of this rank; ``meta`` has JSON values; ``files``: path inside the checkpoint -> file to
        copy. StorageError if a rank failed: no incomplete checkpoint is left, and earlier ones are unchanged.
        """
        return self._commit(CheckpointContent(step, chunks, meta, files or {}))

    def save_from_parts(self, step: int, parts: Sequence[PartCopy], meta: Mapping[str, Any]) -> Path:
        """Write a checkpoint from rank parts, each passed by one rank; CheckpointError if a part is damaged."""
        return self._commit(CheckpointContent(step, [], meta, {}, parts))

    def _commit(self, content: CheckpointContent) -> Path:
        final = self.root / step_folder_name(content.step)
        commit(self._disk, final, content, ranks=self._ranks, folder=self.folder)
        self._verified.add(content.step)
        return final

    def steps(self) -> list[int]:
        """Steps that have a checkpoint folder, ascending; not verified."""
        return [_step_of(folder) for folder in step_folders(self.root)]

    def newest(self, require_step: int | None = None) -> Checkpoint | None:
        """Open the newest valid checkpoint; None if there never was one. Damaged newer ones get the suffix ``.bad``.

        With ``require_step`` it must be of that step, with no damaged one after it, and nothing is renamed.
        CheckpointError if none is valid (starting over silently would hide the loss), or if it is of another step.
        """
        if require_step is not None:
            return self.open(self._ranks.run_on_rank0(lambda: self._find_required(require_step)))
        step = self.newest_step()
        if step is None:
            self._ranks.run_on_rank0(self._refuse_to_start_over)
            return None
        return self.open(step)

    def newest_step(self) -> int | None:
        """Find the step of the newest valid checkpoint, or None; damaged newer ones are renamed as in ``newest``."""
        return self._ranks.run_on_rank0(self._find_newest)

    def open(self, step: int) -> Checkpoint:
        """Open the checkpoint of a step on all ranks; the caller knows that it is valid."""
        return open_on_all_ranks(self.root / step_folder_name(step), self._ranks)

    def _find_newest(self) -> int | None:
        for folder in reversed(step_folders(self.root)):
            problems = verify_checkpoint(folder)
            if not problems:
                self._verified.add(_step_of(folder))
                return _step_of(folder)
            self._on_damage(self._set_aside(folder), problems)
        return None

    def _refuse_to_start_over(self) -> None:
        damaged = sorted(path.name for path in self.root.iterdir() if BAD_SUFFIX in path.suffixes)
        if damaged:
            raise CheckpointError(
                f"{self.root}: no checkpoint is valid; set aside as damaged: {', '.join(damaged)}. "
                "Restore one from a copy, or remove them (or use another run.dir) to start over from step 0."
            )

    def _find_required(self, step: int) -> int:
        found: list[str] = []
        for folder in reversed(step_folders(self.root)):
            if _step_of(folder) < step:
                break
            problems = verify_checkpoint(folder)
            if not problems and _step_of(folder) == step and not found:
                self._verified.add(step)
                return step
            found.append(f"{folder.name}: {'; '.join(problems) or 'valid'}")
        others = [path.name for path in step_folders(self.root) if _step_of(path) < step]
        earlier = f"earlier checkpoints: {', '.join(others)}" if others else "there is no earlier checkpoint"
        raise CheckpointError(
            "\n  ".join(
                [f"{self.root}: the newest checkpoint is not of step {step}, which --require-step demands:", *found]
            )
            + f"\n{earlier}. Without --require-step the newest valid one is taken, and damaged ones are set aside."
        )

    def prune(self) -> list[int]:
        """Remove the checkpoints that ``prunable_steps`` names, and return their steps; those left are complete."""
        return self._ranks.run_on_rank0(self._prune)

    def _prune(self) -> list[int]:
        removed = prunable_steps(self.steps(), self.keep_last, self.keep_every_steps, self._is_valid)
        removed = [step for step in removed if not is_kept(self.root / step_folder_name(step))]
        with storage_errors("cannot remove an old checkpoint", self.root):
            # Oldest first: an interruption leaves the newer ones.
            for step in removed:
                remove_checkpoint(self._disk, self.root / step_folder_name(step))
        return removed

    def _is_valid(self, step: int) -> bool:
        if step not in self._verified and not verify_checkpoint(self.root / step_folder_name(step)):
            self._verified.add(step)
        return step in self._verified

    def _set_aside(self, folder: Path) -> Path:
        # A checkpoint of a newer format may be valid: only a version that can read it may judge.
        refuse_newer_format(folder)
        target = folder.with_name(folder.name + BAD_SUFFIX)
        count = 1
        # The same step may have been set aside before; nothing is lost.
        while target.exists():
            count += 1
            target = folder.with_name(f"{folder.name}{BAD_SUFFIX}.{count}")
        with storage_errors(f"cannot set aside the damaged checkpoint {folder.name}", self.root):
            self._disk.rename(folder, target)
            # Durable now: the run goes on and may write this step again.
            self._disk.sync_folder(self.root)
        return target


def prunable_steps(
    steps: Sequence[int], keep_last: int, keep_every_steps: int | None, is_valid: Callable[[int], bool]
) -> list[int]:
    """Steps whose checkpoints the retention rule removes; ``steps`` are those of all checkpoints, ascending.

    It keeps the last ``keep_last`` checkpoints, those at multiples of ``keep_every_steps``, and the newest valid one
    with all after it. ``is_valid`` is called from the newest step downwards, up to the first valid one.
    """
    old = [step for step in steps[:-keep_last] if not keep_every_steps or step % keep_every_steps]
    if not old:
        return []
    newest = next((step for step in reversed(steps) if is_valid(step)), old[0])  # no valid one: nothing is removed
    return [step for step in old if step < newest]


def _step_of(folder: Path) -> int:
    match = STEP_FOLDER.fullmatch(folder.name)
    assert match is not None, "only step folders are listed"
    return int(match[1])


_LONGEST_PAUSE = 60.0  # seconds


@dataclass(frozen=True)
class FailedAttempt:
    """A failed attempt to save that is followed by another attempt."""

    step: int
    attempts: int  # number of attempts so far
    message: str


@sendable
@dataclass(frozen=True)
class SaveResult:
    """Final outcome of a save, after all attempts."""

    step: int
    path: Path | None  # None if the save failed
    seconds: float  # until the checkpoint was durable or the save gave up, including pauses
    attempts: int
    message: str = ""  # why the save failed, or why old checkpoints could not be removed


FailureHandler = Callable[[FailedAttempt], None]
"""Called with every failed attempt that is followed by another one."""

Pause = Callable[[float], bool]
"""Waits for a number of seconds; returns True for another attempt, the same on all ranks."""


def sleep(seconds: float) -> bool:
    """Sleep, then ask for another attempt."""
    with blocking_call():
        time.sleep(seconds)
    return True


def save_with_retries(
    store: CheckpointStore,
    content: CheckpointContent,
    retries: int,
    on_failure: FailureHandler,
    pause: Pause = sleep,
    clock: Callable[[], float] = time.monotonic,
) -> SaveResult:
    """Save a checkpoint, retrying if the storage fails, then remove old checkpoints by the retention rule. Collective.

    At most ``retries`` attempts follow the first one, after pauses of 1, 2, 4, ... seconds, at most a minute. A failed
    attempt that another one follows goes to ``on_failure``.
    """
    begin, attempts = clock(), 0
    while True:
        attempts += 1
        try:
            path = store.save(content.step, content.chunks, content.meta, content.files)
        except StateLostError as error:
            # The run folder is gone or replaced: no attempt could succeed.
            return SaveResult(content.step, None, clock() - begin, attempts, str(error))
        except StorageError as error:
            message = str(error)
        else:
            return SaveResult(content.step, path, clock() - begin, attempts, _prune_or_message(store))
        if attempts > retries:
            break
        on_failure(FailedAttempt(content.step, attempts, message))
        if not pause(min(2.0 ** (attempts - 1), _LONGEST_PAUSE)):
            break
    return SaveResult(content.step, None, clock() - begin, attempts, message)


def _prune_or_message(store: CheckpointStore) -> str:
    try:
        # The new checkpoint is durable in any case, so a failure here does not fail the save.
        store.prune()
    except StorageError as error:
        return str(error)
    return ""
