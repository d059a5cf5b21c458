"""Snapshots on the machines of a run, more frequent than its checkpoints: each rank keeps its own part.

    <dir>/<run>/step-00000025.<token>/rank-00003/          the parts of this machine's ranks
    <dir>/<run>/peer/step-00000025.<token>/rank-00001/     those that it keeps for another machine

    write(state)   -> a part of every rank, and with ``replicate`` a copy of each on the next machine
    promote(store) -> the newest snapshot of which every part is whole somewhere becomes a checkpoint of the run

Promoted, it is a checkpoint like any other: it loads into any layout and any number of processes. Nothing is shared
between machines, so a part that is damaged or gone is replaced by its copy, or its whole snapshot is passed over.

Two snapshots are kept, one while another is written, so that a machine needs room for two of its parts, and for as many
of the next machine's. What is about to be written never has the name of what was: parts of two attempts cannot mix.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from hlat.checkpoint.format import Disk, Remedy, TensorChunk, make_folders, storage_error
from hlat.checkpoint.protocol import (
    BAD_SUFFIX,
    STAGING_PREFIX,
    TRASH_PREFIX,
    CheckpointStore,
    DamageHandler,
    PartCopy,
    RankPart,
    log_damage,
    part_folder_name,
    read_part,
    remove_checkpoint,
    step_folder_name,
    verify_part,
    write_part,
)
from hlat.checkpoint.tiers.replication import next_in_ring, replicate
from hlat.checkpoint.tiers.run_id import RunId
from hlat.runtime import CheckpointError, LaunchError
from hlat.runtime.distributed import HostGroup

_SNAPSHOT = re.compile(r"step-\d{8,}\.[0-9a-f]{16}")
_PART = re.compile(r"rank-\d{5,}")
_PEER, _MACHINE = "peer", ".machine-"
_LOCAL_REMEDY = Remedy("set checkpoint.local.dir to another folder", less=", or leave checkpoint.local out")

T = TypeVar("T")


@dataclass(frozen=True)
class _Found:
    """A part on this machine; one with problems says nothing of itself that could be relied on."""

    name: str  # of its snapshot
    folder: Path
    part: RankPart
    problems: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> "_Found":
        """What a folder says of itself."""
        try:
            part = read_part(folder)
            if (f"{step_folder_name(part.step)}.{part.token}", part_folder_name(part.rank)) != (
                folder.parent.name,
                folder.name,
            ):
                raise CheckpointError(f"its content is of step {part.step}, rank {part.rank}")
        except CheckpointError as error:
            return cls(folder.parent.name, folder, RankPart("", 0, 0, 0, {}, [], None), (str(error),))
        return cls(folder.parent.name, folder, part)

    def verified(self) -> "_Found":
        """The same, after every byte was compared."""
        return replace(self, problems=tuple(verify_part(self.folder, self.part)))


class SnapshotTier:
    """The snapshots of one run, for its processes. Its methods are collective.

    Attributes:
        note: what the user should know of the copies; empty if nothing.
    """

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

        Args:
            folder: on each machine; {node} in it becomes the machine's number.
            ranks: the processes of the run.
            owner: the run; that of rank 0 counts.
            node: the number of this machine.
            copies: whether each part is kept by another machine too.
            on_damage: told, on rank 0, of each damaged part: where it lies now, and what is wrong with it.
            disk: the file system's operations.

        Raises:
            StorageError: the folder cannot be made or cleaned.
            LaunchError: several machines share it.
        """
        self._ranks, self._disk, self._on_damage = ranks, disk or Disk(), on_damage
        self._home = Path(folder.replace("{node}", str(node))) / ranks.run_on_rank0(run_id.snapshot_key)
        nodes = ranks.all_gather(node)
        self._here = [rank for rank, other in enumerate(nodes) if other == node]
        self._leads = self._here[0] == ranks.rank
        self._keepers = next_in_ring(nodes) if copies and len(set(nodes)) > 1 else []
        self._complete: list[str] = []  # names of snapshots whose parts are all there, oldest first
        alone = copies and not self._keepers
        self.warning = "snapshots stay on this machine only: the run has no other one to keep copies" if alone else ""
        self._each(self._open)
        if len(set(nodes)) > 1:
            self._refuse_shared(nodes)

    def write(
        self, step: int, chunks: Sequence[TensorChunk], meta: Mapping[str, Any], files: Mapping[str, Path] | None = None
    ) -> str:
        """Write a snapshot. Arguments are those of ``CheckpointStore.save``.

        Returns:
            The name of the snapshot.

        Raises:
            StorageError: a disk refused, on whichever rank. The last complete snapshot is untouched.
        """
        first, rank = self._ranks.is_first, self._ranks.rank
        token = self._ranks.run_on_rank0(lambda: secrets.token_hex(8))
        name = f"{step_folder_name(step)}.{token}"
        part = RankPart(token, step, rank, self._ranks.world, {}, [], meta if first else None)
        own = self._home / name / part_folder_name(rank)
        mine = [chunk for chunk in chunks if first or not chunk.replicated]
        self._forget_all_but([*self._complete[-1:], name])  # which other ranks may have begun
        try:
            part, text = self._each(lambda: write_part(self._disk, own, part, mine, (files or {}) if first else {}))
            if self._keepers:
                self._each(
                    lambda: replicate(self._disk, self._ranks, self._keepers, (own, part, text), self._kept(name))
                )
        except BaseException:
            self._discard(name)
            raise
        self._complete = [*self._complete[-1:], name]
        return name

    def promote(self, store: CheckpointStore, newer_than: int | None) -> int | None:
        """Make a checkpoint of the newest snapshot that is whole, if it is of a later step.

        Damaged parts are renamed to ``<name>.bad`` and reported.

        Args:
            store: gets the checkpoint.
            than: the step of the newest checkpoint; None if there is none.

        Returns:
            The step of the snapshot; None if there was none that is whole and newer.

        Raises:
            StorageError: the disk refused.
        """
        found = self._without_damage(self._each(self._find))
        seen = self._ranks.all_gather([(one.name, one.part.step, one.part.world, one.part.rank) for one in found])
        parts: dict[tuple[str, int, int], set[int]] = {}
        for name, step, world, rank in (entry for told in seen for entry in told):
            parts.setdefault((name, step, world), set()).add(rank)
        complete = sorted((step, name) for (name, step, world), ranks in parts.items() if ranks == set(range(world)))
        self._complete = [name for _, name in complete[-2:]]
        for step, name in reversed(complete):
            if newer_than is not None and step <= newer_than:
                return None
            if self._promote(store, [one for one in found if one.name == name]):
                return step
        return None

    def clear(self) -> None:
        """Remove all snapshots of the run: a checkpoint of its last step is durable."""
        self._ranks.barrier()
        self._forget_all_but([])
        self._complete = []

    # --- writing ---------------------------------------------------------------------------------------------------

    def _kept(self, name: str) -> Callable[[int], Path]:
        return lambda rank: self._home / _PEER / name / part_folder_name(rank)

    def _discard(self, name: str) -> None:
        """Remove what this rank wrote of a snapshot that failed, as far as the disk allows."""
        sources = [rank for rank, keeper in enumerate(self._keepers) if keeper == self._ranks.rank]
        parts = [self._home / name / part_folder_name(self._ranks.rank), *(self._kept(name)(rank) for rank in sources)]
        for part in parts:
            self._disk.discard(part.with_name(STAGING_PREFIX + part.name))
            if part.exists():
                with suppress(OSError):
                    remove_checkpoint(self._disk, part)

    def _forget_all_but(self, kept: Iterable[str]) -> None:
        """Remove the other snapshots of this machine; what the disk does not let go is tried again the next time."""
        if not self._leads:
            return
        for folder in (self._home, self._home / _PEER):
            for path in _listed(folder):
                if _SNAPSHOT.fullmatch(path.name) and path.name not in kept:
                    with suppress(OSError):
                        remove_checkpoint(self._disk, path)

    # --- reading ---------------------------------------------------------------------------------------------------

    def _find(self) -> list[_Found]:
        """The parts on this machine that this rank answers for: they are shared out among the machine's ranks."""
        folders = [
            part
            for place in (self._home, self._home / _PEER)
            for snapshot in _listed(place)
            if _SNAPSHOT.fullmatch(snapshot.name)
            for part in _listed(snapshot)
            if _PART.fullmatch(part.name)
        ]
        return [_Found.read(folder) for folder in folders[self._here.index(self._ranks.rank) :: len(self._here)]]

    def _without_damage(self, found: Iterable[_Found]) -> list[_Found]:
        """Those that have no problem; the others are set aside and reported. Collective."""
        found = list(found)
        damaged = self._each(lambda: [(self._set_aside(one.folder), one.problems) for one in found if one.problems])
        for told in self._ranks.all_gather(damaged):
            for path, problems in told if self._ranks.is_first else ():
                self._on_damage(path, list(problems))
        return [one for one in found if not one.problems]

    def _set_aside(self, folder: Path) -> Path:
        target = folder.with_name(folder.name + BAD_SUFFIX)
        self._disk.remove_tree(target)
        self._disk.rename(folder, target)
        return target

    def _promote(self, store: CheckpointStore, found: Iterable[_Found]) -> bool:
        """Make a checkpoint of a snapshot, from the parts of it that this rank answers for."""
        whole = self._without_damage(self._each(lambda: [one.verified() for one in found]))
        holders: dict[int, int] = {}
        for holder, ranks in enumerate(self._ranks.all_gather([one.part.rank for one in whole])):
            for rank in ranks:
                holders.setdefault(rank, holder)
        mine = {one.part.rank: one for one in whole if holders[one.part.rank] == self._ranks.rank}
        told = self._ranks.all_gather(mine[0].part if 0 in mine else None)
        head = next((part for part in told if part is not None), None)
        if head is None or set(holders) != set(range(head.world)):
            return False
        assert head.meta is not None, "rank 0's part has it"
        store.save_from_parts(head.step, [PartCopy(one.folder, one.part) for _, one in sorted(mine.items())], head.meta)
        return True

    # --- the folder ------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        if not self._leads:
            return
        make_folders(self._disk, self._home)
        for path in (self._home, self._home / _PEER):
            for entry in _listed(path):
                if entry.name.startswith((TRASH_PREFIX, _MACHINE)):
                    self._disk.remove_tree(entry)
                elif _SNAPSHOT.fullmatch(entry.name):
                    for part in _listed(entry):
                        if part.name.startswith((STAGING_PREFIX, TRASH_PREFIX)):
                            self._disk.remove_tree(part)

    def _refuse_shared(self, nodes: Sequence[int]) -> None:
        """Copies in a folder that all machines share would be lost with it, and its parts removed by each of them."""
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
            self._ranks.run_on_all(lambda: _refuse(self._home.parent, [nodes[self._ranks.rank], *shared]))
        finally:
            if token:
                self._disk.discard(mark)

    def _each(self, action: Callable[[], T]) -> T:
        """Do something on every rank, with the disk's refusals as what users see."""
        return self._ranks.run_on_all(lambda: self._translated(action))

    def _translated(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except OSError as exc:
            raise storage_error(exc, "cannot keep snapshots", self._home, remedy=_LOCAL_REMEDY) from exc


def _refuse(folder: Path, machines: Sequence[int]) -> None:
    if len(machines) > 1:
        numbers = " and ".join(map(str, sorted(machines)))
        raise LaunchError(
            f"checkpoint.local.dir {folder}: machines {numbers} share this folder. Name one on a disk, or in the "
            "memory, of each machine, or put {node} into the path."
        )


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
