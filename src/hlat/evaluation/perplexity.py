"""The loss of a checkpoint over a whole validation split."""

import math
from dataclasses import dataclass
from pathlib import Path

from hlat.checkpoint import load_model, resolve
from hlat.config import DataError, parse_recipe
from hlat.data import ValidationData, open_prepared
from hlat.runtime import start
from hlat.training import validate


@dataclass(frozen=True)
class Perplexity:
    """Averages over every token of the split."""

    loss: float  # nats per token
    bits_per_byte: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss): how many tokens the model hesitates between."""
        return math.exp(self.loss)


def evaluate_checkpoint(checkpoint: str | Path, data: str | Path | None = None) -> Perplexity:
    """Evaluate a checkpoint on the validation split of its run, or of another prepared folder.

    Raises:
        CheckpointError: no valid checkpoint there.
        DataError: no prepared data, or data without a validation split.
    """
    folder = resolve(Path(checkpoint))
    model, meta = load_model(folder, start().device)
    if "recipe" not in meta:
        raise DataError(f"{folder}: imported weights know no data. Name a prepared folder with --data.")
    recipe = parse_recipe(meta["recipe"], str(folder))
    prepared = open_prepared(Path(data) if data is not None else recipe.prepared_dir)
    if not prepared.validation_tokens:
        raise DataError(f"{prepared.dir}: has no validation split. Prepare it with data.validation.fraction above 0.")
    fixed_set = ValidationData(prepared, recipe.data.sequence_length, sequences=None)
    device = next(model.parameters()).device
    result = validate(model, fixed_set, recipe.precision, device, recipe.batch.micro_batch)
    return Perplexity(result.loss, result.bits_per_byte, result.tokens)
