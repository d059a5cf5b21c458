"""The checkpoints of one run: save, find the newest whole one, keep some, drop the rest.

save(step, state) -> step-00000040/            (commit.py says how it becomes visible)
newest()          -> the newest that verifies; damaged ones are named and renamed aside on the way
prune()           -> keeps the last k, every n-th step for ever, and always a verified one

All ranks of a run share a store. Rank 0 looks, decides, renames and removes; every rank is told the outcome.
"""

import logging
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hlat.checkpoint.format import Disk, TensorChunk, make_checkpoints_folder, storage_error
from hlat.checkpoint.protocol.commit import CheckpointContent, clean_up, commit, remove_checkpoint
from hlat.checkpoint.protocol.manifest import STAGING_PREFIX, STEP_FOLDER, step_folder_name, verify
from hlat.checkpoint.protocol.rank_parts import PartCopy
from hlat.checkpoint.protocol.reader import Checkpoint, open_on_all_ranks, step_folders
from hlat.runtime import CheckpointError, StorageError
from hlat.runtime.distributed import HostGroup
from hlat.runtime.storage import RunFolder

_LOG = logging.getLogger(__name__)

BAD_SUFFIX = ".bad"

DamageHandler = Callable[[Path | str, list[str]], None]
"""Told where something damaged lies now, a folder or a URL, and what is wrong with it."""


def log_damage(folder: Path | str, problems: list[str]) -> None:
    """Log a warning."""
    _LOG.warning("checkpoint %s is damaged and set aside: %s", folder, "; ".join(problems))


