"""Manifest of a checkpoint: every file with its size and hash, and a marker file with the hash of the manifest.

    files --sizes, sha256--> manifest.json --sha256--> COMMITTED

A folder is a valid checkpoint if its marker matches its manifest and its files match the manifest. Files that the
manifest does not list are never read.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hlat.checkpoint.format.base import CheckpointFormat, ReadFile
from hlat.checkpoint.format.filesystem import READ_REMEDY, Disk, FileRecord, storage_error, write_file
from hlat.checkpoint.format.index import StoredTensor
from hlat.checkpoint.format.versions import format_numbered
from hlat.runtime.distributed.sendable_types import sendable
from hlat.runtime.errors import CheckpointError, CheckpointFormatError
from hlat.runtime.process.progress import advance, blocking_call

MANIFEST_NAME = "manifest.json"
MARKER_NAME = "COMMITTED"
STAGING_PREFIX = ".staging-"  # of a folder that is still being written

STEP_FOLDER = re.compile(r"step-(\d{8,})")

_READ_BYTES = 1 << 20
_READERS = min(8, os.cpu_count() or 1)


@sendable
@dataclass(frozen=True)
class CheckpointManifest:
    """Content of a manifest: files by path inside the checkpoint (with '/' as separator), their step and format.

    Attributes:
        step: optimizer steps done.
        files: size and checksum of each file.
        version: version of the format.
    """

    step: int
    files: Mapping[str, FileRecord]
    version: int

    @property
    def format(self) -> CheckpointFormat:
        """Format of the files."""
        return format_numbered(self.version)

    def content_problems(self, read: ReadFile) -> list[str]:
        """List problems of the metadata and of the index, for a checkpoint whose checksums match.

        Args:
            read: returns the content of a small file.
        """
        try:
            self.format.read_meta(read, self.step)
            self.format.read_index(read, self.file_bytes)
        except CheckpointError as exc:
            return [str(exc)]
        return []

    @property
    def file_bytes(self) -> dict[str, int]:
        """Size in bytes of every file."""
        return {name: record.bytes for name, record in self.files.items()}


def step_folder_name(step: int) -> str:
    """Folder name of a step: 40 -> 'step-00000040'."""
    return f"step-{step:08d}"


def step_of_path(path: Path) -> int | None:
    """Step of the checkpoint that contains a path, also while that is being written; None if no checkpoint does."""
    found = [match for name in path.parts if (match := STEP_FOLDER.search(name))]
    return int(found[-1][1]) if found else None


def write_manifest(disk: Disk, folder: Path, manifest: CheckpointManifest) -> None:
    """Write the manifest, then the marker. The folder's other files must have been written."""
    text = {"format": manifest.version, **manifest.format.manifest_fields(manifest.step, manifest.files)}
    record = write_file(disk, folder / MANIFEST_NAME, json.dumps(text, indent=1).encode())
    write_file(disk, folder / MARKER_NAME, record.sha256.encode())


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read the manifest of a committed checkpoint.

    Raises:
        CheckpointError: the marker is missing or does not match the manifest, or the manifest is invalid.
        StorageError: the files exist but cannot be read.
    """
    return check_manifest(_read(folder / MARKER_NAME), _read(folder / MANIFEST_NAME))


def check_manifest(marker: bytes, data: bytes) -> CheckpointManifest:
    """Parse a manifest after comparing it with its marker; both are given as bytes.

    Raises:
        CheckpointError: the marker does not match the manifest, or the manifest is invalid.
    """
    if marker != hashlib.sha256(data).hexdigest().encode():
        raise CheckpointError(f"{MANIFEST_NAME} does not match the checksum in {MARKER_NAME}")
    try:
        content = json.loads(data)
        stored = format_numbered(content["format"])
        return CheckpointManifest(*stored.parse_manifest(content), stored.version)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise CheckpointError(f"{MANIFEST_NAME} is not a valid manifest ({type(exc).__name__}: {exc})") from exc


def read_stored_meta(folder: Path, manifest: CheckpointManifest) -> dict[str, Any]:
    """Read the metadata of a checkpoint folder.

    Raises:
        CheckpointError: it is missing or invalid.
        StorageError: it exists but cannot be read.
    """
    return manifest.format.read_meta(lambda name: _read(folder / name))


def read_stored_index(folder: Path, manifest: CheckpointManifest) -> dict[str, StoredTensor]:
    """Read and check the index of a checkpoint folder.

    Raises:
        CheckpointError: it is missing, is not an index, or contradicts the checkpoint's files.
        StorageError: it exists but cannot be read.
    """
    return manifest.format.read_index(lambda name: _read(folder / name), manifest.file_bytes)


def refuse_newer_format(folder: Path) -> None:
    """Raise CheckpointFormatError if a newer version of hlat wrote a checkpoint, which may be valid."""
    try:
        read_manifest(folder)
    except CheckpointFormatError as exc:
        raise CheckpointFormatError(f"{folder}: {exc}") from exc
    except CheckpointError:  # damage, which is handled elsewhere
        return


def verify_checkpoint(folder: Path) -> list[str]:
    """List everything that is wrong with a checkpoint folder; an empty list means that it is valid.

    Every byte is read; files are hashed in parallel, in blocks of 1 MiB.

    Raises:
        StorageError: the storage cannot be read at all (permission, stale mount). The checkpoint may still be valid.
    """
    try:
        manifest = read_manifest(folder)
    except CheckpointError as exc:
        return [str(exc)]
    problems = []
    match = STEP_FOLDER.fullmatch(folder.name)
    if match and int(match[1]) != manifest.step:
        problems.append(f"the folder is named {folder.name}, its content is of step {manifest.step}")
    with ThreadPoolExecutor(_READERS) as pool:
        found = pool.map(lambda item: _check_file(folder, *item), manifest.files.items())
        problems.extend(problem for problem in found if problem)
    if not problems:
        problems += manifest.content_problems(lambda name: _read(folder / name))
    return problems


def _check_file(folder: Path, name: str, expected: FileRecord) -> str:
    path = folder / name
    if any(entry.is_symlink() for entry in [path, *path.parents][: len(PurePosixPath(name).parts)]):
        return f"{name} is a symbolic link"
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return f"{name} has {size} bytes, the manifest says {expected.bytes}"
        if hash_file(path) != expected.sha256:
            return f"{name} does not match its checksum"
    except OSError as exc:
        return _unreadable(path, name, exc)
    return ""


def hash_file(path: Path) -> str:
    """Compute the sha256 of a file, in hexadecimal, reading 1 MiB at a time."""
    digest = hashlib.sha256()
    buffer = bytearray(_READ_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file, blocking_call():
        while count := file.readinto(buffer):
            digest.update(view[:count])
            advance()
    return digest.hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise CheckpointError(_unreadable(path, path.name, exc)) from exc


def _unreadable(path: Path, name: str, exc: OSError) -> str:
    """Describe why a file of a checkpoint cannot be read.

    A missing file and an I/O error are damage of the checkpoint.

    Raises:
        StorageError: any other error, which is a problem of the storage.
    """
    if exc.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
        return f"{name} is missing"
    if exc.errno == errno.EIO:
        return f"{name} cannot be read ({exc.strerror})"
    raise storage_error(exc, f"cannot read {name}", path.parent, remedy=READ_REMEDY) from exc
