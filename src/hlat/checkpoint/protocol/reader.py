"""Read checkpoints: find the folder, verify it, and read its tensors.

    path given by a user --resolve--> a verified folder --Checkpoint--> meta, tensors, regions of tensors

Nothing here changes files, so the checkpoints of a run can be read while it trains.
"""

import logging
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hlat.checkpoint.format.index import StoredTensor
from hlat.checkpoint.format.partial_read import Region
from hlat.checkpoint.protocol.manifest import (
    MARKER_NAME,
    STEP_FOLDER,
    CheckpointManifest,
    read_manifest,
    read_stored_index,
    read_stored_meta,
    refuse_newer_format,
    verify_checkpoint,
)
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.errors import CheckpointError

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
        """Its manifest, read once."""
        return read_manifest(self.path)

    @cached_property
    def index(self) -> dict[str, StoredTensor]:
        """Tensors by name with their positions on disk; read once, checked against the sizes of the files."""
        try:
            return read_stored_index(self.path, self.manifest)
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

        Raises:
            CheckpointError: lists every tensor that is missing or differs.
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
            more = [f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
            head = f"{self.path}: {len(problems)} tensors do not fit the model and optimizer of the recipe"
            remedy = "Give the recipe the model and optimizer that `hlat checkpoint show` lists, or another checkpoint."
            raise CheckpointError("\n  ".join([head, *problems[:_LISTED], *more]) + f"\n{remedy}")

    def load(self, prefix: str) -> dict[str, torch.Tensor]:
        """Read the tensors whose names begin with ``prefix`` to the CPU; the result's keys lack the prefix."""
        loaded = self.read([name for name in self.tensors if name.startswith(prefix)])
        return {name.removeprefix(prefix): tensor for name, tensor in loaded.items()}

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read the named tensors to the CPU.

        Raises:
            CheckpointError: some names are not in the checkpoint; lists them.
        """
        names = list(names)
        absent = [name for name in names if name not in self.tensors]
        if absent:
            raise CheckpointError(f"{self.path}: has no tensor {', '.join(absent[:_LISTED])}")
        regions = [Region(name, (0,) * self.tensors[name].ndim, tuple(self.tensors[name].shape)) for name in names]
        return dict(zip(names, self.read_regions(regions), strict=True))

    def read_regions(self, regions: Sequence[Region]) -> list[torch.Tensor]:
        """Read regions of tensors to the CPU, in the saved dtype, whatever chunks they were saved in.

        Args:
            regions: regions inside tensors of the checkpoint; only their rows are read.

        Raises:
            CheckpointError: a file cannot be read, or contradicts the index.
        """
        return self.manifest.format.read_regions(self.path, self.index, regions)


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint without verifying it; the caller has just verified or written it."""
    return Checkpoint(folder, read_meta(folder))


def open_on_all_ranks(folder: Path, ranks: HostGroup) -> Checkpoint:
    """Open the same checkpoint on every rank, and check that all ranks see the files that rank 0 sees. Collective.

    Raises:
        CheckpointError: a rank does not see the checkpoint, or sees a different one.
    """
    marker = ranks.run_on_rank0(lambda: _marker(folder))
    return ranks.run_on_all(lambda: _open_same(folder, marker))


def _marker(folder: Path) -> bytes:
    try:
        return (folder / MARKER_NAME).read_bytes()
    except OSError as exc:
        raise CheckpointError(f"{folder}: not a readable checkpoint ({exc.strerror})") from exc


def _open_same(folder: Path, marker: bytes) -> Checkpoint:
    try:
        same = _marker(folder) == marker
    except CheckpointError:
        same = False
    if not same:
        raise CheckpointError(
            f"{folder}: {socket.gethostname()} does not see the checkpoint that rank 0 sees there. Put it on a file "
            "system that all machines of the run share, under the same path."
        )
    return open_checkpoint(folder)


def read_meta(folder: Path) -> dict[str, Any]:
    """Read the metadata of a checkpoint: step, tokens, samples, recipe, versions, ...

    Raises:
        CheckpointError: it is missing or invalid, or a newer version of hlat wrote it.
        StorageError: it exists but cannot be read.
    """
    try:
        return read_stored_meta(folder, read_manifest(folder))
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
    """Find the checkpoint that a path given by a user refers to, and verify every byte of it.

    Args:
        path: a checkpoint, a folder of checkpoints, or a run folder. If there are several checkpoints, the newest valid
            one is taken; each damaged newer one is logged as a warning.

    Returns:
        The folder of the checkpoint.

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
        _LOG.warning("%s is damaged and skipped: %s", folder, "; ".join(problems))
    if damaged:
        raise CheckpointError("\n  ".join([f"{root}: no checkpoint in it is valid", *damaged]))
    raise CheckpointError(f"{path}: no checkpoint there. {_hint(path)}")


def _others_here(path: Path) -> str:
    """Return what may be meant by a path of no checkpoint: those beside it, or what to give at all."""
    try:
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
    return "Give a run folder, its checkpoints folder, or one checkpoint."
