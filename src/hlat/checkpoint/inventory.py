"""List the checkpoints in a folder, and the tensors of one checkpoint. Nothing is changed, and no tensor is read.

path given by a user --find_checkpoints_folder--> folder --list_checkpoints--> entries, oldest first
path given by a user --open_unverified--> checkpoint --group_tensors--> its tensors by kind

The small files are compared with their checksums: manifest, metadata and index. A run that is training may remove
checkpoints meanwhile.
"""

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from hlat.checkpoint.protocol.commit import REPLACED_PREFIX, TRASH_PREFIX
from hlat.checkpoint.protocol.manifest import (
    MARKER_NAME,
    STAGING_PREFIX,
    STEP_FOLDER,
    CheckpointManifest,
    hash_file,
    read_manifest,
)
from hlat.checkpoint.protocol.reader import Checkpoint, open_checkpoint
from hlat.checkpoint.protocol.store import BAD_SUFFIX
from hlat.runtime.errors import CheckpointError, CheckpointFormatError

CheckpointState = Literal["committed", "damaged", "set aside", "unfinished", "newer format"]

_NAMED = 10  # checkpoints that a message names


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint, or the remains of one, in a checkpoints folder or an object store.

    Attributes:
        location: the folder, or its URL.
        step: optimizer steps done.
        state: ``committed``; ``damaged`` if a small file does not match its checksum (all: ``verify_checkpoint``);
            ``set aside`` if it was damaged and renamed; ``unfinished`` if a save or a removal was interrupted, or is
            still in progress; ``newer format`` if this version of hlat cannot read it.
        bytes: size of its files, from the manifest; 0 without a manifest.
        saved: time of the commit in UTC; None if not committed, or in an object store.
        tokens: tokens consumed so far; None if unknown.
        problem: why it is damaged or cannot be read.
    """

    location: str
    step: int
    state: CheckpointState
    bytes: int = 0
    saved: datetime | None = None
    tokens: int | None = None
    problem: str = ""

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.location.rpartition("/")[2]


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of a checkpoint with a common prefix: those of the model, or one kind of optimizer state.

    Attributes:
        name: the prefix.
        tensors: number of tensors.
        elements: total number of elements.
        dtypes: names of their data types.
    """

    name: str
    tensors: int
    elements: int
    dtypes: tuple[str, ...]


def find_checkpoints_folder(path: Path) -> Path:
    """Find the checkpoints folder from a run folder, or from the checkpoints folder itself; resolve symbolic links.

    Raises:
        CheckpointError: there is none.
    """
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


def open_unverified(path: Path) -> Checkpoint:
    """Open a checkpoint, or the newest of a run, comparing only its small files with their checksums.

    Raises:
        CheckpointError: there is none, or its manifest, metadata or index is damaged.
    """
    if is_checkpoint(path):
        _verify_small_files(path)
        return open_checkpoint(path)
    folder = find_checkpoints_folder(path)
    committed = [entry for entry in list_checkpoints(folder) if entry.state == "committed"]
    if not committed:
        raise CheckpointError(f"{path}: no readable checkpoint there.")
    return open_checkpoint(Path(committed[-1].location))


def _verify_small_files(path: Path) -> CheckpointManifest:
    """Compare metadata and index with the manifest, and return the manifest.

    Raises:
        CheckpointError: a file is missing or does not match its checksum.
    """
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
        state: CheckpointState = "newer format" if isinstance(error, CheckpointFormatError) else "damaged"
        return CheckpointEntry(str(path), step, state, problem=str(error)) if path.exists() else None
    return CheckpointEntry(str(path), step, "committed", sum(manifest.file_bytes.values()), saved, tokens)


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
