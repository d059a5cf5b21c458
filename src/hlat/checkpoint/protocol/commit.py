"""The commit protocol: a checkpoint appears whole, at one instant, or not at all.

    rank 0       .staging-<name>-<token>/   is made; each save has a token of its own
    every rank   its tensors        into files of its own, each hashed while written, fsynced; then it reports to rank 0
    rank 0       .metadata          the index, if the blocks of all ranks are every tensor, each element once
                 meta.json, files   hashed and fsynced too
                 manifest.json      sizes and sha256 of all of them
                 COMMITTED          sha256 of the manifest, the last file written
                 fsync of every folder
                 rename .staging-<name>-<token> -> <name>      the instant
                 fsync of the parent folder

After each of these steps the ranks agree on whether it succeeded on all of them. If it did not, none goes on, rank 0
removes the staging folder, and every rank raises the same kind of error. A rank that dies is one that fails: the others
see its connections close.

A crash before the rename leaves a staging folder, which nothing reads and the next open removes. A writer that outlives
its run, and still writes then, finds its folder gone; it never writes into that of another save. When a checkpoint of
that name exists it is first renamed to ``.replaced-<name>`` and removed after the instant; a crash between the two
renames is undone at the next open.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hlat.checkpoint.format import (
    INDEX_NAME,
    META_NAME,
    RUN_REMEDY,
    Disk,
    FileRecord,
    Remedy,
    TensorChunk,
    WriteResult,
    copy_file,
    human_bytes,
    make_checkpoints_folder,
    make_folders,
    storage_error,
    write_chunks,
    write_file,
    write_index,
)
from hlat.checkpoint.protocol.manifest import (
    MANIFEST_NAME,
    MARKER_NAME,
    STAGING_PREFIX,
    CheckpointManifest,
    is_safe_name,
    write_manifest,
)
from hlat.checkpoint.protocol.rank_parts import PartCopy
from hlat.runtime import CheckpointError, StorageError
from hlat.runtime.distributed import HostGroup
from hlat.runtime.storage import RunFolder

REPLACED_PREFIX, TRASH_PREFIX = ".replaced-", ".trash-"

_TOKEN_BYTES = 4
_OVERHEAD_BYTES = 1 << 20  # manifest and the like, generously
_BLOCK_BYTES = 2048  # zip headers and index entry of a block, generously

T = TypeVar("T")


@dataclass(frozen=True)
class CheckpointContent:
    """What goes into a checkpoint.

    Attributes:
        step: optimizer step of the state, 0 for weights alone.
        blocks: of tensors: those of this rank.
        meta: JSON values only; that of rank 0 counts.
        files: path inside the checkpoint -> file to copy there; those of rank 0 count.
        parts: of a snapshot, which this rank adds as they are.
    """

    step: int
    chunks: Sequence[TensorChunk]
    meta: Mapping[str, Any]
    files: Mapping[str, Path]
    parts: Sequence[PartCopy] = ()


def commit(
    disk: Disk,
    final: Path,
    content: CheckpointContent,
    remedy: Remedy = RUN_REMEDY,
    ranks: HostGroup | None = None,
    folder: RunFolder | None = None,
) -> None:
    """Write a checkpoint folder by the protocol above. Collective.

    Args:
        disk: where its operations go.
        final: the folder that is to appear, on a file system that all ranks share.
        content: what this rank has of it.
        way_out: what a user can do when the disk refuses.
        ranks: the processes that write together; None for this one alone.
        folder: of the run that the checkpoint belongs to, in which ``final`` lies; None where it belongs to none, and
            folders above ``final`` that are missing are made.

    Raises:
        LostError: the folder of the run is gone, for whichever rank.
        StorageError: a disk refused, on whichever rank; nothing appeared and nothing is left behind, as far as the disk
            allows.
        CheckpointError: a name in ``files`` leaves the folder.
    """
    _Commit(disk, final, content, remedy, ranks or HostGroup(), folder).run()


class _Commit:
    """One run of the protocol."""

    def __init__(
        self,
        disk: Disk,
        final: Path,
        content: CheckpointContent,
        remedy: Remedy,
        ranks: HostGroup,
        folder: RunFolder | None,
    ) -> None:
        self._disk, self._final, self._content, self._remedy, self._ranks = disk, final, content, remedy, ranks
        self._folder = folder
        token = ranks.broadcast(secrets.token_hex(_TOKEN_BYTES))
        self._staging = final.with_name(f"{STAGING_PREFIX}{final.name}-{token}")
        self._doing = f"cannot save the checkpoint {final.name}"
        self._chunks = [chunk for chunk in content.chunks if ranks.is_first or not chunk.replicated]
        parts = sum(copy.part.bytes for copy in content.parts)
        self._needed = parts + sum(chunk.nbytes + _BLOCK_BYTES for chunk in self._chunks)  # bytes; soon of all ranks

    def run(self) -> None:
        meta = self._together(lambda: self._check() if self._ranks.is_first else b"")
        self._needed = sum(self._ranks.all_gather(self._needed))
        try:
            self._together(self._begin)
            written = self._ranks.gather(self._together(self._write))
            self._together(lambda: self._finish(written, meta) if written is not None else None)
        except BaseException:
            if self._ranks.is_first:  # no other rank may: it cannot know whether rank 0 is about to finish
                self._disk.discard(self._staging)
            raise

    def _check(self) -> bytes:
        files = self._content.files
        refused = [name for name in files if not is_safe_name(name) or name in (MANIFEST_NAME, MARKER_NAME, META_NAME)]
        if refused:
            raise CheckpointError(f"{self._final}: cannot hold a file named {refused[0]!r}. Use a plain relative path.")
        meta = json.dumps(self._content.meta, indent=1, allow_nan=False).encode()
        self._needed += sum(source.stat().st_size for source in files.values()) + len(meta) + _OVERHEAD_BYTES
        return meta

    def _together(self, action: Callable[[], T]) -> T:
        """Do a step on every rank. If any fails, all of them raise, and say which one it was."""
        try:
            return self._ranks.run_on_all(lambda: self._translated(action))
        except StorageError as error:
            if self._ranks.world > 1 and error.from_rank is None:
                raise type(error)(f"rank {self._ranks.rank}: {error}") from error
            raise

    def _translated(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except OSError as exc:
            raise storage_error(exc, self._doing, self._final.parent, self._needed, self._remedy) from exc

    def _begin(self) -> None:
        if not self._ranks.is_first:
            if self._folder is not None:
                self._folder.check()
            return
        make_checkpoints_folder(self._disk, self._final.parent, self._folder)
        own = re.compile(re.escape(STAGING_PREFIX + self._final.name) + f"-[0-9a-f]{{{2 * _TOKEN_BYTES}}}")
        for entry in sorted(self._final.parent.iterdir()):
            if own.fullmatch(entry.name):  # of a try that failed on a disk that did not even let it be removed
                self._disk.remove_tree(entry)
        check_free_space(self._disk, self._final.parent, self._needed, self._doing, self._remedy)
        self._disk.make_folder(self._staging)

    def _write(self) -> WriteResult:
        written = write_chunks(self._disk, self._staging, self._chunks, self._ranks.rank)
        for copy in self._content.parts:
            written.files.update(copy.write(self._disk, self._staging))
            written.chunks.extend(copy.part.chunks)
        if not self._ranks.is_first:  # rank 0 does it at the end; other machines have their own view of the folder
            self._disk.sync_folder(self._staging)
        return written

    def _finish(self, written: Sequence[WriteResult], meta: bytes) -> None:
        disk, staging = self._disk, self._staging
        records = {name: record for part in written for name, record in part.files.items()}
        records[INDEX_NAME] = write_index(disk, staging, (chunk for part in written for chunk in part.chunks))
        records[META_NAME] = write_file(disk, staging / META_NAME, meta)
        records |= _copy(disk, staging, self._content.files)
        write_manifest(disk, staging, CheckpointManifest(self._content.step, records))
        disk.sync_folder(staging)
        rename_into_place(disk, staging, self._final)


def check_free_space(disk: Disk, folder: Path, needed: int, doing: str, remedy: Remedy) -> None:
    """Refuse before writing what cannot fit. Others may fill the disk meanwhile: writing can fail all the same.

    Args:
        disk: which is asked.
        folder: where it is to be written.
        needed: bytes.
        doing: what is being done, as in "cannot save the checkpoint of step 40".
        way_out: what the user can do.

    Raises:
        StorageError: fewer bytes are free.
    """
    free = disk.free_bytes(folder)
    if free < needed:
        raise StorageError(
            f"{doing} in {folder}: it needs {human_bytes(needed)} ({needed} bytes) and "
            f"{human_bytes(free)} are free. What would work: free some space there{remedy.less}, "
            f"or {remedy.elsewhere}."
        )


def _copy(disk: Disk, staging: Path, files: Mapping[str, Path]) -> dict[str, FileRecord]:
    records = {}
    for name, source in sorted(files.items()):
        target = staging / name
        make_folders(disk, target.parent, inside=staging)
        records[name] = copy_file(disk, source, target)
    for folder in sorted(
        {parent for name in files for parent in (staging / name).parents if staging in parent.parents}
    ):
        disk.sync_folder(folder)
    return records


def rename_into_place(disk: Disk, staging: Path, final: Path) -> None:
    """Give a checkpoint that is complete and durable its name: the instant. Raises OSError as the disk does."""
    if final.exists():
        replaced = final.with_name(REPLACED_PREFIX + final.name)
        disk.remove_tree(replaced)
        disk.rename(final, replaced)
        try:
            disk.rename(staging, final)
        except BaseException:
            disk.rename(replaced, final)
            raise
        disk.sync_folder(final.parent)
        disk.remove_tree(replaced)
        return
    disk.rename(staging, final)
    disk.sync_folder(final.parent)


def clean_up(disk: Disk, root: Path) -> None:
    """Bring a folder of checkpoints to order after a crash: nothing half-written or half-removed stays.

    Raises:
        StorageError: the disk refused.
    """
    try:
        for entry in sorted(root.iterdir()):
            if entry.name.startswith(REPLACED_PREFIX):
                _settle_replacement(disk, entry, entry.with_name(entry.name.removeprefix(REPLACED_PREFIX)))
            elif entry.name.startswith((STAGING_PREFIX, TRASH_PREFIX)):
                disk.remove_tree(entry)
    except OSError as exc:
        raise storage_error(exc, "cannot remove the leftovers of an interrupted save", root) from exc


def _settle_replacement(disk: Disk, replaced: Path, final: Path) -> None:
    """The new checkpoint appeared: drop the old one. It did not: put the old one back."""
    if not final.exists():
        disk.rename(replaced, final)
        disk.sync_folder(final.parent)
        return
    remove_checkpoint(disk, replaced)


def remove_checkpoint(disk: Disk, folder: Path) -> None:
    """Remove a checkpoint so that a crash in between cannot leave a part of it under its name."""
    trash = folder.with_name(TRASH_PREFIX + folder.name.removeprefix(REPLACED_PREFIX))
    disk.remove_tree(trash)
    disk.rename(folder, trash)
    disk.sync_folder(folder.parent)
    disk.remove_tree(trash)
