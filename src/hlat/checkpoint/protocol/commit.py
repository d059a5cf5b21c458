"""The commit protocol: a checkpoint appears complete, by one atomic rename, or not at all.

    rank 0       .staging-<name>-<token>/   is created; each save draws a new random token
    every rank   its tensors        written to its own files, hashed while written, fsynced; then reported to rank 0
    rank 0       .metadata          the index, if the chunks of all ranks cover every tensor exactly once
                 meta.json, files   also hashed and fsynced
                 manifest.json      sizes and sha256 of all of them
                 COMMITTED          sha256 of the manifest, the last file written
                 fsync of every folder
                 rename .staging-<name>-<token> -> <name>      the commit point
                 fsync of the parent folder

After each step the ranks exchange whether it succeeded. If it failed on any rank, all ranks stop, rank 0 removes the
staging folder, and every rank raises the same kind of error. A rank that dies counts as a failure: the others see its
connections close.

A crash before the rename leaves a staging folder. Nothing reads it, and the next opening of the store removes it. A
writer that outlives its run and is still writing then gets an error, because its folder is gone; since every save has
its own token, it cannot write into the folder of another save. If a checkpoint of the same name exists, it is first
renamed to ``.replaced-<name>``, and removed after the commit point. The next opening of the store undoes a crash
between the two renames.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hlat.checkpoint.format import newest_format
from hlat.checkpoint.format.filesystem import (
    RUN_REMEDY,
    Disk,
    FileRecord,
    Remedy,
    copy_file,
    make_checkpoints_folder,
    make_folders,
    storage_errors,
)
from hlat.checkpoint.format.format_1 import is_safe_name
from hlat.checkpoint.format.tensor_files import TensorChunk, WriteResult
from hlat.checkpoint.protocol.rank_parts import PartCopy
from hlat.checkpoint.protocol.reader import (
    MANIFEST_NAME,
    MARKER_NAME,
    STAGING_PREFIX,
    CheckpointManifest,
    write_manifest,
)
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.errors import CheckpointError, StorageError
from hlat.runtime.quantities import amount_text
from hlat.runtime.storage.run_folder import RunFolder, is_kept, kept_marks

REPLACED_PREFIX, TRASH_PREFIX = ".replaced-", ".trash-"

_TOKEN_BYTES = 4
_OVERHEAD_BYTES = 1 << 20  # upper bound for manifest, marker and index header
_CHUNK_BYTES = 2048  # upper bound for zip headers and index entry of a chunk

T = TypeVar("T")


@dataclass(frozen=True)
class CheckpointContent:
    """Content of a checkpoint, as far as this rank writes it."""

    step: int  # of the state; 0 for weights alone
    chunks: Sequence[TensorChunk]  # of this rank
    meta: Mapping[str, Any]  # JSON values; rank 0's is written, the others are ignored
    files: Mapping[str, Path]  # path inside the checkpoint -> file to copy there; only rank 0's
    parts: Sequence[PartCopy] = ()  # of a snapshot, which this rank copies unchanged


def commit(
    disk: Disk,
    final: Path,
    content: CheckpointContent,
    remedy: Remedy = RUN_REMEDY,
    ranks: HostGroup | None = None,
    folder: RunFolder | None = None,
) -> None:
    """Write a checkpoint folder by the protocol above, on a file system that all ranks share. Collective."""
    # Without a run folder, missing parents are created. A StorageError before the commit point leaves nothing behind;
    # StateLostError says that the run folder has disappeared.
    _Commit(disk, final, content, remedy, ranks or HostGroup(), folder).run()


@dataclass
class _Commit:
    """One execution of the protocol; the fields are the arguments of ``commit``."""

    disk: Disk
    final: Path
    content: CheckpointContent
    remedy: Remedy
    ranks: HostGroup
    folder: RunFolder | None

    def __post_init__(self) -> None:
        self._format = newest_format()
        # A new one for each save: a writer that outlives its run must not write into the folder of another save.
        token = self.ranks.broadcast(secrets.token_hex(_TOKEN_BYTES))
        self._staging = self.final.with_name(f"{STAGING_PREFIX}{self.final.name}-{token}")
        self._failure = f"cannot save the checkpoint {self.final.name}"
        self._chunks = [chunk for chunk in self.content.chunks if self.ranks.is_first or not chunk.replicated]
        # bytes of this rank, then of all
        self._needed = sum(copy.part.bytes for copy in self.content.parts)
        self._needed += sum(chunk.nbytes + _CHUNK_BYTES for chunk in self._chunks)

    def run(self) -> None:
        # Mistakes of the caller are found before anything is written.
        meta = self._on_all_ranks(lambda: self._check() if self.ranks.is_first else b"")
        # Ranks share the disk: rank 0 compares the sum with the free space.
        self._needed = sum(self.ranks.all_gather(self._needed))
        try:
            # Each line ends when all ranks have done it, or all raise: rank 0 writes the manifest after all tensors
            # are durable.
            self._on_all_ranks(self._begin)
            written = self.ranks.gather(self._on_all_ranks(self._write))
            self._on_all_ranks(lambda: self._finish(written, meta) if written is not None else None)
        except BaseException:
            if self.ranks.is_first:  # no other rank: it cannot know whether rank 0 is about to rename
                self.disk.discard(self._staging)
            raise

    def _check(self) -> bytes:
        files = self.content.files
        taken = (MANIFEST_NAME, MARKER_NAME, *self._format.small_files)
        refused = [name for name in files if not is_safe_name(name) or name in taken]
        if refused:
            raise CheckpointError(
                f"{self.final}: cannot contain a file named {refused[0]!r}. Use a plain relative path."
            )
        # NaN is not JSON: other programs could not read the file.
        meta = json.dumps(self.content.meta, indent=1, allow_nan=False).encode()
        self._needed += sum(source.stat().st_size for source in files.values()) + len(meta) + _OVERHEAD_BYTES
        return meta

    def _on_all_ranks(self, action: Callable[[], T]) -> T:
        try:
            failing = storage_errors(self._failure, self.final.parent, self._needed, self.remedy)
            return self.ranks.run_on_all(failing(action))
        except StorageError as error:
            # An error of this rank; one that came from another rank names that rank already.
            if self.ranks.world > 1 and error.from_rank is None:
                raise type(error)(f"rank {self.ranks.rank}: {error}") from error
            raise

    def _begin(self) -> None:
        if not self.ranks.is_first:
            if self.folder is not None:
                self.folder.check()
            return
        make_checkpoints_folder(self.disk, self.final.parent, self.folder)
        leftover = re.compile(re.escape(STAGING_PREFIX + self.final.name) + f"-[0-9a-f]{{{2 * _TOKEN_BYTES}}}")
        for entry in sorted(self.final.parent.iterdir()):
            if leftover.fullmatch(entry.name):  # left by a failed attempt whose removal failed too
                self.disk.remove_tree(entry)
        check_free_space(self.disk, self.final.parent, self._needed, self._failure, self.remedy)
        self.disk.make_folder(self._staging)

    def _write(self) -> WriteResult:
        written = self._format.write_chunks(self.disk, self._staging, self._chunks, self.ranks.rank)
        for copy in self.content.parts:
            written.files.update(copy.write(self.disk, self._staging))
            written.chunks.extend(copy.part.chunks)
        if not self.ranks.is_first:  # rank 0 syncs it at the end; other machines may cache the folder
            self.disk.sync_folder(self._staging)
        return written

    def _finish(self, written: Sequence[WriteResult], meta: bytes) -> None:
        disk, staging = self.disk, self._staging
        records = {name: record for result in written for name, record in result.files.items()}
        chunks = (chunk for result in written for chunk in result.chunks)
        records |= self._format.write_small_files(disk, staging, chunks, meta)
        records |= _copy(disk, staging, self.content.files)
        write_manifest(disk, staging, CheckpointManifest(self.content.step, records, self._format.version))
        disk.sync_folder(staging)
        rename_into_place(disk, staging, self.final)


def check_free_space(disk: Disk, folder: Path, needed: int, failure: str, remedy: Remedy) -> None:
    """Fail early if fewer than ``needed`` bytes are free. Writing can fail later too: others may fill the disk."""
    free = disk.free_bytes(folder)
    if free < needed:
        raise StorageError(
            f"{failure} in {folder}: it needs {amount_text(needed, 'B')} ({needed} bytes) and "
            f"{amount_text(free, 'B')} are free. What would work: free some space there{remedy.less}, "
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
    """Rename a complete, fsynced staging folder to its final name: the commit point."""
    if final.exists():
        replaced = final.with_name(REPLACED_PREFIX + final.name)
        disk.remove_tree(replaced)
        # A folder cannot be renamed onto one that is not empty. A crash before the next rename is undone by
        # ``clean_up``.
        disk.rename(final, replaced)
        try:
            # Forks were made from the old one: their marks stay with its step. Under this name nobody can add one.
            for mark in (marks := kept_marks(replaced)):
                copy_file(disk, mark, staging / mark.name)
            if marks:
                disk.sync_folder(staging)
            disk.rename(staging, final)
        except BaseException:
            disk.rename(replaced, final)
            raise
        # The new one has to be durable before the old one goes.
        disk.sync_folder(final.parent)
        disk.remove_tree(replaced)
        return
    disk.rename(staging, final)
    disk.sync_folder(final.parent)


def clean_up(disk: Disk, root: Path) -> None:
    """Remove what an interrupted save or removal left in a folder of checkpoints; StorageError if that fails."""
    with storage_errors("cannot remove the leftovers of an interrupted save", root):
        for entry in sorted(root.iterdir()):
            kept = entry.with_name(entry.name.removeprefix(TRASH_PREFIX))
            if entry.name.startswith(TRASH_PREFIX) and is_kept(entry) and not kept.exists():
                disk.rename(entry, kept)  # a fork was made while it was about to be removed
            elif entry.name.startswith((STAGING_PREFIX, TRASH_PREFIX)):
                disk.remove_tree(entry)
            elif entry.name.startswith(REPLACED_PREFIX):
                final = entry.with_name(entry.name.removeprefix(REPLACED_PREFIX))
                if final.exists():
                    remove_checkpoint(disk, entry)
                else:  # the crash was between the two renames: the old checkpoint is the only one
                    disk.rename(entry, final)
                    disk.sync_folder(root)


def remove_checkpoint(disk: Disk, folder: Path) -> None:
    """Remove a checkpoint that no fork keeps. It is renamed first: a crash leaves no incomplete one under its name."""
    trash = folder.with_name(TRASH_PREFIX + folder.name.removeprefix(REPLACED_PREFIX))
    disk.remove_tree(trash)
    disk.rename(folder, trash)
    # Once more: the mark may have come since the caller looked. Under this name nobody can add one.
    if is_kept(trash) and not folder.name.startswith(REPLACED_PREFIX):
        disk.rename(trash, folder)
        return
    disk.sync_folder(folder.parent)
    disk.remove_tree(trash)
