"""What lies in a folder of checkpoints, and in one checkpoint. Nothing is changed, and no tensor is read.

path given by a user --find_checkpoints_folder--> folder --inventory--> entries, oldest first
path given by a user --look--> checkpoint --contents--> what it holds, by kind

What is small is held against its checksum: the manifest, what the checkpoint says of itself, the index. A run may be
training meanwhile, and remove what is looked at.
"""

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from hlat.checkpoint.format import INDEX_NAME, META_NAME
from hlat.checkpoint.protocol import (
    BAD_SUFFIX,
    MARKER_NAME,
    REPLACED_PREFIX,
    STAGING_PREFIX,
    STEP_FOLDER,
    TRASH_PREFIX,
    Checkpoint,
    CheckpointManifest,
    hash_file,
    open_checkpoint,
    read_manifest,
)
from hlat.runtime import CheckpointError

CheckpointState = Literal["committed", "damaged", "set aside", "unfinished"]


@dataclass(frozen=True)
class CheckpointEntry:
    """One folder of a folder of checkpoints, or of an object store's prefix.

    Attributes:
        location: the folder, or its URL.
        step: optimizer steps done.
        state: ``damaged`` where what is small is not what it was; ``verify`` says it of all files. ``unfinished`` what
            a save or a removal that was interrupted left behind, or one that is at work.
        bytes: of its files, as listed in the manifest; 0 without one.
        saved: when it was committed, UTC; None where it was not, and in an object store.
        tokens: consumed so far; None where it does not say.
        problem: why it is damaged.
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
        """Of the folder."""
        return self.location.rpartition("/")[2]


@dataclass(frozen=True)
class TensorGroup:
    """The tensors of a checkpoint whose names begin alike: all of the model's, or one kind of optimizer state.

    Attributes:
        name: how they begin.
        tensors: how many.
        elements: of all of them.
        dtypes: which there are.
    """

    name: str
    tensors: int
    elements: int
    dtypes: tuple[str, ...]


def find_checkpoints_folder(path: Path) -> Path:
    """The folder of checkpoints that a user means by a run folder or by itself, without symbolic links.

    Raises:
        CheckpointError: there is none.
    """
    folder = path.resolve()
    if (folder / "checkpoints").is_dir():
        folder = (folder / "checkpoints").resolve()
    if not folder.is_dir():
        raise CheckpointError(f"{path}: no such folder. Give a run folder, or its checkpoints folder.")
    if is_checkpoint(folder):
        raise CheckpointError(f"{path}: is one checkpoint. Give the folder that it is in, {folder.parent}.")
    if folder.name != "checkpoints" and not list_checkpoints(folder):
        raise CheckpointError(f"{path}: no checkpoint there. Give a run folder, or its checkpoints folder.")
    return folder


def is_checkpoint(path: Path) -> bool:
    """Whether a path is one checkpoint, whole or not, rather than a folder of them."""
    return (path / MARKER_NAME).exists() or (path.is_dir() and STEP_FOLDER.match(path.resolve().name) is not None)


def list_checkpoints(folder: Path) -> list[CheckpointEntry]:
    """Everything in a folder of checkpoints that is one, was one or was to become one; by step."""
    found = [entry for path in folder.iterdir() if path.is_dir() and (entry := _entry(path)) is not None]
    return sorted(found, key=lambda entry: (entry.step, entry.name))


def open_unverified(path: Path) -> Checkpoint:
    """The checkpoint that a user means, by itself or as the newest of a run; its tensors are not verified.

    Raises:
        CheckpointError: there is none, or what it says of itself is damaged.
    """
    if is_checkpoint(path):
        _checked(path)
        return open_checkpoint(path)
    folder = find_checkpoints_folder(path)
    committed = [entry for entry in list_checkpoints(folder) if entry.state == "committed"]
    if not committed:
        raise CheckpointError(f"{path}: no checkpoint there that can be read.")
    return open_checkpoint(Path(committed[-1].location))


def _checked(path: Path) -> CheckpointManifest:
    """The manifest, after what is small was compared with it."""
    manifest = read_manifest(path)
    for name in (META_NAME, INDEX_NAME):
        try:
            same = hash_file(path / name) == manifest.files[name].sha256
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read ({error.strerror})") from error
        if not same:
            raise CheckpointError(f"{name} does not match its checksum")
    return manifest


def _entry(path: Path) -> CheckpointEntry | None:
    named = STEP_FOLDER.search(path.name)
    if named is None:
        return None
    step = int(named[1])
    if path.name.startswith((STAGING_PREFIX, REPLACED_PREFIX, TRASH_PREFIX)):
        return CheckpointEntry(str(path), step, "unfinished")
    if BAD_SUFFIX in path.suffixes:
        return CheckpointEntry(str(path), step, "set aside")
    if not STEP_FOLDER.fullmatch(path.name):
        return None
    try:
        manifest = _checked(path)
        tokens = open_checkpoint(path).meta.get("tokens")
        saved = datetime.fromtimestamp((path / MARKER_NAME).stat().st_mtime, UTC)
    except (CheckpointError, FileNotFoundError) as error:
        return CheckpointEntry(str(path), step, "damaged", problem=str(error)) if path.exists() else None
    return CheckpointEntry(str(path), step, "committed", sum(manifest.file_bytes.values()), saved, tokens)


def group_tensors(checkpoint: Checkpoint) -> list[TensorGroup]:
    """The tensors of a checkpoint by kind: of the model, of each moment of the optimizer, and others."""
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
