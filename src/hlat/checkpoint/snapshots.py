"""Snapshots on the local disks of a run's machines, more frequent than checkpoints: each rank stores its own part.

    <dir>/<run>/step-00000025.<token>/rank-00003/          parts of this machine's ranks
    <dir>/<run>/peer/step-00000025.<token>/rank-00001/     copies of parts of another machine's ranks

    write(state)   -> a part per rank, and with ``replicate`` a copy of each part on the next machine
    promote(store) -> the newest snapshot with a valid copy of every part becomes a checkpoint of the run

A promoted snapshot is a checkpoint like any other: it can be loaded into any layout and any number of processes.
Machines share no files, so a part that is damaged or lost is replaced by its copy; without one, the snapshot is
skipped.

Two snapshots are kept, the older one until the next is complete. So a machine needs space for two of its parts, and for
two parts of each rank whose copies it stores. Every snapshot has a new token in its name, so parts of two attempts
cannot be mixed.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from hlat.checkpoint.format.filesystem import Disk, Remedy, make_folders, storage_errors
from hlat.checkpoint.format.tensor_files import TensorChunk
from hlat.checkpoint.protocol.commit import TRASH_PREFIX, remove_checkpoint
from hlat.checkpoint.protocol.rank_parts import (
    PartCopy,
    RankPart,
    next_in_ring,
    part_folder_name,
    read_part,
    replicate,
    verify_part,
    write_part,
)
from hlat.checkpoint.protocol.reader import STAGING_PREFIX, step_folder_name
from hlat.checkpoint.protocol.store import BAD_SUFFIX, CheckpointStore, DamageHandler, log_damage
from hlat.checkpoint.run_id import RunId
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.errors import CheckpointError, LaunchError
from hlat.runtime.terminal import listed

_SNAPSHOT = re.compile(r"step-\d{8,}\.[0-9a-f]{16}")
_PART = re.compile(r"rank-\d{5,}")
_PEER, _MACHINE = "peer", ".machine-"
# The remedies of checkpoints name run.dir, which does not help here.
_LOCAL_REMEDY = Remedy("set checkpoint.local.dir to another folder", less=", or leave checkpoint.local out")

T = TypeVar("T")


@dataclass(frozen=True)
class _FoundPart:
    """A rank part found on this machine. If it has problems, its content must not be used."""

    name: str  # name of its snapshot
    folder: Path
    part: RankPart
    problems: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> "_FoundPart":
        """Read the manifest of a part's folder; problems are stored in the result."""
        try:
            part = read_part(folder)
            # A folder copied by hand to another name would be taken for another state.
            names = f"{step_folder_name(part.step)}.{part.token}", part_folder_name(part.rank)
            if names != (folder.parent.name, folder.name):
                raise CheckpointError(f"its content is of step {part.step}, rank {part.rank}")
        except CheckpointError as error:
            # A placeholder: nothing of a damaged part is used but its folder.
            return cls(folder.parent.name, folder, RankPart("", 0, 0, 0, {}, [], None), (str(error),))
        return cls(folder.parent.name, folder, part)

    def verified(self) -> "_FoundPart":
        return replace(self, problems=tuple(verify_part(self.folder, self.part)))


