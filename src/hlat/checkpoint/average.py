"""The average of several checkpoints, as a checkpoint of weights.

    paths --newest n of a run, or each--> parents --same model, same tokenizer?--> sum of coefficient * weights
        --chunk by chunk: read, add in float64, divide, round once--> checkpoint

A chunk has at most a million elements. It is read from one parent after another and written before the next one, so
memory depends on neither the size of the model nor the number of parents. The parents may have been saved in any
layouts: all store canonical tensors.

Averages of the last checkpoints of a run: Izmailov et al. 2018 (arXiv 1803.05407); at constant learning rate Sandler et
al. 2023 (arXiv 2301.06133); HLAT's released 70B model is the mean of two (arXiv 2404.10630, table IV).
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hlat.checkpoint.format.filesystem import NEW_FOLDER_REMEDY, Disk, check_new_folder
from hlat.checkpoint.format.tensor_files import ComputedChunk, Region
from hlat.checkpoint.inventory import committed_checkpoints, find_checkpoints_folder
from hlat.checkpoint.protocol.commit import CheckpointContent, commit
from hlat.checkpoint.protocol.reader import MANIFEST_NAME, Checkpoint, hash_file, open_checkpoint, resolve, step_of_path
from hlat.checkpoint.saved_run import differing_tokenizers, software_versions, stored_tokenizer_files
from hlat.checkpoint.state import MODEL
from hlat.checkpoint.stored_model import model_config, weights_prefix
from hlat.config import ModelConfig, architecture_entry
from hlat.runtime.errors import CheckpointError
from hlat.runtime.terminal import TABLE_ROWS, listed

_CHUNK_ELEMENTS = 1 << 20  # 8 MiB in float64; each thread that writes needs a few times that
# Fields of the model section that do not change what given weights compute.
_NOT_COMPUTED_WITH = {"preset", "hf_config", "coalesce", "init_std", "init_scaled_outputs", "max_sequence_length"}


@dataclass(frozen=True)
class _Parent:
    """A checkpoint to be averaged."""

    checkpoint: Checkpoint  # verified
    prefix: str  # of the names of its weights
    coefficient: float  # before all are divided by their sum

    def record(self, share: float) -> dict[str, Any]:
        meta = self.checkpoint.meta
        return {
            "path": str(self.checkpoint.path.resolve()),
            "manifest_sha256": hash_file(self.checkpoint.path / MANIFEST_NAME),
            "step": self.checkpoint.step,
            "tokens": meta.get("tokens", 0),
            "weights": self.prefix.removesuffix("."),
            "share": share,
        }


def average_checkpoints(
    paths: Sequence[str | Path],
    out_dir: str | Path,
    *,
    last: int | None = None,
    coefficients: Sequence[float] | None = None,
    decay: float | None = None,
    weights: str = "model",
) -> Path:
    """Write the average of several checkpoints as a checkpoint of weights.

    The sum is accumulated in float64, in the order of the parents, and rounded once, to nearest, to the stored data
    type; if the parents differ in it, to the one that theirs promote to. The metadata has the parents' paths, steps,
    hashes and shares under ``average``.

    Args:
        paths: a checkpoint, checkpoints folder or run folder each, oldest first; of a folder the newest valid one.
        out_dir: checkpoint to be written; it must not exist, or be an empty folder.
        last: average this many newest checkpoints of the only path, a run folder; None averages ``paths``.
        coefficients: positive factor of each parent; they are divided by their sum. None for equal ones.
        decay: exponential average: each parent's factor is ``decay`` times that of the next newer one.
        weights: ``model``, or ``ema`` for the parents' moving averages.

    Raises:
        CheckpointError: no valid checkpoint at a path, parents differ in model or tokenizer, wrong arguments, or
            ``out_dir`` is not empty.
        StorageError: a file-system operation failed; nothing is left behind.
    """
    target = Path(out_dir).absolute()
    check_new_folder(target)
    checkpoints = [open_checkpoint(folder) for folder in _parents(paths, last)]
    factors = _factors(checkpoints, coefficients, decay)
    parents = [
        _Parent(checkpoint, weights_prefix(checkpoint, weights), factor)
        for checkpoint, factor in zip(checkpoints, factors, strict=True)
    ]
    config = _common_model(checkpoints)
    # The step, the recipe and the tokenizer are those of the newest parent.
    newest, total = checkpoints[-1], math.fsum(factors)
    meta = {
        "step": newest.step,
        "tokens": newest.meta.get("tokens", 0),
        "model": config.model_dump(mode="json"),
        **{key: newest.meta[key] for key in ("recipe", "special_ids", "generation_ids") if key in newest.meta},
        "versions": software_versions(),
        "average": [parent.record(parent.coefficient / total) for parent in parents],
    }
    content = CheckpointContent(newest.step, list(_chunks(parents)), meta, stored_tokenizer_files(newest.path))
    commit(Disk(), target, content, NEW_FOLDER_REMEDY)
    return target


def _parents(paths: Sequence[str | Path], last: int | None) -> list[Path]:
    """Find and verify the checkpoints to be averaged, oldest first; CheckpointError if fewer than two."""
    if last is None:
        found = [resolve(Path(path)) for path in paths]
    elif len(paths) != 1:
        raise CheckpointError(f"the last {last} checkpoints are those of one run folder, not of {len(paths)} paths.")
    else:
        found = [resolve(folder) for folder in _newest(Path(paths[0]), last)]
    if len(found) < 2:
        raise CheckpointError("an average needs two checkpoints or more. Name several, or a run folder and --last.")
    if len(set(found)) < len(found):
        raise CheckpointError("a checkpoint is named twice. Give it a larger coefficient instead.")
    return found


def _newest(run: Path, count: int) -> list[Path]:
    found = committed_checkpoints(find_checkpoints_folder(run))
    if not 0 < count <= len(found):
        there = listed((f"{step_of_path(path):,}" for path in found), TABLE_ROWS) or "none"
        raise CheckpointError(f"{run}: cannot average its last {count} checkpoints; steps of those it has: {there}.")
    return found[-count:]


def _factors(
    checkpoints: Sequence[Checkpoint], coefficients: Sequence[float] | None, decay: float | None
) -> list[float]:
    count = len(checkpoints)
    if coefficients is not None and decay is not None:
        raise CheckpointError("give either coefficients or a decay: each of them decides the factors of all parents.")
    if coefficients is not None:
        if len(coefficients) != count:
            raise CheckpointError(f"{len(coefficients)} coefficients for {count} checkpoints. Give one for each.")
        if not all(0 < factor < math.inf for factor in coefficients):
            raise CheckpointError(f"coefficients have to be positive numbers, not {list(coefficients)}.")
        return [float(factor) for factor in coefficients]
    if decay is None:
        return [1.0] * count
    if not 0 < decay < 1:
        raise CheckpointError(f"decay has to be between 0 and 1, both excluded, not {decay}.")
    steps = [checkpoint.step for checkpoint in checkpoints]
    if steps != sorted(steps):
        raise CheckpointError(f"a decay needs the checkpoints oldest first; their steps are {steps}. Reorder them.")
    return [decay ** (count - 1 - index) for index in range(count)]


def _common_model(checkpoints: Sequence[Checkpoint]) -> ModelConfig:
    """Model section of the newest parent; CheckpointError if parents compute differently or tokenize differently."""
    newest, config = checkpoints[-1], model_config(checkpoints[-1])
    problems = []
    for checkpoint in checkpoints[:-1]:
        other = _computed_with(model_config(checkpoint))
        problems += [
            f"{checkpoint.path}: model.{name} is {other[name]!r}, in {newest.path} it is {value!r}"
            for name, value in _computed_with(config).items()
            if other[name] != value
        ]
        if differing_tokenizers(checkpoint.manifest.files, newest.manifest.files):
            problems.append(f"{checkpoint.path}: its tokenizer is not that of {newest.path}")
    if problems:
        raise CheckpointError("\n  ".join(["only checkpoints of the same model can be averaged", *problems]))
    return config


def _computed_with(config: ModelConfig) -> dict[str, Any]:
    """Fields of the model section that change what the weights compute, with their defaults resolved."""
    fields: dict[str, Any] = config.model_dump(exclude=_NOT_COMPUTED_WITH)
    architecture = architecture_entry(config.architecture).computes_as
    return fields | {"architecture": architecture, "kv_heads": config.n_kv_heads, "head_dim": config.n_head_dim}


def _chunks(parents: Sequence[_Parent]) -> Iterator[ComputedChunk]:
    prefix = parents[-1].prefix
    for stored_name, stored in parents[-1].checkpoint.index.items():
        if not stored_name.startswith(prefix):
            continue
        name = stored_name.removeprefix(prefix)
        dtypes = (parent.checkpoint.index[parent.prefix + name].dtype for parent in parents)
        dtype = functools.reduce(torch.promote_types, dtypes)
        for offsets, sizes in _row_ranges(stored.shape):
            rows = torch.empty(sizes, dtype=dtype, device="meta")
            compute = functools.partial(_mean, parents, name, offsets, sizes, dtype)
            yield ComputedChunk(MODEL + name, stored.shape, offsets, (rows,), compute=compute)


def _row_ranges(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Divide a tensor into ranges of at most ``_CHUNK_ELEMENTS`` (one row at least): offsets and sizes."""
    count, columns = shape[0], shape[1:]
    step = max(1, _CHUNK_ELEMENTS // max(1, math.prod(columns)))
    for start in range(0, count, step):
        yield (start, *(0 for _ in columns)), (min(step, count - start), *columns)


def _mean(
    parents: Sequence[_Parent], name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    total = torch.zeros(sizes, dtype=torch.float64)
    for parent in parents:
        (values,) = parent.checkpoint.read_regions([Region(parent.prefix + name, offsets, sizes)])
        total.add_(values.double(), alpha=parent.coefficient)
    return round_once(total.div_(math.fsum(parent.coefficient for parent in parents)), dtype)


def round_once(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float64 values to the nearest value of a data type, ties to even."""
    if dtype.itemsize >= 4:
        return values.to(dtype)
    # torch converts float64 to 16 bits by way of float32 and so rounds twice: a value just above a tie first becomes
    # the tie. Here the first rounding is to odd (toward zero, then the last bit is set if the result is inexact).
    # Then the second one gives the nearest value, since float32 has more than two bits more than any 16-bit type
    # (Boldo and Melquiond 2008, theorem 3).
    narrow = values.float()
    too_large = narrow.double().abs() > values.abs()
    truncated = torch.where(too_large, torch.nextafter(narrow, torch.zeros_like(narrow)), narrow)
    inexact = truncated.double() != values
    odd = truncated.view(torch.int32) | inexact.int()
    return odd.view(torch.float32).to(dtype)
