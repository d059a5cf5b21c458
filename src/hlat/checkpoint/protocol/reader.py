"""Read checkpoints: the manifest, the verification of every byte, and the tensors.

    files --sizes, sha256--> manifest.json --sha256--> COMMITTED                        write_manifest
    folder --read_manifest--> CheckpointManifest --every file hashed--> list of problems    verify_checkpoint
    path given by a user --resolve--> a verified folder --Checkpoint--> meta, tensors, regions of tensors

A folder is a valid checkpoint if its marker matches its manifest and its files match the manifest. Files that the
manifest does not list are never read. No reader changes files, so the checkpoints of a run can be read while it trains.
"""

import errno
import hashlib
import json
import logging
import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from hlat.checkpoint.format import format_numbered
from hlat.checkpoint.format.base import CheckpointFormat, ReadFile
from hlat.checkpoint.format.filesystem import READ_REMEDY, Disk, FileRecord, storage_error, write_file
from hlat.checkpoint.format.index import StoredTensor
from hlat.checkpoint.format.tensor_files import Region
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.distributed.sendable_types import sendable
from hlat.runtime.errors import CheckpointError, CheckpointFormatError
from hlat.runtime.progress import advance, blocking_call
from hlat.runtime.storage.local_files import broken_link
from hlat.runtime.terminal import listed

MANIFEST_NAME = "manifest.json"
MARKER_NAME = "COMMITTED"
STAGING_PREFIX = ".staging-"  # of a folder that is still being written

STEP_FOLDER = re.compile(r"step-(\d{8,})")

_READ_BYTES = 1 << 20  # 1 MiB
_READERS = min(8, os.cpu_count() or 1)  # threads; hashing releases the GIL


@sendable
@dataclass(frozen=True)
class CheckpointManifest:
    """Content of a manifest, whose paths have '/' as separator on every platform."""

    step: int  # optimizer steps done
    files: Mapping[str, FileRecord]  # by path inside the checkpoint
    version: int  # of the format

    @property
    def format(self) -> CheckpointFormat:
        return format_numbered(self.version)

    def content_problems(self, read: ReadFile) -> list[str]:
        """List problems of the metadata and the index, for a checkpoint whose checksums match."""
        try:
            # Checksums do not help against a file that was edited together with them.
            self.format.read_meta(read, self.step)
            self.format.read_index(read, self.file_bytes)
        except CheckpointError as exc:
            return [str(exc)]
        return []

    @property
    def file_bytes(self) -> dict[str, int]:
        return {name: record.bytes for name, record in self.files.items()}


def step_folder_name(step: int) -> str:
    """Folder name of a step, padded to eight digits: 40 -> 'step-00000040'."""
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
    """Read the manifest of a committed checkpoint; CheckpointError if damaged, StorageError if unreadable."""
    return check_manifest(_read_file(folder / MARKER_NAME), _read_file(folder / MANIFEST_NAME))


def check_manifest(marker: bytes, data: bytes) -> CheckpointManifest:
    """Parse a manifest after comparing it with its marker; CheckpointError if either is invalid."""
    if marker != hashlib.sha256(data).hexdigest().encode():
        raise CheckpointError(f"{MANIFEST_NAME} does not match the checksum in {MARKER_NAME}")
    try:
        content = json.loads(data)
        stored = format_numbered(content["format"])
        return CheckpointManifest(*stored.parse_manifest(content), stored.version)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise CheckpointError(f"{MANIFEST_NAME} is not a valid manifest ({type(exc).__name__}: {exc})") from exc


def refuse_newer_format(folder: Path) -> None:
    """Raise CheckpointFormatError if a newer version of hlat wrote a checkpoint, which may be valid."""
    try:
        read_manifest(folder)
    except CheckpointFormatError as exc:
        raise CheckpointFormatError(f"{folder}: {exc}") from exc
    except CheckpointError:  # damage, which is handled elsewhere
        return


def verify_checkpoint(folder: Path) -> list[str]:
    """List everything that is wrong with a checkpoint folder; an empty list means that it is valid. Every byte is read.

    Raises:
        StorageError: the storage cannot be read at all (permission, stale mount). The checkpoint may still be valid.
    """
    try:
        manifest = read_manifest(folder)
    except CheckpointError as exc:
        return [str(exc)]
    problems = []
    match = STEP_FOLDER.fullmatch(folder.name)
    # A folder that was renamed by hand would be resumed from at the wrong step.
    if match and int(match[1]) != manifest.step:
        problems.append(f"the folder is named {folder.name}, its content is of step {manifest.step}")
    with ThreadPoolExecutor(_READERS) as pool:
        found = pool.map(lambda item: _check_file(folder, *item), manifest.files.items())
        problems.extend(problem for problem in found if problem)
    if not problems:
        problems += manifest.content_problems(_reader(folder))
    return problems


