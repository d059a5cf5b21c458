"""The commit protocol: a checkpoint appears whole, at one instant, or not at all.

    .staging-<name>/   tensors, meta.json, files   each hashed while written, fsynced
                       manifest.json               sizes and sha256 of all of them
                       COMMITTED                   sha256 of the manifest, the last file written
                       fsync of every folder
    rename .staging-<name> -> <name>               the instant
    fsync of the parent folder

A crash before the rename leaves a staging folder, which nothing reads and the next open removes. When a checkpoint of
that name exists it is first renamed to ``.replaced-<name>`` and removed after the instant; a crash between the two
renames is undone at the next open.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hlat.checkpoint.disk import IN_A_RUN, Disk, FileRecord, WayOut, copy_file, human_bytes, storage_error, write_file
from hlat.checkpoint.manifest import (
    MANIFEST_NAME,
    MARKER_NAME,
    META_NAME,
    Manifest,
    is_safe_name,
    write_manifest,
)
from hlat.checkpoint.tensors import write_tensors
from hlat.runtime import CheckpointError, StorageError

STAGING, REPLACED, TRASH = ".staging-", ".replaced-", ".trash-"

_OVERHEAD_BYTES = 1 << 20  # index, manifest and zip headers, generously


def commit(
    disk: Disk,
    final: Path,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    meta: Mapping[str, Any],
    files: Mapping[str, Path],
    way_out: WayOut = IN_A_RUN,
) -> None:
    """Write a checkpoint folder by the protocol above.

    Args:
        disk: where its operations go.
        final: the folder that is to appear.
        step: optimizer step of the state, 0 for weights alone.
        tensors: name -> tensor, on any device.
        meta: JSON values only.
        files: path inside the checkpoint -> file to copy there.
        way_out: what a user can do when the disk refuses.

    Raises:
        StorageError: the disk refused; nothing appeared and nothing is left behind, as far as the disk allows.
        CheckpointError: a name in ``files`` leaves the folder.
    """
    refused = [name for name in files if not is_safe_name(name) or name in (MANIFEST_NAME, MARKER_NAME, META_NAME)]
    if refused:
        raise CheckpointError(f"{final}: cannot hold a file named {refused[0]!r}. Use a plain relative path.")
    meta_bytes = json.dumps(meta, indent=1, allow_nan=False).encode()
    staging = final.with_name(STAGING + final.name)
    needed = sum(tensor.nbytes for tensor in tensors.values()) + len(meta_bytes) + _OVERHEAD_BYTES
    doing = f"cannot save the checkpoint {final.name}"
    try:
        needed += sum(source.stat().st_size for source in files.values())
        disk.make_folder(final.parent)
        disk.remove_tree(staging)
        _require_space(disk, final.parent, needed, doing, way_out)
        disk.make_folder(staging)
        records = write_tensors(disk, staging, tensors)
        records[META_NAME] = write_file(disk, staging / META_NAME, meta_bytes)
        records |= _copy(disk, staging, files)
        write_manifest(disk, staging, Manifest(step, records))
        disk.sync_folder(staging)
        _appear(disk, staging, final)
    except OSError as exc:
        disk.discard(staging)
        raise storage_error(exc, doing, final.parent, needed, way_out) from exc
    except BaseException:
        disk.discard(staging)
        raise


def _require_space(disk: Disk, folder: Path, needed: int, doing: str, way_out: WayOut) -> None:
    """Refuse before writing what cannot fit. Others may fill the disk meanwhile: writing can fail all the same."""
    free = disk.free_bytes(folder)
    if free < needed:
        raise StorageError(
            f"{doing} in {folder}: it needs {human_bytes(needed)} ({needed} bytes) and {human_bytes(free)} are free. "
            f"What would work: free some space there{way_out.less}, or {way_out.elsewhere}."
        )


def _copy(disk: Disk, staging: Path, files: Mapping[str, Path]) -> dict[str, FileRecord]:
    records = {}
    for name, source in sorted(files.items()):
        target = staging / name
        disk.make_folder(target.parent)
        records[name] = copy_file(disk, source, target)
    for folder in sorted(
        {parent for name in files for parent in (staging / name).parents if staging in parent.parents}
    ):
        disk.sync_folder(folder)
    return records


def _appear(disk: Disk, staging: Path, final: Path) -> None:
    if final.exists():
        replaced = final.with_name(REPLACED + final.name)
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
            if entry.name.startswith(REPLACED):
                _settle_replacement(disk, entry, entry.with_name(entry.name.removeprefix(REPLACED)))
            elif entry.name.startswith((STAGING, TRASH)):
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
    trash = folder.with_name(TRASH + folder.name.removeprefix(REPLACED))
    disk.remove_tree(trash)
    disk.rename(folder, trash)
    disk.sync_folder(folder.parent)
    disk.remove_tree(trash)
