"""What lies in a folder of checkpoints, and in one checkpoint. Nothing is changed, and no tensor is read.

path given by a user --checkpoints_folder--> folder --inventory--> entries, oldest first
checkpoint --contents--> what it holds, by kind
"""

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from hlat.checkpoint.commit import STAGING
from hlat.checkpoint.manifest import MARKER_NAME, STEP_NAME, read_manifest
from hlat.checkpoint.reading import Checkpoint, read_meta
from hlat.checkpoint.store import BAD_SUFFIX
from hlat.runtime import CheckpointError

State = Literal["committed", "damaged", "set aside", "unfinished"]


@dataclass(frozen=True)
class Entry:
    """One folder of a folder of checkpoints.

    Attributes:
        path: the folder.
        step: optimizer steps done; None where the folder does not say.
        state: ``damaged`` where the manifest cannot be read; ``verify`` says whether the files are what it lists.
        bytes: of its files, as listed in the manifest; 0 without one.
        saved: when it was committed, UTC; None where it was not.
        tokens: consumed so far; None where it does not say.
        problem: why it is damaged.
    """

    path: Path
    step: int | None
    state: State
    bytes: int = 0
    saved: datetime | None = None
    tokens: int | None = None
    problem: str = ""


@dataclass(frozen=True)
class Group:
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


def checkpoints_folder(path: Path) -> Path:
    """The folder of checkpoints that a user means by a run folder or by itself.

    Raises:
        CheckpointError: there is none.
    """
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if not folder.is_dir():
        raise CheckpointError(f"{path}: no such folder. Give a run folder, or its checkpoints folder.")
    if STEP_NAME.fullmatch(folder.name) or (folder / MARKER_NAME).exists():
        raise CheckpointError(f"{path}: is one checkpoint. Give the folder that it is in, {path.absolute().parent}.")
    return folder


def inventory(folder: Path) -> list[Entry]:
    """Everything in a folder of checkpoints that is one, was one or was to become one; by step, what has none last."""
    found = [entry for path in folder.iterdir() if path.is_dir() and (entry := _entry(path)) is not None]
    return sorted(found, key=lambda entry: (entry.step is None, entry.step, entry.path.name))


def _entry(path: Path) -> Entry | None:
    named = STEP_NAME.search(path.name)
    if named is None:
        return None
    step = int(named[1])
    if path.name.startswith(STAGING):
        return Entry(path, step, "unfinished")
    if BAD_SUFFIX in path.suffixes:
        return Entry(path, step, "set aside")
    if not STEP_NAME.fullmatch(path.name):
        return None
    try:
        manifest = read_manifest(path)
        tokens = read_meta(path).get("tokens")
    except CheckpointError as error:
        return Entry(path, step, "damaged", problem=str(error))
    saved = datetime.fromtimestamp((path / MARKER_NAME).stat().st_mtime, UTC)
    return Entry(path, step, "committed", sum(manifest.file_bytes.values()), saved, tokens)


def contents(checkpoint: Checkpoint) -> list[Group]:
    """The tensors of a checkpoint by kind: of the model, of each moment of the optimizer, and others."""
    groups: dict[str, list[str]] = {}
    for name in checkpoint.tensors:
        first, _, rest = name.partition(".")
        groups.setdefault(f"{first}.{rest.partition('.')[0]}" if first == "optimizer" else first, []).append(name)
    found = []
    for group, names in sorted(groups.items()):
        tensors = [checkpoint.tensors[name] for name in names]
        dtypes = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
        found.append(Group(group, len(names), sum(tensor.numel() for tensor in tensors), tuple(sorted(dtypes))))
    return found
