"""Averages of checkpoints."""

from collections.abc import Sequence
from pathlib import Path


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
