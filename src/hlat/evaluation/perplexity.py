"""Perplexity of a checkpoint over a complete validation split.

checkpoint -> model, recipe --+
prepared data -> its tokenizer compared with the checkpoint's -> validation windows --> loss, perplexity, bits per byte
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from hlat.checkpoint import check_same_tokenizer, load_model, saved_precision_mode
from hlat.checkpoint.protocol import resolve
from hlat.config import Recipe
from hlat.config.sections import ModelConfig
from hlat.data.prepared import PreparedData, check_vocabulary, open_prepared
from hlat.data.samples import ValidationData
from hlat.precision import MODES
from hlat.runtime import CheckpointError, DataError
from hlat.runtime.distributed import join_run
from hlat.training.validation import SingleProcessModel, validate

# For imported weights, which have no recipe. Longer windows may need too much memory: the logits of 4096 tokens over a
# vocabulary of 128,000 are 2 GB.
_IMPORT_WINDOW = 2048
_IMPORT_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Perplexity:
    """Averages over every token of the split."""

    loss: float  # nats per token
    bits_per_byte: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite if that overflows a float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


def evaluate_checkpoint(checkpoint: str | Path, data: str | Path | None = None, weights: str = "model") -> Perplexity:
    """Evaluate a checkpoint on the validation split of its run, or of another prepared folder.

    The split is cut into windows of the run's sequence length. Imported weights, which have no run, are evaluated in
    fp32 on windows of their maximum sequence length, 2048 tokens at most.

    Args:
        checkpoint: a checkpoint, a checkpoints folder or a run folder.
        data: prepared data; None takes data.prepared_dir of the run's recipe, or the folder ``data`` next to the
            checkpoints folder.
        weights: ``model``, or ``ema`` for their average.

    Raises:
        CheckpointError: the folder has no valid checkpoint.
        DataError: there is no prepared data, or it was made with another tokenizer, or has no validation split, or a
            shard of it is damaged.
    """
    folder = resolve(Path(checkpoint))
    model, meta = load_model(folder, join_run().device, torch.float32, weights)
    recipe = saved_recipe(meta, folder)
    prepared = open_prepared(Path(data) if data is not None else run_data(recipe, folder))
    _check_data(prepared, folder, model.config)
    prepared.check_shards("validation")
    if recipe is not None:
        length, batch = recipe.data.sequence_length, recipe.batch.micro_batch
        model.compute = MODES[saved_precision_mode(meta["recipe"])].compute
    else:
        length = min(model.config.max_sequence_length or _IMPORT_WINDOW, _IMPORT_WINDOW)
        batch = max(1, _IMPORT_BATCH_TOKENS // length)
    windows = ValidationData(prepared, length, None, recipe is not None and recipe.data.isolate)
    result = validate(SingleProcessModel(model), windows, batch)
    return Perplexity(result.loss, result.bits_per_byte, result.tokens)


def saved_recipe(meta: Mapping[str, Any], folder: Path) -> Recipe | None:
    """Return the recipe as resolved when the run was saved; None for imported weights."""
    if "recipe" not in meta:
        return None
    try:
        return Recipe.model_validate(meta["recipe"])
    except ValidationError as exc:
        raise CheckpointError(f"{folder}: this version cannot read its recipe: {exc}") from exc


def run_data(recipe: Recipe | None, folder: Path) -> Path:
    """Return the data folder of a checkpoint's run: run/data for run/checkpoints/step-00000040."""
    if recipe is None:
        raise DataError(f"{folder}: imported weights have no data of their own. Name a prepared folder with --data.")
    if recipe.data.prepared_dir is not None:
        return Path(recipe.data.prepared_dir)
    checkpoints = folder.absolute().parent
    if checkpoints.name != "checkpoints":
        raise DataError(
            f"{folder}: is not in the folder of its run, so its data is unknown. Name a prepared folder with --data."
        )
    return checkpoints.parent / "data"


def _check_data(prepared: PreparedData, folder: Path, config: ModelConfig) -> None:
    check_same_tokenizer(folder, prepared)
    check_vocabulary(prepared, config.vocab_size)
    if not prepared.validation_tokens:
        raise DataError(f"{prepared.dir}: has no validation split. Prepare it with data.validation.fraction above 0.")
