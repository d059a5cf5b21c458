"""List and verify the checkpoints in a folder or in an object store. Nothing is changed, and no tensor is read to list.

    path given by a user --find_checkpoints_folder--> folder --list_checkpoints--> entries, oldest first
    path given by a user --open_unverified--> checkpoint --group_tensors--> its tensors by kind

    client --list_remote_folders--> step -> names in its folder
    client, step --read_remote_manifest--> marker, manifest --verify_remote--> every byte compared
    URL of a prefix, or of one checkpoint below it --RemotePrefix--> entries | problems of a step | tensors by kind

To list, the small files are compared with their checksums: manifest, metadata and index. A run that is training may
remove checkpoints meanwhile.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from hlat.checkpoint.format.filesystem import FileRecord
from hlat.checkpoint.object_store import ObjectStoreClient
from hlat.checkpoint.protocol.commit import REPLACED_PREFIX, TRASH_PREFIX
from hlat.checkpoint.protocol.reader import (
    MANIFEST_NAME,
    MARKER_NAME,
    STAGING_PREFIX,
    STEP_FOLDER,
    Checkpoint,
    CheckpointManifest,
    check_manifest,
    hash_file,
    open_checkpoint,
    read_manifest,
    step_folder_name,
)
from hlat.checkpoint.protocol.store import BAD_SUFFIX
from hlat.runtime.distributed.sendable_types import sendable
from hlat.runtime.errors import CheckpointError, CheckpointFormatError

CheckpointState = Literal["committed", "damaged", "set aside", "unfinished", "newer format"]

_NAMED = 10  # checkpoints that a message names


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint, or the remains of one, in a checkpoints folder or an object store."""

    location: str  # the folder, or its URL
    step: int
    # ``damaged``: a small file differs from its checksum (for all files: ``verify_checkpoint``). ``set aside``: it
    # was damaged and renamed. ``unfinished``: a save or a removal was interrupted, or is in progress. ``newer
    # format``: this version of hlat cannot read it.
    state: CheckpointState
    bytes: int = 0  # of its files, from the manifest; 0 without one
    saved: datetime | None = None  # time of the commit in UTC; None if not committed, or in an object store
    tokens: int | None = None  # consumed so far; None if unknown
    problem: str = ""  # why it is damaged or cannot be read

    @property
    def name(self) -> str:
        return self.location.rpartition("/")[2]


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of a checkpoint with a common prefix: those of the model, or one kind of optimizer state."""

    name: str  # the prefix
    tensors: int  # their number
    elements: int  # of all tensors
    dtypes: tuple[str, ...]


def find_checkpoints_folder(path: Path) -> Path:
    """Find the checkpoints folder from a run folder or itself, links resolved; CheckpointError if there is none."""
    folder = path.resolve()
    if (folder / "checkpoints").is_dir():
        folder = (folder / "checkpoints").resolve()
    if not folder.is_dir():
        others = [entry.name for entry in list_checkpoints(folder.parent)] if folder.parent.is_dir() else []
        there = f"There are {', '.join(others[-_NAMED:])}. " if others else ""
        raise CheckpointError(f"{path}: no such folder. {there}Give a run folder, or its checkpoints folder.")
    if is_checkpoint(folder):
        raise CheckpointError(f"{path}: is a single checkpoint. Give the folder that contains it, {folder.parent}.")
    if folder.name != "checkpoints" and not list_checkpoints(folder):
        raise CheckpointError(f"{path}: no checkpoint there. Give a run folder, or its checkpoints folder.")
    return folder


def is_checkpoint(path: Path) -> bool:
    """True if a path is a single checkpoint, valid or not, and not a folder of checkpoints."""
    return (path / MARKER_NAME).exists() or (path.is_dir() and STEP_FOLDER.match(path.resolve().name) is not None)


def list_checkpoints(folder: Path) -> list[CheckpointEntry]:
    """List committed, damaged, set-aside and unfinished checkpoints in a folder, by step."""
    found = [entry for path in folder.iterdir() if path.is_dir() and (entry := _read_entry(path)) is not None]
    return sorted(found, key=lambda entry: (entry.step, entry.name))


def committed_checkpoints(folder: Path) -> list[Path]:
    """List the committed checkpoints in a folder whose small files are undamaged, by step."""
    return [Path(entry.location) for entry in list_checkpoints(folder) if entry.state == "committed"]


def open_unverified(path: Path) -> Checkpoint:
    """Open a checkpoint, or the newest of a run, comparing only its small files; CheckpointError if damaged."""
    if is_checkpoint(path):
        _verify_small_files(path)
        return open_checkpoint(path)
    committed = committed_checkpoints(find_checkpoints_folder(path))
    if not committed:
        raise CheckpointError(f"{path}: no readable checkpoint there.")
    return open_checkpoint(committed[-1])


def _verify_small_files(path: Path) -> CheckpointManifest:
    """Compare metadata and index with the manifest, and return it; CheckpointError if one differs."""
    manifest = read_manifest(path)
    for name in manifest.format.small_files:
        try:
            same = hash_file(path / name) == manifest.files[name].sha256
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read ({error.strerror})") from error
        if not same:
            raise CheckpointError(f"{name} does not match its checksum")
    return manifest


def _read_entry(path: Path) -> CheckpointEntry | None:
    match = STEP_FOLDER.search(path.name)
    if match is None:
        return None
    step = int(match[1])
    if path.name.startswith((STAGING_PREFIX, REPLACED_PREFIX, TRASH_PREFIX)):
        return CheckpointEntry(str(path), step, "unfinished")
    if BAD_SUFFIX in path.suffixes:
        return CheckpointEntry(str(path), step, "set aside")
    if not STEP_FOLDER.fullmatch(path.name):
        return None
    try:
        manifest = _verify_small_files(path)
        tokens = open_checkpoint(path).meta.get("tokens")
        saved = datetime.fromtimestamp((path / MARKER_NAME).stat().st_mtime, UTC)
    except (CheckpointError, FileNotFoundError) as error:
        # None: a run that is training has removed it meanwhile.
        return CheckpointEntry(str(path), step, _state_after(error), problem=str(error)) if path.exists() else None
    return CheckpointEntry(str(path), step, "committed", sum(manifest.file_bytes.values()), saved, tokens)


def _state_after(error: Exception) -> CheckpointState:
    return "newer format" if isinstance(error, CheckpointFormatError) else "damaged"


def group_tensors(checkpoint: Checkpoint) -> list[TensorGroup]:
    """Group the tensors of a checkpoint by kind: model, each kind of optimizer state, and others."""
    groups: dict[str, list[str]] = {}
    for name in checkpoint.tensors:
        first, _, rest = name.partition(".")
        groups.setdefault(f"{first}.{rest.partition('.')[0]}" if first == "optimizer" else first, []).append(name)
    found = []
    for group, names in sorted(groups.items()):
        tensors = [checkpoint.tensors[name] for name in names]
        dtypes = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
        found.append(TensorGroup(group, len(names), sum(tensor.numel() for tensor in tensors), tuple(sorted(dtypes))))
    return found


# Name that the marker of a damaged checkpoint gets: folders of an object store cannot be renamed.
BAD_MARKER_NAME = f"{MARKER_NAME}.bad"

TRANSFERS = 4  # files that a process uploads or downloads at the same time


@sendable
@dataclass(frozen=True)
class RemoteManifest:
    """Manifest of a checkpoint in the store, with the original bytes of the manifest and of its marker."""

    marker: bytes
    text: bytes
    manifest: CheckpointManifest


def list_remote_folders(client: ObjectStoreClient) -> dict[int, set[str]]:
    """Names directly below the folder of each step, by ascending step; StorageError if the store fails."""
    steps = sorted(int(match[1]) for entry in client.list_names() if (match := STEP_FOLDER.fullmatch(entry)))
    return {step: set(client.list_names(step_folder_name(step))) for step in steps}


def committed_steps(client: ObjectStoreClient) -> list[int]:
    """Steps with a committed checkpoint in the store, ascending; StorageError if the store fails."""
    return [step for step, names in list_remote_folders(client).items() if MARKER_NAME in names]


def read_remote_manifest(client: ObjectStoreClient, step: int) -> RemoteManifest:
    """Read and check a manifest; CheckpointError if damaged, CheckpointFormatError if newer, StorageError."""
    read = {name: _remote_content(client, step, name) for name in (MARKER_NAME, MANIFEST_NAME)}
    try:
        manifest = check_manifest(read[MARKER_NAME], read[MANIFEST_NAME])
    except CheckpointFormatError as error:
        raise CheckpointFormatError(f"{client.url_of(step_folder_name(step))}: {error}") from error
    # A folder that was copied to the name of another step.
    if manifest.step != step:
        raise CheckpointError(f"its content is of step {manifest.step}")
    return RemoteManifest(read[MARKER_NAME], read[MANIFEST_NAME], manifest)


def verify_remote(client: ObjectStoreClient, step: int) -> list[str]:
    """List everything that is wrong with a checkpoint; every byte of it is read. StorageError if the store fails."""
    try:
        manifest = read_remote_manifest(client, step).manifest
    except CheckpointError as error:
        return [str(error)]
    with ThreadPoolExecutor(TRANSFERS) as pool:
        names = list(manifest.files)
        found = pool.map(lambda name: client.hash_object(f"{step_folder_name(step)}/{name}"), names)
        problems = find_differences(manifest, dict(zip(names, found, strict=True)))
    return problems or manifest.content_problems(lambda name: _remote_content(client, step, name))


def _remote_content(client: ObjectStoreClient, step: int, name: str) -> bytes:
    content = client.read(f"{step_folder_name(step)}/{name}")
    if content is None:
        raise CheckpointError(f"{name} is missing")
    return content


def find_differences(manifest: CheckpointManifest, found: Mapping[str, FileRecord | None]) -> list[str]:
    """List the files that differ from a manifest; a record of None stands for a missing file."""
    problems = []
    for name, record in found.items():
        expected = manifest.files[name]
        if record is None:
            problems.append(f"{name} is missing")
        elif record.bytes != expected.bytes:
            problems.append(f"{name} has {record.bytes} bytes, the manifest says {expected.bytes}")
        elif record != expected:
            problems.append(f"{name} does not match its checksum")
    return problems


class RemotePrefix:
    """The checkpoints below a URL, or the single checkpoint at a URL.

    ``url`` is ``checkpoint.remote`` of a run, or the URL of a checkpoint below it. Methods raise CheckpointError if it
    cannot be used or its backend is not installed, and StorageError if the store fails.
    """

    def __init__(self, url: str) -> None:
        parent, _, last = url.rstrip("/").rpartition("/")
        match = STEP_FOLDER.fullmatch(last)
        self._step = int(match[1]) if match else None
        self._client = ObjectStoreClient(parent if match else url)

    def entries(self) -> list[CheckpointEntry]:
        """List committed, damaged, set-aside and unfinished checkpoints, by step."""
        folders = list_remote_folders(self._client)
        steps = folders if self._step is None else {self._step} & folders.keys()
        return [self._read_entry(step, folders[step]) for step in sorted(steps)]

    def problems(self, step: int) -> list[str]:
        """List everything that is wrong with a checkpoint; every byte of it is read."""
        return verify_remote(self._client, step)

    def newest(self) -> tuple[str, Mapping[str, Any], list[TensorGroup]]:
        """URL, metadata and tensors by kind of the newest readable checkpoint; CheckpointError without one."""
        entries = [entry for entry in self.entries() if entry.state == "committed"]
        if not entries:
            raise CheckpointError(f"{self._client.url}: no readable checkpoint there.")
        step = entries[-1].step
        remote = read_remote_manifest(self._client, step)
        # The checkpoint's small files make a folder that is read like a local checkpoint; tensors are not downloaded.
        with TemporaryDirectory() as folder:
            local = Path(folder)
            (local / MARKER_NAME).write_bytes(remote.marker)
            (local / MANIFEST_NAME).write_bytes(remote.text)
            for name in remote.manifest.format.small_files:
                (local / name).write_bytes(self._read_small_file(step, name, remote))
            checkpoint = open_unverified(local)
            return self._client.url_of(step_folder_name(step)), checkpoint.meta, group_tensors(checkpoint)

    def _read_entry(self, step: int, names: Set[str]) -> CheckpointEntry:
        url = self._client.url_of(step_folder_name(step))
        if MARKER_NAME not in names:
            return CheckpointEntry(url, step, "set aside" if BAD_MARKER_NAME in names else "unfinished")
        try:
            remote = read_remote_manifest(self._client, step)
            meta = remote.manifest.format.read_meta(lambda name: self._read_small_file(step, name, remote))
        except CheckpointError as error:
            return CheckpointEntry(url, step, _state_after(error), problem=str(error))
        size = sum(remote.manifest.file_bytes.values())
        return CheckpointEntry(url, step, "committed", size, None, meta.get("tokens"))

    def _read_small_file(self, step: int, name: str, remote: RemoteManifest) -> bytes:
        content = _remote_content(self._client, step, name)
        if hashlib.sha256(content).hexdigest() != remote.manifest.files[name].sha256:
            raise CheckpointError(f"{name} does not match its checksum")
        return content
