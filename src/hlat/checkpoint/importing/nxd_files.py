"""Files of NeuronX Distributed (NxD): one state dictionary for each tensor- and pipeline-parallel rank.

    [dp_rank_XX_][ep_rank_XX_]tp_rank_XX_pp_rank_XX.pt     names, with tensors or references to the files below
                                     ....pt.tensors/tensor_I.pt     one tensor each ("xser", which HLAT used)

All are read by ``torch.load(weights_only=True, mmap=True)``, which builds tensors and plain values and refuses every
class but one: the reference, which is replaced by a class of this file. Only tensors that are used are read from disk.
"""

import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hlat.runtime.errors import CheckpointError

SHARD = re.compile(r"(?:dp_rank_(?P<dp>\d+)_)?(?:ep_rank_(?P<ep>\d+)_)?tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)\.pt")

_LISTED = 8


class TensorReference:
    """A reference to the file of a tensor, in place of ``torch_xla.utils.serialization.TensorReference``."""

    tid: object = None


_REFERENCE = (TensorReference, "torch_xla.utils.serialization.TensorReference")


@dataclass(frozen=True)
class RankFile:
    """The state dictionary of a rank."""

    path: Path

    @cached_property
    def entries(self) -> dict[str, Any]:
        """Names and values: tensors, references, and others that are not weights.

        Raises:
            CheckpointError: the file is damaged, or would run code.
        """
        content = _load(self.path)
        if isinstance(content, Mapping) and isinstance(inner := content.get("model"), Mapping):
            content = inner
        if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
            raise CheckpointError(f"{self.path}: not a state dictionary.")
        return dict(content)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, whose values are read when they are used.

        Raises:
            CheckpointError: the rank has no such tensor, or its file is damaged.
        """
        value = self.entries.get(name)
        if isinstance(value, TensorReference):
            if type(value.tid) is not int or value.tid < 0:
                raise CheckpointError(f"{self.path}: {name} refers to an impossible file.")
            value = _load(self.path.with_name(f"{self.path.name}.tensors") / f"tensor_{value.tid}.pt")
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.layout != torch.strided:
            raise CheckpointError(f"{self.path}: {name} is missing, or not a tensor of floating-point numbers.")
        return value.detach()


def _load(path: Path) -> Any:
    """Load a file without running anything that it names."""
    try:
        with torch.serialization.safe_globals([_REFERENCE]):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: no such file. Copy the complete checkpoint, with its .tensors folders."
        ) from None
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0][:200]
        raise CheckpointError(f"{path}: not plain tensors; nothing was run ({reason}).") from error
    except Exception as error:  # torch raises many kinds for damaged files
        if isinstance(error, OSError) and error.errno is not None:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from error
        raise CheckpointError(
            f"{path}: damaged ({type(error).__name__}: {str(error)[:200]}). Copy it again."
        ) from error


@dataclass(frozen=True)
class RankFiles:
    """The files of all ranks.

    Attributes:
        tensor: tensor-parallel degree.
        pipeline: pipeline-parallel degree.
        by_rank: files by (tensor rank, pipeline rank).
    """

    tensor: int
    pipeline: int
    by_rank: Mapping[tuple[int, int], RankFile]

    def of_stage(self, pipeline_rank: int) -> Iterator[RankFile]:
        """Yield the files of a pipeline stage by tensor rank."""
        for tensor_rank in range(self.tensor):
            yield self.by_rank[tensor_rank, pipeline_rank]


def shard_folder(folder: Path) -> Path | None:
    """Find the folder that has the shards: the given one, or ``model`` in it; None if there are none."""
    for place in (folder, folder / "model"):
        if place.is_dir() and any(SHARD.fullmatch(file.name) for file in place.iterdir()):
            return place
    return None


def find_rank_files(folder: Path) -> RankFiles:
    """Find the model's file of every rank; data-parallel ranks have the same weights, so those of the first are taken.

    Raises:
        CheckpointError: files of some ranks are missing, or there are experts; lists all.
    """
    place = shard_folder(folder)
    matches = [(file, match) for file in (place or folder).iterdir() if (match := SHARD.fullmatch(file.name))]
    if any(int(match["ep"] or 0) > 0 for _, match in matches):
        raise CheckpointError(f"{folder}: has expert-parallel ranks; hlat has no mixtures of experts.")
    found = {
        (int(match["tp"]), int(match["pp"])): RankFile(file) for file, match in matches if int(match["dp"] or 0) == 0
    }
    tensor, pipeline = (1 + max((rank[axis] for rank in found), default=-1) for axis in (0, 1))
    missing = [
        f"tensor rank {tp}, pipeline rank {pp}"
        for pp in range(pipeline)
        for tp in range(tensor)
        if (tp, pp) not in found
    ]
    if missing or not found:
        more = [f"and {len(missing) - _LISTED} more"] if len(missing) > _LISTED else []
        listed = "; ".join([*missing[:_LISTED], *more]) or "data-parallel rank 0"
        raise CheckpointError(f"{folder}: files of ranks are missing: {listed}.")
    return RankFiles(tensor, pipeline, found)