class CheckpointStore:
    """The checkpoints folder of a run, for the processes of that run. Its methods, but for ``steps``, are collective.

    Opening it removes what an interrupted save or removal left behind; so there must be no second writer (training
    holds the run's lock). To read a run that is being trained use ``resolve`` and ``load_model``.
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
        """Open the store, creating its folder.

        Args:
            root: the folder.
            keep_last: how many of the newest checkpoints ``prune`` keeps.
            keep_every_steps: checkpoints at multiples of this are kept for ever; None for no such rule.
            on_damage: told, on rank 0, the new name of each damaged checkpoint that was set aside, and what is wrong
                with it; by default a warning is logged.
            disk: the file system's operations; another one for another kind of storage.
            ranks: the processes of the run; None for this one alone.
            folder: of the run, held: nothing is written once it is gone. None for a store outside of any run.

        Raises:
            StorageError: the folder cannot be created or cleaned, the run's is gone, or the ranks do not share it.
        """
        self.root = Path(root)
        self.keep_last = keep_last
        self.keep_every_steps = keep_every_steps
        self._on_damage = on_damage
        self._disk = disk or Disk()
        self._ranks = ranks or HostGroup()
        self.folder = folder
        self._verified: set[int] = set()  # steps that were written by this run, or read in full by this process
        self.clean_up()
        if self._ranks.world > 1:
            self._see_that_it_is_shared()

    def clean_up(self) -> None:
        """Remove what an interrupted save or removal left behind. Collective; there must be no other writer.

        Raises:
            StorageError: the folder cannot be created or cleaned, or that of the run is gone.
        """
        self._ranks.run_on_rank0(self._open)

    def _open(self) -> None:
        try:
            make_checkpoints_folder(self._disk, self.root, self.folder)
        except OSError as exc:
            raise storage_error(exc, "cannot keep checkpoints", self.root) from exc
        clean_up(self._disk, self.root)

    def _see_that_it_is_shared(self) -> None:
        """Each machine may have a folder of this name: what rank 0 makes now has to be there for every rank."""
        probe = self.root / self._ranks.run_on_rank0(self._make_probe)
        try:
            self._ranks.run_on_all(lambda: self._see(probe))
        finally:
            if self._ranks.is_first:
                self._disk.discard(probe)

    def _make_probe(self) -> str:
        name = f"{STAGING_PREFIX}{secrets.token_hex(8)}"  # as a leftover, it is removed at the next open
        try:
            self._disk.make_folder(self.root / name)
        except OSError as exc:
            raise storage_error(exc, "cannot keep checkpoints", self.root) from exc
        return name

    def _see(self, probe: Path) -> None:
        if not probe.is_dir():
            here = f"rank {self._ranks.rank} on {socket.gethostname()}"
            raise StorageError(
                f"{self.root}: {here} does not see what rank 0 writes there. "
                "All processes write their part of a checkpoint into one folder: set run.dir to one on a file system "
                "that all machines of the run share, under the same path."
            )

    def save(
        self,
        step: int,
        chunks: Sequence[TensorChunk],
        meta: Mapping[str, Any],
        files: Mapping[str, Path] | None = None,
    ) -> Path:
        """Write the checkpoint of a step; one of that step that exists is replaced.

        Args:
            step: optimizer steps done.
            blocks: what this rank has of the tensors; ``collect`` gives them.
            meta: what else defines the run; JSON values only.
            files: path inside the checkpoint -> file to copy there (the tokenizer).

        Returns:
            The folder of the checkpoint.

        Raises:
            StorageError: the disk refused, on whichever rank. Nothing half-written is left, earlier checkpoints are
                untouched.
        """
        final = self.root / step_folder_name(step)
        commit(
            self._disk, final, CheckpointContent(step, chunks, meta, files or {}), ranks=self._ranks, folder=self.folder
        )
        self._verified.add(step)
        return final

    def save_from_parts(self, step: int, parts: Sequence[PartCopy], meta: Mapping[str, Any]) -> Path:
        """Write the checkpoint of a step from parts of a snapshot, each of which one rank gives.

        Raises:
            StorageError: as ``save`` does.
            CheckpointError: a part is no longer what it was.
        """
        final = self.root / step_folder_name(step)
        commit(self._disk, final, CheckpointContent(step, [], meta, {}, parts), ranks=self._ranks, folder=self.folder)
        self._verified.add(step)
        return final

    def steps(self) -> list[int]:
        """Steps that have a checkpoint folder, ascending; ``newest`` and ``verify`` say whether they are whole."""
        return [_step_of(folder) for folder in step_folders(self.root)]

    def newest(self, require_step: int | None = None) -> Checkpoint | None:
        """The newest checkpoint that is whole; None if this run has never had one.

        Every newer one is damaged: it is renamed to ``<name>.bad`` and reported.

        Args:
            require_step: the step that the newest one has to be of, with nothing damaged after it; nothing is renamed
                then. None takes what there is.

        Raises:
            CheckpointError: there were checkpoints and none is whole: starting over silently would bury the loss. Or
                the newest is not of the required step.
            StorageError: the storage cannot be read.
        """
        if require_step is not None:
            return self.open(self._ranks.run_on_rank0(lambda: self._required(require_step)))
        step = self.newest_step()
        if step is None:
            self._ranks.run_on_rank0(self._refuse_to_start_over)
            return None
        return self.open(step)

    def newest_step(self) -> int | None:
        """The step of the newest checkpoint that is whole, damaged ones set aside as ``newest`` does; None if none is.

        Raises:
            StorageError: the storage cannot be read.
        """
        return self._ranks.run_on_rank0(self._find_newest)

    def open(self, step: int) -> Checkpoint:
        """The checkpoint of a step, which is known to be whole."""
        return open_on_all_ranks(self.root / step_folder_name(step), self._ranks)

    def _find_newest(self) -> int | None:
        for folder in reversed(step_folders(self.root)):
            problems = verify(folder)
            if not problems:
                self._verified.add(_step_of(folder))
                return _step_of(folder)
            self._on_damage(self._set_aside(folder), problems)
        return None

    def _refuse_to_start_over(self) -> None:
        damaged = sorted(path.name for path in self.root.iterdir() if BAD_SUFFIX in path.suffixes)
        if damaged:
            raise CheckpointError(
                f"{self.root}: no checkpoint is whole; set aside as damaged: {', '.join(damaged)}. "
                "Restore one from a copy, or remove them (or use another run.dir) to start over from step 0."
            )

    def _required(self, step: int) -> int:
        found: list[str] = []
        for folder in reversed(step_folders(self.root)):
            if _step_of(folder) < step:
                break
            problems = verify(folder)
            if not problems and _step_of(folder) == step and not found:
                self._verified.add(step)
                return step
            found.append(f"{folder.name}: {'; '.join(problems) or 'whole'}")
        others = [path.name for path in step_folders(self.root) if _step_of(path) < step]
        there = f"before it there are {', '.join(others)}" if others else "before it there is none"
        raise CheckpointError(
            "\n  ".join([f"{self.root}: the run would not go on from step {step}, as --require-step asks:", *found])
            + f"\n{there}. Without --require-step the newest whole one is taken, and damaged ones are set aside."
        )

    def prune(self) -> list[int]:
        """Remove the checkpoints that the retention rule does not keep.

        See ``surplus`` for the rule.

        Returns:
            The steps removed.

        Raises:
            StorageError: the disk refused; what was not removed stays whole.
        """
        return self._ranks.run_on_rank0(self._prune)

    def _prune(self) -> list[int]:
        removed = prunable_steps(self.steps(), self.keep_last, self.keep_every_steps, self._is_whole)
        try:
            for step in removed:
                remove_checkpoint(self._disk, self.root / step_folder_name(step))
        except OSError as exc:
            raise storage_error(exc, "cannot remove an old checkpoint", self.root) from exc
        return removed

    def _is_whole(self, step: int) -> bool:
        if step not in self._verified and not verify(self.root / step_folder_name(step)):
            self._verified.add(step)
        return step in self._verified

    def _set_aside(self, folder: Path) -> Path:
        target = folder.with_name(folder.name + BAD_SUFFIX)
        count = 1
        while target.exists():
            count += 1
            target = folder.with_name(f"{folder.name}{BAD_SUFFIX}.{count}")
        try:
            self._disk.rename(folder, target)
            self._disk.sync_folder(self.root)
        except OSError as exc:
            raise storage_error(exc, f"cannot set aside the damaged checkpoint {folder.name}", self.root) from exc
        return target


def prunable_steps(
    steps: Sequence[int], keep_last: int, keep_every_steps: int | None, is_whole: Callable[[int], bool]
) -> list[int]:
    """Which of some checkpoints may go.

    Kept are the last ``keep_last``, every multiple of ``keep_every_steps``, and from the newest that is whole on all.

    Args:
        steps: of all checkpoints, ascending.
        keep_last: how many of the newest stay.
        keep_every_steps: multiples of this stay; None for no such rule.
        is_whole: whether the checkpoint of a step is; asked from the newest on, until one is.
    """
    old = [step for step in steps[:-keep_last] if not keep_every_steps or step % keep_every_steps]
    if not old:
        return []
    newest = next((step for step in reversed(steps) if is_whole(step)), old[0])  # none: nothing is removed
    return [step for step in old if step < newest]


def _step_of(folder: Path) -> int:
    match = STEP_FOLDER.fullmatch(folder.name)
    assert match is not None, "only step folders are listed"
    return int(match[1])