class SnapshotTier:
    """The snapshots of one run, for its processes. All methods are collective."""

    def __init__(
        self,
        folder: str,
        ranks: HostGroup,
        run_id: RunId,
        node: int,
        *,
        copies: bool = True,
        on_damage: DamageHandler = log_damage,
        disk: Disk | None = None,
    ) -> None:
        """Open the tier, and remove what an interrupted write left behind.

        ``{node}`` in ``folder`` becomes the number of the machine. ``copies``: another machine stores a copy of each
        part. ``on_damage`` is called on rank 0 for each damaged part. StorageError if the folder cannot be created or
        cleaned, LaunchError if several machines share it.
        """
        self._ranks, self._disk, self._on_damage = ranks, disk or Disk(), on_damage
        self._home = Path(folder.replace("{node}", str(node))) / ranks.run_on_rank0(run_id.snapshot_key)
        nodes = ranks.all_gather(node)
        self._here = [rank for rank, other in enumerate(nodes) if other == node]
        self._leads = self._here[0] == ranks.rank  # cleans up for all ranks of its machine
        self._keepers = next_in_ring(nodes) if copies and len(set(nodes)) > 1 else []
        self._complete: list[str] = []  # names of complete snapshots, oldest first
        self.warning = ""  # for the user: copies were asked for, and there is no other machine
        if copies and not self._keepers:
            self.warning = "snapshots are stored on this machine only: the run has no other machine for copies"
        self._each(self._open)
        if len(set(nodes)) > 1:
            self._check_not_shared(nodes)

    def write(
        self, step: int, chunks: Sequence[TensorChunk], meta: Mapping[str, Any], files: Mapping[str, Path] | None = None
    ) -> str:
        """Write a snapshot and return its name; after a StorageError the last complete one is unchanged."""
        first, rank = self._ranks.is_first, self._ranks.rank
        # A new one for each attempt: parts of two attempts at a step must not be combined.
        token = self._ranks.run_on_rank0(lambda: secrets.token_hex(8))
        name = f"{step_folder_name(step)}.{token}"
        part = RankPart(token, step, rank, self._ranks.world, {}, [], meta if first else None)
        own = self._home / name / part_folder_name(rank)
        mine = [chunk for chunk in chunks if first or not chunk.replicated]
        self._remove_all_except([*self._complete[-1:], name])  # other ranks may have begun to write ``name``
        try:
            part, text = self._each(lambda: write_part(self._disk, own, part, mine, (files or {}) if first else {}))
            if self._keepers:
                copy = (own, part, text), self._copy_folder(name)
                self._each(lambda: replicate(self._disk, self._ranks, self._keepers, *copy))
        # Also on Ctrl-C: half a snapshot would take the space of the next one.
        except BaseException:
            self._discard(name)
            raise
        self._complete = [*self._complete[-1:], name]
        return name

    def promote(self, store: CheckpointStore, newer_than: int | None) -> int | None:
        """Convert the newest valid snapshot to a checkpoint, if newer than step ``newer_than``; return its step.

        None if there is no such snapshot. Damaged parts are renamed to ``<name>.bad`` and reported.
        """
        found = self._without_damage(self._each(self._find))
        gathered = self._ranks.all_gather([(it.name, it.part.step, it.part.world, it.part.rank) for it in found])
        parts: dict[tuple[str, int, int], set[int]] = {}
        for name, step, world, rank in (key for of_rank in gathered for key in of_rank):
            parts.setdefault((name, step, world), set()).add(rank)
        # Only snapshots with every part on some machine; their bytes are verified in _promote.
        complete = sorted((step, name) for (name, step, world), ranks in parts.items() if ranks == set(range(world)))
        self._complete = [name for _, name in complete[-2:]]
        for step, name in reversed(complete):
            if newer_than is not None and step <= newer_than:
                return None
            if self._promote(store, [it for it in found if it.name == name]):
                return step
        return None

    def clear(self) -> None:
        """Remove all snapshots of the run, after the checkpoint of its last step is durable."""
        self._ranks.barrier()
        self._remove_all_except([])
        self._complete = []

    # --- writing ---------------------------------------------------------------------------------------------------

    def _copy_folder(self, name: str) -> Callable[[int], Path]:
        return lambda rank: self._home / _PEER / name / part_folder_name(rank)

    def _discard(self, name: str) -> None:
        # Errors are ignored: the disk may be the reason of the failure.
        sources = [rank for rank, keeper in enumerate(self._keepers) if keeper == self._ranks.rank]
        own = self._home / name / part_folder_name(self._ranks.rank)
        for part in (own, *map(self._copy_folder(name), sources)):
            self._disk.discard(part.with_name(STAGING_PREFIX + part.name))
            if part.exists():
                with suppress(OSError):
                    remove_checkpoint(self._disk, part)

    def _remove_all_except(self, kept: Iterable[str]) -> None:
        if not self._leads:
            return
        for folder in (self._home, self._home / _PEER):
            for path in _list_folder(folder):
                if _SNAPSHOT.fullmatch(path.name) and path.name not in kept:
                    # Failures are ignored: it is tried again at the next snapshot.
                    with suppress(OSError):
                        remove_checkpoint(self._disk, path)

    # --- reading ---------------------------------------------------------------------------------------------------

    def _find(self) -> list[_FoundPart]:
        """List this rank's share of the parts on this machine, which its ranks divide among themselves."""
        folders = [
            part
            for folder in (self._home, self._home / _PEER)
            for snapshot in _list_folder(folder)
            if _SNAPSHOT.fullmatch(snapshot.name)
            for part in _list_folder(snapshot)
            if _PART.fullmatch(part.name)
        ]
        return [_FoundPart.read(folder) for folder in folders[self._here.index(self._ranks.rank) :: len(self._here)]]

    def _without_damage(self, found: Iterable[_FoundPart]) -> list[_FoundPart]:
        """Filter out the damaged parts, which are renamed and reported. Collective."""
        found = list(found)
        damaged = self._each(lambda: [(self._set_aside(part.folder), part.problems) for part in found if part.problems])
        for of_rank in self._ranks.all_gather(damaged):
            for path, problems in of_rank if self._ranks.is_first else ():
                self._on_damage(path, list(problems))
        return [part for part in found if not part.problems]

    def _set_aside(self, folder: Path) -> Path:
        target = folder.with_name(folder.name + BAD_SUFFIX)
        self._disk.remove_tree(target)
        self._disk.rename(folder, target)
        return target

    def _promote(self, store: CheckpointStore, found: Iterable[_FoundPart]) -> bool:
        """Convert a snapshot to a checkpoint; return False if a part has no valid copy on any rank."""
        valid = self._without_damage(self._each(lambda: [it.verified() for it in found]))
        holders: dict[int, int] = {}
        for holder, ranks in enumerate(self._ranks.all_gather([it.part.rank for it in valid])):
            for rank in ranks:
                # A part and its copy may both be valid: the first rank that has one writes it.
                holders.setdefault(rank, holder)
        mine = {it.part.rank: it for it in valid if holders[it.part.rank] == self._ranks.rank}
        gathered = self._ranks.all_gather(mine[0].part if 0 in mine else None)
        head = next((part for part in gathered if part is not None), None)
        if head is None or set(holders) != set(range(head.world)):
            return False
        assert head.meta is not None, "rank 0's part has it"
        copies = [PartCopy(it.folder, it.part) for _, it in sorted(mine.items())]
        store.save_from_parts(head.step, copies, head.meta)
        return True

    # --- the folder ------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        if not self._leads:
            return
        make_folders(self._disk, self._home)
        for path in (self._home, self._home / _PEER):
            for entry in _list_folder(path):
                if entry.name.startswith((TRASH_PREFIX, _MACHINE)):
                    self._disk.remove_tree(entry)
                elif _SNAPSHOT.fullmatch(entry.name):
                    for part in _list_folder(entry):
                        if part.name.startswith((STAGING_PREFIX, TRASH_PREFIX)):
                            self._disk.remove_tree(part)

    def _check_not_shared(self, nodes: Sequence[int]) -> None:
        # Each machine would remove the parts of the others. So each leaves a mark of its own, and looks for theirs.
        token = secrets.token_hex(8) if self._leads else ""
        mark = self._home / f"{_MACHINE}{token}"
        self._each(lambda: self._disk.make_folder(mark) if token else None)
        others = {
            node: mark
            for node, mark in zip(nodes, self._ranks.all_gather(token), strict=True)
            if mark and node != nodes[self._ranks.rank]
        }
        shared = [node for node, other in others.items() if (self._home / f"{_MACHINE}{other}").exists()]
        try:
            self._ranks.run_on_all(lambda: _raise_if_shared(self._home.parent, [nodes[self._ranks.rank], *shared]))
        finally:
            if token:
                self._disk.discard(mark)

    def _each(self, action: Callable[[], T]) -> T:
        """Run an action on every rank; an OSError becomes a StorageError on all of them."""
        failing = storage_errors("cannot store snapshots", self._home, remedy=_LOCAL_REMEDY)
        return self._ranks.run_on_all(failing(action))


def _raise_if_shared(folder: Path, machines: Sequence[int]) -> None:
    if len(machines) > 1:
        numbers = listed(sorted(machines))
        raise LaunchError(
            f"checkpoint.local.dir {folder}: machines {numbers} share this folder. Use a folder on a local "
            "disk, or in the memory, of each machine, or put {node} into the path."
        )


def _list_folder(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
