"""Models in and out: import, export to Hugging Face, averages of checkpoints."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hlat.api.arguments import checks_arguments

if TYPE_CHECKING:
    import torch


@checks_arguments
def average(
    checkpoints: str | Path | Sequence[str | Path],
    to: str | Path,
    *,
    last: int | None = None,
    coefficients: Sequence[float] | None = None,
    decay: float | None = None,
    weights: str = "model",
) -> Path:
    """Average the weights of several checkpoints of the same model, saved in any layouts.

    Sums are accumulated in float64 and rounded once, to the stored data type. Memory depends on neither the size of the
    model nor the number of checkpoints.

    Args:
        checkpoints: checkpoints (or run folders, which stand for their newest checkpoint), oldest first.
        to: checkpoint to be written; it must not exist.
        last: average this many newest checkpoints of the only entry of ``checkpoints``, a run folder.
        coefficients: a positive factor for each checkpoint; None for equal ones.
        decay: each checkpoint counts ``decay`` times as much as the next newer one.
        weights: "model", or "ema" for the moving averages, if the runs keep one.

    Returns:
        The folder of the average, which ``load_model``, ``evaluate``, ``generate``, ``hlat export`` and
        ``checkpoint.init_from`` take. Its metadata names the parents.

    Raises:
        CheckpointError: there is no valid checkpoint, the models differ, or the arguments are wrong.
        StorageError: the average cannot be written; nothing is left behind.
    """
    from hlat.checkpoint import average_checkpoints

    paths = [checkpoints] if isinstance(checkpoints, str | Path) else list(checkpoints)
    return average_checkpoints(paths, to, last=last, coefficients=coefficients, decay=decay, weights=weights)


@checks_arguments
def import_model(
    source: str | Path, to: str | Path, *, model: str | Path | None = None, tokenizer: str | Path | None = None
) -> Path:
    """Convert a model of another program to a checkpoint of its weights, without changing data types.

    Args:
        source: folder of the model: Hugging Face's, shards of HLAT or NxDT, or DCP files of torchtitan.
        to: checkpoint to be written; it must not exist, or be an empty folder.
        model: preset or config.json of the model, for formats that do not describe it.
        tokenizer: tokenizer.json, a SentencePiece model, or a folder with one of them; None for the source's own.

    Returns:
        The folder of the checkpoint, for ``checkpoint.init_from``, ``load_model``, ``export`` and ``generate``.

    Raises:
        RecipeError: hlat does not support this model, or there is no such preset.
        CheckpointError: the format is not known, files are missing or damaged, or ``to`` exists and is not empty.
        StorageError: a file-system operation failed; nothing is left behind.
    """
    from hlat.checkpoint import import_model as convert

    return convert(source, to, model=model, tokenizer=tokenizer)


@checks_arguments
def export(
    checkpoint: str | Path, to: str | Path, *, dtype: "torch.dtype | str | None" = None, weights: str = "model"
) -> Path:
    """Write a checkpoint as a Hugging Face model, with its tokenizer, that transformers loads.

    Args:
        checkpoint: a checkpoint, a checkpoints folder or a run folder.
        to: folder to be written; it must not exist, or be empty.
        dtype: data type of the files, as torch.bfloat16 or "bfloat16"; None for the stored one.
        weights: "model", or "ema" for the average of the weights, if the run keeps one.

    Returns:
        The folder.

    Raises:
        CheckpointError: there is no valid checkpoint, or no such weights, or ``to`` exists and is not empty.
        StorageError: a file-system operation failed; nothing is left behind.
    """
    from hlat.checkpoint import export_hf

    return export_hf(checkpoint, to, dtype=dtype, weights=weights)