def _check_file(folder: Path, name: str, expected: FileRecord) -> str:
    path = folder / name
    # A link could lead out of the checkpoint, and its target may change later.
    if any(entry.is_symlink() for entry in [path, *path.parents][: len(PurePosixPath(name).parts)]):
        return f"{name} is a symbolic link"
    try:
        # The size first: it costs no read.
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


def _reader(folder: Path) -> ReadFile:
    return lambda name: _read_file(folder / name)


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise CheckpointError(_unreadable(path, path.name, exc)) from exc


def _unreadable(path: Path, name: str, exc: OSError) -> str:
    """Describe a missing or damaged file; StorageError for any other error, which is a problem of the storage."""
    if exc.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
        return f"{name} is missing"
    # The disk has lost the bytes, so the checkpoint is damaged; an earlier one may be readable.
    if exc.errno == errno.EIO:
        return f"{name} cannot be read ({exc.strerror})"
    raise storage_error(exc, f"cannot read {name}", path.parent, remedy=READ_REMEDY) from exc


_LOG = logging.getLogger(__name__)  # not configured by hlat: Python writes its warnings to stderr, one line each

_NAMED = 10  # checkpoints that a message names
_LISTED = 20  # maximum number of tensors listed in an error


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint: its folder and its metadata."""

    path: Path
    meta: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps done; 0 for imported weights."""
        return self.manifest.step

    @cached_property
    def manifest(self) -> CheckpointManifest:
        return read_manifest(self.path)

    @cached_property
    def index(self) -> dict[str, StoredTensor]:
        try:
            # Checked against the sizes of the files: an index must not cause huge allocations.
            return self.manifest.format.read_index(_reader(self.path), self.manifest.file_bytes)
        except CheckpointError as exc:
            raise type(exc)(f"{self.path}: {exc}") from None

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by name, on the meta device: shape and dtype without data."""
        return {
            name: torch.empty(stored.shape, dtype=stored.dtype, device="meta") for name, stored in self.index.items()
        }

    def check(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Check that the checkpoint has every target with its shape and dtype; targets may be on the meta device.

        CheckpointError lists the tensors that are missing or differ.
        """
        saved = self.tensors
        problems = []
        for name, target in targets.items():
            found = saved.get(name)
            if found is None:
                problems.append(f"{name}: not in the checkpoint")
            elif found.shape != target.shape or found.dtype != target.dtype:
                problems.append(f"{name}: saved as {_describe(found)}, needed as {_describe(target)}")
        if problems:
            head = f"{self.path}: {len(problems)} tensors do not fit the model and optimizer of the recipe"
            remedy = "Give the recipe the model and optimizer that `hlat checkpoint show` lists, or another checkpoint."
            raise CheckpointError("\n  ".join([head, listed(problems, _LISTED, "\n  ")]) + f"\n{remedy}")

    def load(self, prefix: str) -> dict[str, torch.Tensor]:
        """Read the tensors whose names begin with ``prefix`` to the CPU; the result's keys lack the prefix."""
        loaded = self.read([name for name in self.tensors if name.startswith(prefix)])
        return {name.removeprefix(prefix): tensor for name, tensor in loaded.items()}

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read the named tensors to the CPU; CheckpointError names those that it does not have."""
        names = list(names)
        absent = [name for name in names if name not in self.tensors]
        if absent:
            raise CheckpointError(f"{self.path}: has no tensor {', '.join(absent[:_LISTED])}")
        regions = [Region(name, (0,) * self.tensors[name].ndim, tuple(self.tensors[name].shape)) for name in names]
        return dict(zip(names, self.read_regions(regions), strict=True))

    def read_regions(self, regions: Sequence[Region]) -> list[torch.Tensor]:
        """Read regions to the CPU, in the saved dtype; CheckpointError if a file contradicts the index."""
        # Only their rows are read, whatever chunks they were saved in.
        return self.manifest.format.read_regions(self.path, self.index, regions)


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint without verifying it; the caller has just verified or written it."""
    return Checkpoint(folder, read_meta(folder))


def open_on_all_ranks(folder: Path, ranks: HostGroup) -> Checkpoint:
    """Open a checkpoint on every rank; CheckpointError if a rank sees other files than rank 0. Collective."""
    # The marker stands for all files: it is the hash of the manifest, which has theirs.
    marker = ranks.run_on_rank0(lambda: read_envelope(folder))
    return ranks.run_on_all(lambda: _open_same(folder, marker))


def read_envelope(folder: Path, name: str = MARKER_NAME) -> bytes:
    """Read the marker of a checkpoint, or its manifest, as bytes; CheckpointError if that is not possible."""
    try:
        return (folder / name).read_bytes()
    except OSError as exc:
        raise CheckpointError(f"{folder}: not a readable checkpoint ({exc.strerror})") from exc


def _open_same(folder: Path, marker: bytes) -> Checkpoint:
    try:
        same = read_envelope(folder) == marker
    except CheckpointError:
        same = False
    if not same:
        raise CheckpointError(
            f"{folder}: {socket.gethostname()} does not see the checkpoint that rank 0 sees there. Put it on a file "
            "system that all machines of the run share, under the same path."
        )
    return open_checkpoint(folder)


def read_meta(folder: Path) -> dict[str, Any]:
    """Read the metadata of a checkpoint: step, tokens, samples, recipe, versions, ...; errors as ``read_manifest``."""
    try:
        return read_manifest(folder).format.read_meta(_reader(folder))
    except CheckpointError as exc:
        raise type(exc)(f"{folder}: not a readable checkpoint: {exc}") from exc


def step_folders(root: Path) -> list[Path]:
    """List the folders named like checkpoints, oldest first, without verifying them."""
    found = [(int(match[1]), path) for path in _entries(root) if (match := STEP_FOLDER.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _entries(root: Path) -> Iterator[Path]:
    try:
        yield from root.iterdir()
    except (FileNotFoundError, NotADirectoryError):
        return


def resolve(path: Path) -> Path:
    """Find the checkpoint that a path given by a user refers to, verify every byte of it, and return its folder.

    Args:
        path: a checkpoint, a folder of checkpoints, or a run folder. Of several checkpoints the newest valid one is
            taken; each damaged newer one is logged as a warning.

    Raises:
        CheckpointError: there is no checkpoint, or none is valid; lists what is wrong with each.
        CheckpointFormatError: a newer version of hlat wrote the newest one.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: does not exist. {_others_here(path)}")
    if (path / MARKER_NAME).exists() or STEP_FOLDER.fullmatch(path.name):
        if problems := verify_checkpoint(path):
            refuse_newer_format(path)
            raise CheckpointError(f"{path}: damaged: {'; '.join(problems)}. Use another checkpoint.")
        return path
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    damaged = []
    for folder in reversed(step_folders(root)):
        problems = verify_checkpoint(folder)
        if not problems:
            return folder
        refuse_newer_format(folder)
        damaged.append(f"{folder.name}: {'; '.join(problems)}")
        _LOG.warning("%s is damaged and skipped: %s", folder, listed(problems, between="; "))
    if damaged:
        raise CheckpointError("\n  ".join([f"{root}: no checkpoint in it is valid", *damaged]))
    raise CheckpointError(f"{path}: no checkpoint there. {_hint(path)}")


def _others_here(path: Path) -> str:
    try:
        # A step that was mistyped, most likely: the message names the checkpoints beside it.
        beside = [folder.name for folder in step_folders(path.parent)]
    except OSError:
        beside = []
    if beside:
        return f"There {'are' if beside[1:] else 'is'} {', '.join(beside[-_NAMED:])}."
    return "Give a run folder, its checkpoints folder, or one checkpoint."


def _hint(path: Path) -> str:
    if path.is_file():
        return "It is a file. If it is a recipe, give the folder of its run: run.dir, or runs/ and run.name."
    if (path / "config.json").exists():
        return f"It looks like a Hugging Face model: convert it to a checkpoint with `hlat import {path} --to DIR`."
    if link := broken_link(path / "config.json"):
        return f"It looks like a Hugging Face model, but its config.json is {link}. Fetch the model again."
    if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").exists():
        return "It looks like a Hugging Face model without its config.json. Fetch that, too."
    return "Give a run folder, its checkpoints folder, or one checkpoint."
